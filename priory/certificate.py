"""Certificates: a bound, at 1 − δ, on the true error of the model of a client that took no part in the training.

The federation's prior has not seen such a client, so PAC-Bayes holds with numbers (`priory.bayes.pac_bayes`). What is
bounded is the Gibbs classifier, which draws a network from q for every answer, and by twice that its majority vote. The
rows are those that q was made from: none need be held out.
"""

import math
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from priory.bayes import pac_bayes
from priory.core import rng
from priory.core.errors import UsageError
from priory.core.rng import Key, Stream
from priory.core.struct import struct
from priory.data import Federation
from priory.data.form import Form
from priory.evaluate import ClientSlot, EvaluationContext, Layout, batch_size, evaluated_posterior
from priory.fed.capabilities import Certifies
from priory.fed.checks import countable
from priory.fed.method import Method, Task
from priory.fed.shard import Shard, Shards
from priory.models.likelihood import Categorical

DELTA, DRAWS = 0.05, 1000
LEAST_DRAWS = 1000
MOST_KNOWN = 0.1  # share of a client's rows that may equal some of the participants' by chance
SAMPLING = 0.2  # share of δ that goes to the draws, which a few more of make up for

ASSUMPTIONS = (
    "the client's rows are independent draws of one distribution, and the error is that of new rows of it",
    "nothing that the federation learned or that was chosen for it (prior, scaling, settings, rounds) has seen them",
    "it is the only certificate that was tried: of several, the best holds with their number times delta",
)
ONE_EACH = (
    "groups are the unit: the client has one row of each {group!r}, these rows are independent draws of one "
    "distribution, and the error is that of a row drawn in the same way of a new {group!r}"
)
TOOK_PART = (
    "the client took part in the training, so that the prior has seen its rows; hold it out as a newcomer, or give the "
    "run of a federation without it as `prior` of `Run.certificate`"
)


@dataclass(frozen=True)
class Certificate:
    """Bounds on the error of a client's model, with all they are made of.

    Attributes:
        client: Its name; None for one that is not of the federation.
        rows: n, of the training part: those that q was made from.
        draws: m, networks drawn from q.
        delta: The chance that a bound fails, over the client's rows and over the draws.
        delta_sampling: What of it belongs to the draws.
        divergence: KL(q ‖ prior) in nats, or a bound on it.
        sampled_error: Mean error of the draws on the rows.
        empirical_error: What it shows of the error of q on the rows, at 1 − delta_sampling.
        kl_bound: On the true error, by inverting the binary divergence.
        lambda_bound: The same by PAC-Bayes-λ.
        weight: λ, the best.
        chance: The error of a guess, 1 − 1/classes.
        commonest_error: On the rows, of who always gives their commonest label.
        certifies: What q is.
        rounds: That the federation had done; None where nobody told.
        known: Rows that equal, label included, ones that participants trained on; right only if that is chance.
        assumptions: Under which the bounds hold.
    """

    client: str | None
    rows: int
    draws: int
    delta: float
    delta_sampling: float
    divergence: float
    sampled_error: float
    empirical_error: float
    kl_bound: float
    lambda_bound: float
    weight: float
    chance: float
    commonest_error: float
    certifies: str
    rounds: int | None = None
    known: int = 0
    assumptions: tuple[str, ...] = ASSUMPTIONS

    @property
    def majority_bound(self) -> float:
        """On the error of the majority vote of q: where it errs, half of q or more does."""
        return min(1.0, 2 * self.kl_bound)

    @property
    def vacuous(self) -> bool:
        """Whether a guess is bounded as well."""
        return self.kl_bound >= self.chance

    def to_json(self) -> dict[str, Any]:
        """All of it, for `certificate.json`."""
        found = asdict(self) | {"majority_bound": self.majority_bound, "vacuous": self.vacuous}
        return found | {"assumptions": list(self.assumptions)}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Certificate":
        """What `to_json` gave; raises `KeyError` or `TypeError` on anything else."""
        own = {field.name: table[field.name] for field in fields(cls)}
        return cls(**own | {"assumptions": tuple(own["assumptions"])})

    def lines(self) -> list[str]:
        """What is to be said of it, a line each; the assumptions last."""
        limits = {"Gibbs": self.kl_bound, "Gibbs, by PAC-Bayes-λ": self.lambda_bound, "majority": self.majority_bound}
        bounds = ", ".join(
            f"{name} {rounded_up(bound):.3f}{' (vacuous)' if bound >= self.chance else ''}"
            for name, bound in limits.items()
        )
        return [
            f"certificate: with probability {1 - self.delta:g} the error on new rows is at most: {bounds}",
            f"  chance {self.chance:.3f}, commonest label {self.commonest_error:.3f}; {self.rows} rows, "
            f"{self.divergence:.1f} nats from the prior, error {self.sampled_error:.3f} over {self.draws} draws",
            f"  of a network drawn from {self.certifies}",
            *([f"  {self.known} of the rows equal ones that participants trained on"] if self.known else []),
            *(f"  if {sentence}" for sentence in self.assumptions),
        ]


def rounded_up(bound: float) -> float:
    """The bound with three decimals: it is not to be printed smaller than it is."""
    return math.ceil(1000 * bound) / 1000


def summary(found: dict[str, Certificate]) -> str:
    """One line on the certificates of several clients."""
    median = rounded_up(float(np.median([one.kl_bound for one in found.values()])))
    useful = sum(not one.vacuous for one in found.values())
    one = next(iter(found.values()))
    return (
        f"certificates at {1 - one.delta:g} for each of {len(found)} newcomers: {useful} below chance "
        f"({one.chance:.3f}), median bound on the Gibbs error {median:.3f}, if their rows are independent "
        "and chose nothing"
    )


@struct
class Counts:
    """What a certificate is computed from.

    Attributes:
        wrong: Rows that each draw gets wrong, (draws,).
        divergence: KL(q ‖ prior), nats.
        labels: Rows of each class, (classes,).
    """

    wrong: Array
    divergence: Array
    labels: Array


def check(method: Method, name: str, task: Task, delta: float, draws: int) -> None:
    """Raises `UsageError` where there can be no certificate, with the reason."""
    check_numbers(delta, draws)
    if not isinstance(task.likelihood, Categorical):
        raise UsageError(
            "A regression has no certificate, since its loss is not bounded; use the intervals of `run.uncertainty()`."
        )
    reason = method.uncertified(task)
    if reason is None and not isinstance(method, Certifies):
        reason = (
            "it has no distribution over networks, and a single network is infinitely far from every prior; choose a "
            "Bayesian method, such as pfedbayes"
        )
    if reason is not None:
        raise UsageError(f"{name} has no certificate: {reason}.")


def check_numbers(delta: float, draws: int) -> None:
    """Raises `UsageError` on a chance or a number of draws that cannot be."""
    if not 0 < delta < 1:
        raise UsageError(f"delta={delta:g} is no chance of failing; choose a number between 0 and 1, such as 0.05.")
    if draws < LEAST_DRAWS:
        raise UsageError(f"draws={draws} says little about the model; choose {LEAST_DRAWS} or more.")
    countable("draws", draws)


def check_newcomers(federation: Federation) -> np.ndarray:
    """The newcomers that have training rows; raises `UsageError` where there are none."""
    num, refused = federation.num_clients, []
    ids = num + np.flatnonzero(federation.train.count[num:])
    if not len(ids):
        raise UsageError(
            "No client with training rows was held out, and of the others the prior has seen the rows; hold some out "
            "with --newcomers 0.2, or give `Run.certificate` a prior that has not seen the client."
        )
    for index in map(int, ids):
        try:
            check_groups(federation.form, group_of(federation, index), f"client {federation.clients[index]}")
        except UsageError as error:
            refused.append(error)
    if len(refused) == len(ids):
        raise refused[0]
    return ids


def group_of(federation: Federation, client: int) -> np.ndarray | None:
    """Return the groups of a client's training rows, where the federation has groups."""
    return None if federation.group is None else federation.group[federation.rows(client, "train")]


def check_groups(form: Form, group: np.ndarray | None, who: str) -> None:
    """Raise `UsageError` where rows may depend on each other: a bound on n rows takes them for independent.

    Args:
        group: The group of each row of the client; None where it is not known.
    """
    name = form.role("group")
    if name is None:
        return
    why = f"rows with the same {name!r} are not independent, and the bound needs rows that are"
    if group is None:
        raise UsageError(f"No certificate for {who}: {why}; give `onboard` the {name!r} of each row as `group`.")
    num = len(np.unique(group))
    if num < len(group):
        raise UsageError(
            f"No certificate for {who}: its {len(group)} training rows have {num} values of {name!r}, {why}; keep one "
            f"row of each {name!r} for a certificate with groups as the unit."
        )


def participants_rows(federation: Federation) -> set[bytes]:
    """Return the rows, labels included, that the participants trained on."""
    split, num = federation.train, federation.num_clients
    return {
        x.tobytes() + y.tobytes()
        for start, rows in zip(split.start[:num], split.count[:num], strict=True)
        for x, y in zip(federation.x[start : start + rows], federation.y[start : start + rows], strict=True)
    }


def check_rows(
    federation: Federation,
    seen: set[bytes],
    x: np.ndarray,
    y: np.ndarray,
    group: np.ndarray | None,
    who: str = "the client",
) -> int:
    """Return how many of a client's rows equal, label included, ones that participants trained on.

    Some do by chance, where inputs have few values. Raises `UsageError` where there are more, or where rows depend on
    each other.

    Args:
        federation: Of the participants.
        seen: The participants' rows.
    """
    check_groups(federation.form, group, who)
    x, y = x.astype(federation.x.dtype), y.astype(federation.y.dtype)
    known = sum(one.tobytes() + label.tobytes() in seen for one, label in zip(x, y, strict=True))
    if known > MOST_KNOWN * len(y):
        raise UsageError(
            f"{known} of {who}'s {len(y)} rows are among those that participants trained on, so that the prior has "
            "seen them; certify a client that took no part."
        )
    return known


def count(method: Method, task: Task, down: Any, posterior: Any, data: Shard, key: Key, num: int) -> Counts:
    """What `num` networks, drawn from what the method certifies of a posterior, say of the client's rows."""
    assert isinstance(method, Certifies)
    certified = method.certified(task, down, posterior)
    size, order = batch_size(data.capacity), jnp.arange(max(1, data.capacity))

    def one(key: Key) -> Array:
        network = certified.draw(key)

        def step(i: Array, wrong: Array) -> Array:
            batch = data.take(order, i, size)
            answer = jnp.argmax(task.model.apply(network, batch.x)[0], axis=-1)
            return wrong + jnp.sum((answer != batch.y) & (batch.mask > 0), dtype=jnp.int32)

        return lax.fori_loop(0, data.num_batches(size), step, jnp.int32(0))

    whole = data.padded()
    labels = jnp.sum(whole.mask[:, None] * jax.nn.one_hot(whole.y, task.likelihood.num_outputs), axis=0)
    # One network after another: side by side they take longer to compile than to answer.
    return Counts(lax.map(one, jax.random.split(key, num)), certified.divergence, labels)


def draw_key(root: Key, t: Array | int, place: Array | int) -> Key:
    """The key of a client's draws; it follows from the run, so that nobody draws until a bound is small."""
    return rng.key(root, Stream.CERTIFICATE, t, place)


@partial(jax.jit, static_argnames=("num", "visits", "layout"))
def counts_of_clients(
    context: EvaluationContext, train: Shards, slots: ClientSlot, *, num: int, visits: int, layout: Layout
) -> Counts:
    """The counts of each newcomer under the posterior that an evaluation would use, stacked."""

    def one(shared: tuple[EvaluationContext, Shards], slot: ClientSlot) -> Counts:
        context, train = shared
        data = train.of(slot.id)
        posterior, *_ = evaluated_posterior(context, slot, data, visits=visits, batched=layout.is_batched)
        key = draw_key(context.root, context.t, slot.id)
        return count(context.method, context.task, context.down, posterior, data, key, num)

    return layout.map(one, (context, train), slots)


@partial(jax.jit, static_argnames="num")
def counts_of(method: Method, task: Task, down: Any, posterior: Any, data: Shard, key: Key, *, num: int) -> Counts:
    """The counts of one client; its key is that of `draw_key`."""
    return count(method, task, down, posterior, data, key, num)


def conclude(
    counts: Counts,
    delta: float,
    certifies: str,
    client: str | None = None,
    rounds: int | None = None,
    known: int = 0,
    group: str | None = None,
) -> Certificate:
    """The certificate that the counts of one client give; its other numbers are those of `Certificate`.

    Args:
        group: What the rows are grouped by, each of them in a group of its own.
    """
    labels, draws = np.asarray(counts.labels), len(counts.wrong)
    rows, divergence = int(labels.sum()), float(counts.divergence)
    if rows == 0:
        raise UsageError(f"{client or 'The client'} has no rows to certify by; give it some.")
    if not math.isfinite(divergence):
        raise UsageError(
            f"The divergence of {client or 'the client'} from the prior is {divergence}, so that nothing is bounded; a "
            "posterior that has diverged or has no width is the cause, so lower the step size or widen it."
        )
    divergence = max(0.0, divergence)
    sampled = int(np.asarray(counts.wrong).sum(dtype=np.int64)) / (rows * draws)
    error = pac_bayes.sampled_error(sampled, draws, SAMPLING * delta)
    cost = pac_bayes.complexity(divergence, rows, (1 - SAMPLING) * delta)
    by_lambda, weight = pac_bayes.lambda_bound(error, cost)
    return Certificate(
        client=client,
        rows=rows,
        draws=draws,
        delta=delta,
        delta_sampling=SAMPLING * delta,
        divergence=divergence,
        sampled_error=sampled,
        empirical_error=error,
        kl_bound=pac_bayes.kl_bound(error, cost),
        lambda_bound=by_lambda,
        weight=weight,
        chance=1 - 1 / len(labels),
        commonest_error=1 - float(labels.max()) / rows,
        certifies=certifies,
        rounds=rounds,
        known=known,
        assumptions=ASSUMPTIONS if group is None else (ONE_EACH.format(group=group), *ASSUMPTIONS[1:]),
    )
