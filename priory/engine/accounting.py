"""What a run's privacy costs: the sensitivity and the noise of what is released, and ε after so many rounds.

A sensitivity is the distance between what is released of neighbouring federations, and the noise multiplier σ over it:

    local              replace one client            2C: two messages in a ball of radius C
    central, fixed     replace one client            2C
    central, bernoulli add or remove one client      C
    a method that bounds its payload (`bounded`)     what it states, for each of the two

Where P parts of a message are clipped apart (`parts`), all are counted in units of their own norms C_p: each part of a
message is in a ball of radius 1, the message in one of radius √P, which takes the place of C. `accountants` computes
what rounds cost.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import scipy

from priory import methods
from priory.core import rng, trees
from priory.core.errors import UsageError
from priory.engine import accountants, architectures
from priory.engine.accountants import Concentrated, Counted, OnGrid, Poisson, Spending, WithoutReplacement
from priory.engine.cohort import Participation
from priory.engine.settings import Settings
from priory.fed import privacy
from priory.fed.channel import is_statistic
from priory.fed.method import Channel, Method, Task
from priory.fed.parts import WHOLE, Parts
from priory.fed.shard import Shards

RARE = 1e-6  # probability that a client is drawn more often than is counted where cohorts are known
SIMULATED = "simulated: floating-point numbers from the seed of the run, which protect nobody"
UNCOVERED = (
    "not covered: evaluations, and the figures of a round, which the simulator tells of clients in the clear; a "
    "client's personal model stays with it and is not private from itself (joint differential privacy)"
)


@dataclass(frozen=True)
class Ledger:
    """What a run releases, with how much noise, and what that costs.

    Attributes:
        mode: Who adds noise: each client to its message, or the server to the sum.
        settings: Of the run: δ, the budget and the rounds that are planned.
        noise: σ / sensitivity.
        clip: C, infinite where the method bounds its payload.
        parts: What is clipped apart; clip, reach, sensitivity and σ are in their units.
        together: Parts of different scale that are clipped as one.
        reach: How far what is released can move when one client changes.
        sensitivity: What that was taken for: the reach, or an assumption of the user's.
        origin: Where the sensitivity comes from.
        relation: Which change of one client.
        spending: What rounds cost.
        rounds: Rounds that the budget allows, at most those that are planned.
        expected: Clients that a round expects.
        deployed: Whether noise is drawn on a grid, from a secure source; a simulation's is in floating point.
    """

    mode: Literal["central", "local"]
    settings: Settings
    noise: float
    clip: float
    reach: float
    sensitivity: float
    origin: str
    relation: str
    spending: Spending
    rounds: int
    expected: int
    deployed: bool = False
    parts: Parts = WHOLE
    together: tuple[str, ...] = ()

    @property
    def delta(self) -> float:
        """δ of the guarantee."""
        return self.settings.dp_delta

    def spent(self, rounds: int) -> float:
        """Return ε after so many rounds."""
        return self.spending.epsilon(self.noise, rounds, self.delta)

    @cached_property
    def sd(self) -> float:
        """σ of the noise on each number."""
        return self.noise * self.sensitivity

    @property
    def grid(self) -> float:
        """Distance between neighbouring numbers of a deployment's noise."""
        return accountants.grid_of(self.noise * self.reach)

    @property
    def spent_if_continuous(self) -> float:
        """ε after the rounds that are allowed if the same noise were Gaussian numbers of infinite precision."""
        return self.spending.continuous.epsilon(self.noise, self.rounds, self.delta)

    def spent_if_cohorts_are_known(self, rounds: int) -> float | None:
        """Return ε after so many rounds against someone who learns every cohort; None without amplification.

        A client pays for each round that it takes part in. All take part in at most so many, but with probability 1e-6.
        """
        sampled = self.spending.continuous
        if not isinstance(sampled, Poisson | WithoutReplacement):
            return None
        most = int(scipy.stats.binom.isf(RARE / sampled.num_clients, rounds, sampled.share))
        return Concentrated(tuple(range(most + 1))).epsilon(self.noise, most, self.delta)

    def channel(self, canaries: privacy.Canaries | None = None) -> privacy.Private:
        """Return the uplink that clips and adds the noise."""
        if self.mode == "local":
            return privacy.Noised(self.clip, self.sd, canaries, self.parts)
        return privacy.NoisedSum(self.clip, self.sd, float(self.expected), canaries, self.parts)

    def summary(self, rounds: int) -> dict[str, Any]:
        """Return the entries of a summary after so many rounds."""
        return {
            "mode": self.mode,
            "epsilon": self.spent(rounds),
            "epsilon_if_cohorts_known": self.spent_if_cohorts_are_known(rounds),
            "delta": self.delta,
            "budget": self.settings.dp_epsilon,
            "rounds_allowed": self.rounds,
            "rounds_planned": self.settings.rounds,
            "noise_multiplier": self.noise,
            "sd": self.parts.by_name(self.sd),
            "clip": self.parts.by_name(self.clip) if math.isfinite(self.clip) else None,
            "sensitivity": self.sensitivity,
            "sensitivity_from": self.origin,
            "noise": f"discrete Gaussian on a grid of {self.grid:.3g}" if self.deployed else SIMULATED,
            "unit": "client",
            "relation": self.relation,
            "accountant": self.spending.accountant,
            "not_covered": UNCOVERED,
        }


def open_ledger(
    chosen: Settings,
    method: Method,
    task: Task,
    participation: Participation,
    channel: Channel | None,
    shards: Shards,
    deployed: bool = False,
) -> Ledger | None:
    """Return the ledger of a run with differential privacy, all checked and the noise solved for; None without.

    Args:
        channel: One that the user gave, which privacy cannot go with.
        shards: Of all clients, for their shapes alone.
        deployed: Whether noise is drawn on a grid and cohorts from a secret.
    """
    name = methods.name_of(method)
    mode = mode_of(chosen, method, name)
    if mode is None:
        return None
    _check_company(chosen, mode, method, name, channel)
    contact = architectures.first_contact(method, task, shards)
    payload = contact.message.payload
    _check_payload(payload, name)
    accountants.dp_accounting()
    replaces = mode == "local" or participation.kind == "fixed"
    parts, together = _parts(chosen, method, name, payload)
    clip, reach, origin = _reach(chosen, method, name, task, mode, replaces, parts)
    sensitivity = reach if chosen.dp_sensitivity is None else chosen.dp_sensitivity
    if deployed and sensitivity != reach:  # the server could ask for hardly any noise, or for too much
        raise UsageError(
            f"dp-sensitivity={sensitivity:g} is an assumption for simulations, since one client can change what is "
            f"released by {reach:.4g}; leave it out on a network."
        )
    keeps_state, root = bool(jax.tree.leaves(contact.client)), rng.root(chosen.seed)
    drawn = accountants.spending_of(mode, participation, keeps_state, root, chosen.rounds, chosen.dp_delta)
    spending: Spending = drawn
    if deployed:
        spending = Concentrated(drawn.most) if isinstance(drawn, Counted) else OnGrid(drawn, trees.size(payload))
    noise = chosen.dp_noise
    if noise is None:
        assert chosen.dp_epsilon is not None
        noise = accountants.solve_noise(spending, chosen.dp_epsilon, chosen.dp_delta, chosen.rounds)
    if deployed and math.isinf(clip):  # rounding moves each number by less than the grid
        sensitivity += accountants.grid_of(noise * reach) * math.sqrt(trees.size(payload))
    return Ledger(
        mode=mode,
        settings=chosen,
        noise=noise,
        clip=clip,
        reach=reach,
        sensitivity=sensitivity,
        origin=origin,
        relation="replace one client" if replaces else "add or remove one client",
        spending=spending,
        rounds=_rounds(chosen, spending, noise),
        expected=participation.cohort,
        deployed=deployed,
        parts=parts,
        together=together,
    )


def advice(ledger: Ledger, num_clients: int) -> dict[str, str]:
    """Return advice that follows from the numbers alone, by kind."""
    told = {}
    if ledger.delta >= 1 / num_clients:
        told["delta"] = (
            f"dp-delta={ledger.delta:g} is not below 1/{num_clients}, so giving away one client of {num_clients} "
            f"in full would be allowed; choose a smaller one, such as {0.1 / num_clients:.1g}."
        )
    if ledger.together:
        told["clip"] = (
            f"dp-clip={ledger.clip:g} clips {' and '.join(ledger.together)} as one, and where their scales differ, "
            f"little is left of the smaller; give a norm for each, --dp-clip {','.join(ledger.together).upper()}."
        )
    return told


def mode_of(chosen: Settings, method: Method, name: str) -> Literal["central", "local"] | None:
    if chosen.dp is not None:
        if chosen.dp_epsilon is None and chosen.dp_noise is None:
            raise UsageError(f"dp={chosen.dp} needs a budget or noise; give --dp-epsilon 4 or --dp-noise 1.")
        return chosen.dp
    for field in ("dp_epsilon", "dp_noise", "dp_sensitivity", "dp_clip", "dp_delta"):
        value = getattr(chosen, field)
        if value != getattr(Settings(), field):
            if method.bounded and field in ("dp_epsilon", "dp_noise"):
                return "local"  # it was made for noise on its messages
            said = f"{field.replace('_', '-')}={value if isinstance(value, str) else f'{value:g}'}"
            raise UsageError(
                f"{said} says how private {name} is to be, but not in which form; add --dp central or local."
            )
    return None


def _check_company(chosen: Settings, mode: str, method: Method, name: str, channel: Channel | None) -> None:
    """Raise on what cannot go together with privacy."""
    said = f"dp={mode}"
    if method.pools:
        raise UsageError(f"{said} protects what clients send, but {name} pools their data; leave it out.")
    if mode == "central" and not method.linear:
        has_form = any(field.name == "linear" for field in dataclasses.fields(method))
        form = ", or its linear form (--linear)" if has_form else ""
        raise UsageError(f"{said} releases a sum, but {name} is not linear: it needs them all; use --dp local{form}.")
    if chosen.compress is not None:
        raise UsageError(f"{said} and compress={chosen.compress} both change what is sent; give one of them.")
    if channel is not None:
        raise UsageError(f"{said} and channel={channel} both change what is sent; give one of them.")
    if chosen.exclude_uncertain:
        raise UsageError(
            f"{said} does not cover what exclude-uncertain={chosen.exclude_uncertain} tells of clients; choose 0."
        )
    if chosen.weighting == "examples":
        raise UsageError(
            f"{said} keeps numbers of examples private, which weighting=examples sends; use method or uniform."
        )


def _check_payload(payload: Any, name: str) -> None:
    """Raise on a payload that is not all numbers that noise can be added to."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(payload)
    if not trees.size(payload):
        raise UsageError(f"{name} sends nothing that dp could protect; leave it out.")
    for path, leaf in leaves:
        place = trees.path_of(path)
        if is_statistic(place):
            raise UsageError(
                f"dp does not cover batch-norm statistics, and the model sends {place} in the clear; "
                "choose a model without batch norm."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise UsageError(
                f"dp adds noise to numbers, but {name} also sends {place} as a whole number in the clear; "
                "choose another method."
            )


def _parts(chosen: Settings, method: Method, name: str, payload: Any) -> tuple[Parts, tuple[str, ...]]:
    """Return what is clipped apart, and what could be and is clipped as one; parts without numbers do not count."""
    norms = chosen.dp_clips
    names = () if method.bounded else tuple(method.parts)
    found = Parts(names).split(payload) if names else []
    held = tuple(part for part, tree in zip(names, found, strict=True) if trees.size(tree))
    if len(norms) == 1:
        return WHOLE, held if len(held) > 1 else ()
    if len(norms) != len(names):
        several = f"{len(names)} parts ({', '.join(names)}); give one number, or {len(names)}"
        which = several if names else "one part; give one"
        raise UsageError(f"dp-clip={chosen.dp_clip} has {len(norms)} numbers, and a message of {name} has {which}.")
    units = dict(zip(names, norms, strict=True))
    return Parts(held, tuple(units[part] for part in held)), ()


def _rounds(chosen: Settings, spending: Spending, noise: float) -> int:
    """Return how many of the planned rounds the budget allows; raise if it allows none."""
    if chosen.dp_epsilon is None:
        return chosen.rounds
    rounds = accountants.rounds_within(spending, noise, chosen.dp_epsilon, chosen.dp_delta, chosen.rounds)
    if rounds == 0 < chosen.rounds:
        first = spending.epsilon(noise, 1, chosen.dp_delta)
        raise UsageError(
            f"dp-epsilon={chosen.dp_epsilon:g} is too small for even one round, which costs {first:.4g} with "
            f"dp-noise={noise:g}; give a larger budget or more noise, or leave out dp-noise."
        )
    return rounds


def _reach(
    chosen: Settings, method: Method, name: str, task: Task, mode: str, replaces: bool, parts: Parts
) -> tuple[float, float, str]:
    """Return the norm to clip to, how far one client reaches, and where the sensitivity comes from."""
    if method.bounded:
        found, origin = float(method.sensitivity(task, replaces=replaces)), f"stated by {name}"
        # In a sum the bound is enforced as well: when a client is added, its whole difference is.
        clip = math.inf if mode == "local" else float(method.sensitivity(task, replaces=False))
    else:
        clip = 1.0 if parts.names else chosen.dp_clips[0]
        found = 2 * clip * parts.norm if replaces else clip * parts.norm
        origin = f"dp-clip {clip:g}"
        if parts.names:
            norms = ", ".join(f"{part} {norm:g}" for part, norm in parts.by_name(1.0).items())
            origin = f"sqrt({len(parts.names)}) x dp-clip of each part: {norms}"
        origin = f"2 x {origin}" if replaces else origin
    if chosen.dp_sensitivity is not None:
        origin = f"an assumption (dp-sensitivity) in place of {found:.6g}, {origin}"
    return clip, found, origin
