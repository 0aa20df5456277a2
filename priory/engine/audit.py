"""An empirical audit of a run's differential privacy: a lower bound on ε from one training run with canaries.

Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, arXiv:2305.08846.

The run is made again with m clients more, the canaries. Each sends a random direction of its own, as long as a message
may be, and a fair coin decides how: present or absent where the guarantee is about adding or removing a client, one of
two opposite messages where it is about replacing one. The auditor sees what is released (the noised mean of each round;
for local privacy the canary's noised messages), takes the inner product with the direction of each canary, summed over
rounds, and guesses the coins of the k highest and the k lowest scores; k = m/4 was fixed before any score was known.

Under (ε, δ)-DP the number of right guesses is hardly above Binomial(r, e^ε/(1 + e^ε)); their main theorem says by how
much. Many right guesses refute an ε that is too small. Few refute nothing: a bound below the claim is no proof of it.
Even if all guesses are right the bound has a limit, which follows from m and δ. A claim above the limit cannot be
refuted, so m is chosen from the claim: the least with which it could be.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from priory.core import memory, rng
from priory.core.errors import UsageError
from priory.core.files import write_atomically
from priory.core.rng import Stream
from priory.core.sealed import sealed
from priory.core.struct import replace
from priory.data import Federation, Split
from priory.engine import manifest
from priory.engine.accounting import Ledger
from priory.engine.prepared import Prepared, prepare
from priory.engine.settings import Settings
from priory.fed.method import Method
from priory.fed.privacy import Canaries
from priory.store import RunDirectory

FEWEST, MOST = 100, 2000  # canaries
CANARY_BYTES = 100  # of its name and its shards
CONFIDENCE = 0.95
ROUNDS = 16  # between two reports of progress


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        mode: central or local.
        relation: The neighbours that the claim is about.
        delta: δ of claim and bound.
        claim: ε that the accountant claims for the run.
        audited: ε that it claims for the run with canaries, whose cohorts are drawn from more clients.
        bound: ε below which the run is not (ε, δ)-DP, with 95 % confidence.
        limit: The bound that so many canaries show if all guesses are right: no claim above it can be refuted.
        canaries: m.
        guesses: r, coins that were guessed.
        correct: Of which were right.
        assumption: Where the sensitivity of the claim comes from.
    """

    mode: str
    relation: str
    delta: float
    claim: float
    audited: float
    bound: float
    limit: float
    canaries: int
    guesses: int
    correct: int
    assumption: str

    @property
    def refuted(self) -> bool:
        """Whether the bound is above the claim."""
        return self.bound > self.audited

    @property
    def holds(self) -> bool:
        """Whether the claim survived an audit that could have refuted it."""
        return not self.refuted and self.limit > self.audited

    @property
    def reach(self) -> str:
        """The claims that are out of reach, in words."""
        return f"cannot refute a claim above {self.limit:.4g} with {self.canaries} canaries"

    def to_json(self) -> dict[str, Any]:
        """Return the contents of audit.json."""
        found = {"refuted": self.refuted, "holds": self.holds, "reach": self.reach, "confidence": CONFIDENCE}
        return dataclasses.asdict(self) | found


def audit(
    path: Path | str,
    *,
    canaries: int | None = None,
    seed: int | None = None,
    federation: Federation | None = None,
    method: Method | None = None,
    model: Any = None,
    told: Callable[[int, int], None] = lambda done, total: None,
    trust_code: bool = False,
) -> Audit:
    """Audit the run in a directory, which is made again with canaries; the result is written there as audit.json.

    Args:
        canaries: m, at least 100; by default the least that could refute the claim. Where 2000 could not, the number up
            to 2000 with the highest limit.
        seed: Of all randomness of the audit; that of the run by default. Another one is another audit.
        federation: The data, where they came from arrays and no name describes them.
        method: As it was given to `simulate`, if it is not registered.
        model: As it was given to `simulate`, if it was an object.
        told: Called with the number of rounds that are done, and of all.
        trust_code: As for `resume`.
    """
    if canaries is not None and canaries < FEWEST:
        raise UsageError(f"canaries={canaries} are too few to refute much; give {FEWEST} or more.")
    memory.check(f"canaries={canaries}", (canaries or 0) * CANARY_BYTES, "choose fewer canaries")
    directory = RunDirectory(path)
    table, file = directory.manifest(), directory.path / "manifest.toml"
    has_model = model is not None
    recipe = manifest.read(table, federation, method, file=file, has_model=has_model, trust_code=trust_code)
    if model is None and "model" in recipe.given:
        raise UsageError(
            f"The run in {path} was given model={recipe.given['model']}, which a manifest cannot hold; pass it again."
        )
    if not directory.is_committed():
        raise UsageError(f"{path} holds no checkpoint that tells of its noise; name the directory of a private run.")
    noise = directory.committed().get("noise", recipe.settings.dp_noise)  # what the run had, not what is solved today
    settings = dataclasses.replace(recipe.settings, dp_noise=noise)
    plain = prepare(recipe.method, recipe.federation, settings, model)
    if plain.ledger is None:
        raise UsageError(f"The run in {path} claims no differential privacy that could be audited; run it with --dp.")
    rounds, delta = plain.ledger.rounds, plain.ledger.delta
    num = canaries or _number(plain.ledger.spent(rounds), delta)
    crowd, ledger = _with(plain, recipe, num, seed, model)
    while canaries is None and (more := _number(ledger.spent(rounds), delta)) > num:
        num = more  # cohorts drawn from more clients may cost more than the claim
        crowd, ledger = _with(plain, recipe, num, seed, model)
    signs, scores = _observe(crowd, ledger, num, rounds, told)
    found = _judge(plain.ledger, ledger, signs, scores)
    write_atomically(directory.path / "audit.json", sealed(found.to_json(), indent=2))
    return found


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the most that P(at least so many guesses are right) can be under (ε, δ)-DP, their main theorem.

    β + 2mδ · max_i P(v > B ≥ v − i) / i with β = P(B ≥ v) and B ~ Binomial(r, e^ε / (1 + e^ε)), v right of r guesses.
    """
    right = 1 / (1 + math.exp(-epsilon))
    law = stats.binom(guesses, right)
    beta = float(law.sf(correct - 1))
    below = np.cumsum(law.pmf(correct - np.arange(1, correct + 1)))  # P(v > B ≥ v − i), i = 1 … v
    alpha = float(np.max(below / np.arange(1, correct + 1), initial=0.0))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """Return the largest ε, up to 10⁻⁶, that is refuted: whose p-value is at most 1 − confidence; 0 if none is."""

    def refuted(epsilon: float) -> bool:
        return p_value(canaries, guesses, correct, epsilon, delta) <= 1 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def limit(canaries: int, delta: float) -> float:
    """Return the bound if all guesses are right, which is the highest that so many canaries can show."""
    guesses = _guesses(canaries)
    return lower_bound(canaries, guesses, guesses, delta)


def enough(epsilon: float, delta: float) -> int | None:
    """Return the least number of canaries that could refute a claim of ε; None if it is more than 2000."""
    right = 1 / (1 + math.exp(-epsilon))

    def refutes(canaries: int) -> bool:
        guesses = _guesses(canaries)
        if right**guesses > 1 - CONFIDENCE:  # the p-value is at least this
            return False
        return p_value(canaries, guesses, guesses, epsilon, delta) <= 1 - CONFIDENCE

    # Only every fourth adds a guess. The limit may fall again, since m multiplies δ in the p-value.
    return next(filter(refutes, range(FEWEST, MOST + 1, 4)), None)


def right_guesses(scores: np.ndarray, heads: np.ndarray, each: int) -> int:
    """Return how many guesses are right: heads for the `each` highest scores, tails for the lowest, none between."""
    order = np.argsort(scores, kind="stable")
    return int(np.sum(heads[order[-each:]]) + np.sum(~heads[order[:each]]))


def with_canaries(federation: Federation, num: int) -> Federation:
    """Return the clients that take part and `num` canaries, which borrow the examples of the smallest client."""
    own = federation.num_clients
    counts = federation.train.count[:own]
    lender = int(np.argmin(np.where(counts > 0, counts, np.iinfo(np.int32).max)))

    def lent(split: Split, empty: bool) -> Split:
        start, count = np.full(num, split.start[lender]), np.full(num, 0 if empty else split.count[lender])
        return Split(
            np.concatenate([split.start[:own], start]).astype(np.int32),
            np.concatenate([split.count[:own], count]).astype(np.int32),
        )

    return dataclasses.replace(
        federation,
        train=lent(federation.train, empty=False),
        validation=lent(federation.validation, empty=True),
        test=lent(federation.test, empty=True),
        clients=(*federation.clients[:own], *(f"canary-{i}" for i in range(num))),
        num_newcomers=0,
        truth={},
    )


def _guesses(canaries: int) -> int:
    """Return how many coins are guessed: a quarter of them heads, a quarter tails."""
    return 2 * (canaries // 4)


def _number(epsilon: float, delta: float) -> int:
    """Return a number of canaries that suffices for a claim, or that of the highest limit."""
    return enough(epsilon, delta) or max(range(FEWEST, MOST + 1, FEWEST), key=lambda num: limit(num, delta))


def _with(
    plain: Prepared, recipe: manifest.Recipe, canaries: int, seed: int | None, model: Any
) -> tuple[Prepared, Ledger]:
    """Return the run with so many canaries before its first round, and its ledger."""
    chosen = _settings(plain, canaries, recipe.settings.seed if seed is None else seed)
    ready = prepare(recipe.method, with_canaries(recipe.federation, canaries), chosen, model)
    assert ready.ledger is not None
    return ready, ready.ledger


def _settings(plain: Prepared, canaries: int, seed: int) -> Settings:
    """Return the settings of the run for more clients: the same noise, and each client is drawn as often."""
    assert plain.ledger is not None
    drawn = plain.plan.participation

    def scaled(num: int) -> int:
        return round(num * (drawn.num_clients + canaries) / drawn.num_clients)

    return dataclasses.replace(
        plain.settings,
        dp=plain.ledger.mode,
        dp_noise=plain.ledger.noise,
        dp_epsilon=None,
        cohort=scaled(drawn.cohort),
        active=scaled(drawn.active) if drawn.active > drawn.cohort else None,
        seed=seed,
        eval_every=0,
    )


def _observe(
    ready: Prepared, ledger: Ledger, canaries: int, rounds: int, told: Callable[[int, int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the coins, and the score of each canary after so many rounds."""
    key = rng.key(ready.root, Stream.CANARY)
    heads = np.asarray(jax.random.bernoulli(jax.random.fold_in(key, 0), shape=(canaries,)))
    opposite = ledger.relation.startswith("replace")
    singing = Canaries(
        first=jnp.int32(ready.task.num_clients - canaries),
        signs=jnp.asarray(np.where(heads, 1.0, -1.0 if opposite else 0.0), jnp.float32),
        radius=ledger.reach / 2 if opposite else ledger.reach,  # two opposite messages are as far apart as any two
        key=jax.random.fold_in(key, 1),
        parts=ledger.parts,
    )
    inputs = replace(ready.inputs, channel=ledger.channel(singing), validation=None)
    server, states, scores = ready.first_server(), ready.client_states(), np.zeros(canaries)
    for start in range(0, rounds, ROUNDS):
        stop = min(start + ROUNDS, rounds)
        server, trace = states.run(inputs, server, start, stop)
        assert trace.scores is not None
        scores += np.asarray(trace.scores, np.float64).sum(axis=0)
        told(stop, rounds)
    return heads, scores


def _judge(claimed: Ledger, audited: Ledger, heads: np.ndarray, scores: np.ndarray) -> Audit:
    num, guesses = len(heads), _guesses(len(heads))
    correct = right_guesses(scores, heads, guesses // 2)
    return Audit(
        mode=claimed.mode,
        relation=claimed.relation,
        delta=claimed.delta,
        claim=claimed.spent(claimed.rounds),
        audited=audited.spent(claimed.rounds),
        bound=lower_bound(num, guesses, correct, claimed.delta),
        limit=limit(num, claimed.delta),
        canaries=num,
        guesses=guesses,
        correct=correct,
        assumption=claimed.origin,
    )
