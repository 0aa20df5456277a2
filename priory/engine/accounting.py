"""What a run's privacy costs: the sensitivity and the noise of what is released, and ε after so many rounds.

The accountants are dp-accounting's. Its events mean different things by a noise multiplier: σ over the distance between
neighbours everywhere but for Poisson sampling, where it is σ over the norm of one message, which is the distance when a
client is added or removed. So a sensitivity here is always that distance, and the noise multiplier σ over it:

    local              replace one client            2C: two messages in a ball of radius C
    central, fixed     replace one client            2C
    central, bernoulli add or remove one client      C
    a method that bounds its payload (`Bounded`)     what it states, for each of the two

Where P parts of a message are clipped apart (`Parted`), all are counted in units of their own norms C_p: each part of a
message is in a ball of radius 1, the message in one of radius √P, which takes the place of C.

Sampling amplifies privacy where nothing but one draw of a round depends on who is in it. Otherwise cohorts count as
known, which they may be since no data decide them, and a client's own participations add up: under local privacy, where
each message is released by itself; for groups that are sampled apart; and for a fixed-size cohort of clients that keep
a state, since who took whose place in an earlier round then shows in what they send now (or for a Bernoulli draw of
such clients that is cut so often that δ could see it).

A deployment adds discrete Gaussian noise on a grid (`deploy.noise`). Its Rényi divergences are at most those of the
Gaussian, in any number of dimensions (Canonne, Kamath and Steinke 2020, proposition 5), so participations are added up
by zCDP. Where sampling amplifies, the noise is compared with a Gaussian that was rounded to the grid, which costs no
privacy, and δ pays for the distance between the two.
"""

import dataclasses
import importlib
import math
import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import Array, lax

from priory.core import rng, trees
from priory.core.errors import UsageError
from priory.core.rng import Key, Stream
from priory.engine import architectures
from priory.engine.cohort import Participation
from priory.engine.settings import Settings
from priory.fed import privacy
from priory.fed.capabilities import AdviceWarning
from priory.fed.channel import is_statistic
from priory.fed.method import Channel, Method, Task
from priory.fed.parts import WHOLE, Parts
from priory.fed.shard import Shards

ORDERS = 1 + np.geomspace(1e-2, 1e5, 4000)  # Rényi orders, so dense that the best is within 1e-5 of the best of all
GRID_BITS = 30  # the grid of a deployment's noise is so many halvings of σ, and a factor below 2, apart
STEPS = 10  # halvings of a factor of 2 when noise is solved for: it is at most 0.07 % more than necessary
RARE = 1e-6  # probability that a client is drawn more often than is counted where cohorts are known
SIMULATED = "simulated: floating-point numbers from the seed of the run, which protect nobody"
UNCOVERED = (
    "not covered: evaluations, and the figures of a round, which the simulator tells of clients in the clear; a "
    "client's personal model stays with it and is not private from itself (joint differential privacy)"
)


class Spending(Protocol):
    """What the rounds of a run cost."""

    @property
    def accountant(self) -> str: ...

    @property
    def amplified(self) -> bool:
        """Whether it counts on nobody knowing who is drawn."""

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        """ε after so many rounds."""


@dataclass(frozen=True)
class Counted:
    """Every participation of a client counts, and the client with the most of them decides (sequential, parallel).

    Attributes:
        most: After t rounds, the participations of the client with the most, (rounds + 1,).
    """

    most: tuple[int, ...]
    accountant: str = "exact Gaussian composition over each client's own participations, the largest over clients"
    amplified: bool = False

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        num = self.most[rounds]
        # k mechanisms with noise z are one with z/√k.
        return _gaussian_epsilon(noise / math.sqrt(num), delta) if num else 0.0


@dataclass(frozen=True)
class Concentrated(Counted):
    """The same with discrete Gaussian noise, added up by zCDP."""

    accountant: str = "zCDP of the discrete Gaussian over each client's own participations, the largest over clients"

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        return concentrated_epsilon(self.most[rounds] / (2 * noise**2), delta)


@dataclass(frozen=True)
class OnGrid:
    """Sampled rounds with discrete Gaussian noise on so many numbers, compared with a Gaussian rounded to the grid.

    The χ² divergence of the two is 1/(288 s⁴) for each number, s = σ/grid ≥ 2³⁰, up to terms that are smaller still; so
    their total variation distance is below √size / (2 · 16 s²) a round, and δ grows by (1 + e^ε) of that for each.
    """

    sampled: "Poisson | WithoutReplacement"
    size: int
    amplified: bool = True

    @property
    def accountant(self) -> str:
        return f"{self.sampled.accountant}; discrete noise within δ/1000 of it"

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        found = self.sampled.epsilon(noise, rounds, delta * 0.999)
        distance = rounds * math.sqrt(self.size) / (32 * 4.0**GRID_BITS)
        return found if found < 100 and (1 + math.exp(found)) * distance <= delta / 1000 else math.inf


@dataclass(frozen=True)
class Poisson:
    """Each client is drawn independently, and a draw above the capacity is cut to a random part of it."""

    num_clients: int
    probability: float
    capacity: int
    amplified: bool = True
    accountant: str = "privacy loss distribution of the truncated Poisson-subsampled Gaussian (dp-accounting)"

    @property
    def share(self) -> float:
        """The share of rounds that a client is drawn in."""
        return self.probability

    @property
    def displaces(self) -> float:
        """The probability that a client is drawn where the others fill the capacity already."""
        return float(self.probability * scipy.stats.binom.sf(self.capacity - 1, self.num_clients - 1, self.probability))

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        return _poisson_epsilon(self, noise, rounds, delta) if rounds else 0.0


@dataclass(frozen=True)
class WithoutReplacement:
    """Each round draws so many clients, every choice equally likely."""

    num_clients: int
    cohort: int
    amplified: bool = True
    accountant: str = "Rényi DP of the Gaussian sampled without replacement, or no sampling if less (dp-accounting)"

    @property
    def share(self) -> float:
        """The share of rounds that a client is drawn in."""
        return self.cohort / self.num_clients

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        if rounds == 0:
            return 0.0
        renyi = importlib.import_module("dp_accounting.rdp.rdp_privacy_accountant")
        orders, rdp = _renyi(self.num_clients, self.cohort, noise)
        amplified = renyi.compute_epsilon(orders, rounds * rdp, delta)[0]
        # The bound for sampling is loose where nearly all are drawn; that each round counts fully is always true.
        return float(min(amplified, _gaussian_epsilon(noise / math.sqrt(rounds), delta)))


@dataclass(frozen=True)
class Ledger:
    """What a run releases, with how much noise, and what that costs.

    Attributes:
        mode: Who adds noise: each client to its message, or the server to the sum.
        delta: δ.
        budget: ε that may not be exceeded, if one was given.
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
        planned: Rounds that are planned.
        expected: Clients that a round expects.
        deployed: Whether noise is drawn on a grid, from a secure source; a simulation's is in floating point.
    """

    mode: Literal["central", "local"]
    delta: float
    budget: float | None
    noise: float
    clip: float
    reach: float
    sensitivity: float
    origin: str
    relation: str
    spending: Spending
    rounds: int
    planned: int
    expected: int
    deployed: bool = False
    parts: Parts = WHOLE
    together: tuple[str, ...] = ()

    def spent(self, rounds: int) -> float:
        """ε after so many rounds."""
        return self.spending.epsilon(self.noise, rounds, self.delta)

    @cached_property
    def sd(self) -> float:
        """σ of the noise on each number."""
        return self.noise * self.sensitivity

    @property
    def grid(self) -> float:
        """Distance between neighbouring numbers of a deployment's noise."""
        return grid_of(self.noise * self.reach)

    @property
    def spent_if_continuous(self) -> float:
        """ε after the rounds that are allowed if the same noise were Gaussian numbers of infinite precision."""
        spending = self.spending
        if isinstance(spending, OnGrid):
            spending = spending.sampled
        elif isinstance(spending, Concentrated):
            spending = Counted(spending.most)
        return spending.epsilon(self.noise, self.rounds, self.delta)

    def spent_if_cohorts_are_known(self, rounds: int) -> float | None:
        """Return ε after so many rounds against someone who learns every cohort; None without amplification.

        A client pays for each round that it takes part in. All take part in at most so many, but with probability 1e-6.
        """
        sampled = self.spending.sampled if isinstance(self.spending, OnGrid) else self.spending
        if not isinstance(sampled, Poisson | WithoutReplacement):
            return None
        most = int(scipy.stats.binom.isf(RARE / sampled.num_clients, rounds, sampled.share))
        return Concentrated(tuple(range(most + 1))).epsilon(self.noise, most, self.delta)

    def channel(self, canaries: privacy.Canaries | None = None) -> privacy.Private:
        """The uplink that releases so."""
        if self.mode == "local":
            return privacy.Noised(self.clip, self.sd, canaries, self.parts)
        return privacy.NoisedSum(self.clip, self.sd, float(self.expected), canaries, self.parts)

    def summary(self, rounds: int) -> dict[str, Any]:
        """What a summary tells after so many rounds."""
        return {
            "mode": self.mode,
            "epsilon": self.spent(rounds),
            "epsilon_if_cohorts_known": self.spent_if_cohorts_are_known(rounds),
            "delta": self.delta,
            "budget": self.budget,
            "rounds_allowed": self.rounds,
            "rounds_planned": self.planned,
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
    name: str,
    task: Task,
    participation: Participation,
    channel: Channel | None,
    shards: Shards,
    root: Key,
    deployed: bool = False,
) -> Ledger | None:
    """The ledger of a run with differential privacy, everything checked and the noise solved for; None without.

    Args:
        name: What the method is called.
        channel: One that the user gave, which privacy cannot go with.
        shards: Of all clients, for their shapes alone.
        deployed: Whether noise is drawn on a grid and cohorts from a secret.
    """
    mode = mode_of(chosen, method, name)
    if mode is None:
        return None
    _check_company(chosen, mode, method, name, channel)
    contact = architectures.first_contact(method, task, shards)
    _check_payload(contact.message.payload, name)
    _accounting()
    replaces = mode == "local" or participation.kind == "fixed"
    parts, together = _parts(chosen, method, name, contact.message.payload)
    clip, reach, origin = _reach(chosen, method, name, task, mode, replaces, parts)
    if deployed:
        _check_assumed(chosen.dp_sensitivity, reach)
    drawn = _spending(mode, participation, bool(jax.tree.leaves(contact.client)), root, chosen.rounds, chosen.dp_delta)
    size = trees.size(contact.message.payload)
    spending = _on_grid(drawn, size) if deployed else drawn
    noise = chosen.dp_noise
    if noise is None:
        assert chosen.dp_epsilon is not None
        noise = solve_noise(spending, chosen.dp_epsilon, chosen.dp_delta, chosen.rounds)
    sensitivity = reach if chosen.dp_sensitivity is None else chosen.dp_sensitivity
    if deployed and math.isinf(clip):  # rounding moves each number by less than the grid
        sensitivity += grid_of(noise * reach) * math.sqrt(size)
    return Ledger(
        mode=mode,
        delta=chosen.dp_delta,
        budget=chosen.dp_epsilon,
        noise=noise,
        clip=clip,
        reach=reach,
        sensitivity=sensitivity,
        origin=origin,
        relation="replace one client" if replaces else "add or remove one client",
        spending=spending,
        rounds=_rounds(chosen, spending, noise),
        planned=chosen.rounds,
        expected=participation.cohort,
        deployed=deployed,
        parts=parts,
        together=together,
    )


def grid_of(sd: float) -> float:
    """Return the distance of neighbouring numbers for noise of about this σ: a power of 2 that floats hold exactly."""
    return 2.0 ** (math.floor(math.log2(sd)) - GRID_BITS)


def advice(ledger: Ledger, num_clients: int) -> dict[str, str]:
    """What the numbers themselves tell the user to look at, by kind."""
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


def warn(told: dict[str, str], known: dict[str, str]) -> None:
    """Warn of what is not known yet, and remember it."""
    for kind, sentence in told.items():
        if kind not in known:
            warnings.warn(sentence, AdviceWarning, stacklevel=3)
    known.update(told)


def solve_noise(spending: Spending, epsilon: float, delta: float, rounds: int) -> float:
    """The least noise multiplier, up to 0.07 %, with which so many rounds cost at most ε."""
    rounds = max(rounds, 1)
    if isinstance(spending, Counted) and not isinstance(spending, Concentrated):
        num = max(spending.most[min(rounds, len(spending.most) - 1)], 1)
        # A last digit more, so that rounding does not exceed the budget.
        return _gaussian_noise(epsilon, delta) * math.sqrt(num) * (1 + 1e-9)

    def enough(noise: float) -> bool:
        return spending.epsilon(noise, rounds, delta) <= epsilon

    high = _gaussian_noise(epsilon, delta) * math.sqrt(rounds)  # as if nothing was sampled
    while not enough(high):
        high *= 1.01
    while enough(high / 2):
        high /= 2
    low, high = math.log(high / 2), math.log(high)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(math.exp(middle)) else (middle, high)
    return math.exp(high)


def rounds_within(spending: Spending, noise: float, epsilon: float, delta: float, planned: int) -> int:
    """The most of the planned rounds that cost at most ε."""
    low, high = 0, planned
    if spending.epsilon(noise, planned, delta) <= epsilon:
        return planned
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spending.epsilon(noise, middle, delta) <= epsilon else (low, middle)
    return low


def participations(participation: Participation, root: Key, rounds: int) -> np.ndarray:
    """After t rounds, the uploads of the client with the most, (rounds + 1,); no data decide who is drawn."""
    counted = 1 << max(rounds - 1, 63).bit_length()  # so many, so that other numbers of rounds compile nothing
    most = _most_uploads(root, participation=participation, rounds=counted)
    return np.concatenate([[0], np.asarray(most)[:rounds]]).astype(int)


@partial(jax.jit, static_argnames=("participation", "rounds"))
def _most_uploads(root: Key, *, participation: Participation, rounds: int) -> Array:
    def step(counts: Array, t: Array) -> tuple[Array, Array]:
        for slots in participation.draw_groups(rng.key(root, Stream.COHORT, t)):
            counts = counts.at[slots.ids].add(slots.uploads.astype(jnp.int32))
        return counts, jnp.max(counts)

    return lax.scan(step, jnp.zeros(participation.num_clients, jnp.int32), jnp.arange(rounds))[1]


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
    rounds = rounds_within(spending, noise, chosen.dp_epsilon, chosen.dp_delta, chosen.rounds)
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
    """The norm to clip to, how far one client reaches, and where the sensitivity comes from."""
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


def _check_assumed(sensitivity: float | None, reach: float) -> None:
    """Raise where a deployment assumes a sensitivity: its server could ask for hardly any noise, or for too much."""
    if sensitivity is not None and sensitivity != reach:
        raise UsageError(
            f"dp-sensitivity={sensitivity:g} is an assumption for simulations, since one client can change what is "
            f"released by {reach:.4g}; leave it out on a network."
        )


def _on_grid(drawn: Counted | Poisson | WithoutReplacement, size: int) -> Spending:
    """Return what the same rounds cost with discrete Gaussian noise on so many numbers."""
    return Concentrated(drawn.most) if isinstance(drawn, Counted) else OnGrid(drawn, size)


def _spending(
    mode: str, participation: Participation, stateful: bool, root: Key, rounds: int, delta: float
) -> Counted | Poisson | WithoutReplacement:
    num, cohort = participation.num_clients, participation.cohort
    if mode == "central" and participation.groups == 1 and cohort < num:
        if participation.kind == "bernoulli":
            drawn = Poisson(num, cohort / num, participation.capacity)
            # A draw that is cut displaces somebody too; it must be much less likely than what δ allows anyway.
            if not stateful or rounds * drawn.displaces <= delta / 1000:
                return drawn
        elif not stateful:
            return WithoutReplacement(num, cohort)
    return Counted(tuple(participations(participation, root, rounds).tolist()))


@lru_cache(maxsize=4096)
def _poisson_epsilon(spending: Poisson, noise: float, rounds: int, delta: float) -> float:
    accounting = _accounting()
    pld = importlib.import_module("dp_accounting.pld")
    # A grid of losses fine enough for what is to be resolved; the estimate is an upper bound on any grid.
    rough = _gaussian_epsilon(noise / math.sqrt(rounds), delta)
    accountant = pld.PLDAccountant(
        accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        value_discretization_interval=max(1e-4, rough / 20_000),
    )
    event = accounting.TruncatedSubsampledGaussianDpEvent(
        dataset_size=spending.num_clients,
        sampling_probability=spending.probability,
        truncated_batch_size=spending.capacity,
        noise_multiplier=noise,
    )
    return float(accountant.compose(event, rounds).get_epsilon(delta))


@lru_cache(maxsize=256)
def _renyi(num_clients: int, cohort: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Orders, and the Rényi divergence of one round at each."""
    accounting = _accounting()
    rdp = importlib.import_module("dp_accounting.rdp")
    accountant = rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    event = accounting.SampledWithoutReplacementDpEvent(num_clients, cohort, accounting.GaussianDpEvent(noise))
    accountant.compose(event)
    return accountant.orders, accountant.rdp


@lru_cache(maxsize=4096)
def concentrated_epsilon(rho: float, delta: float) -> float:
    """Return ε of (ε, δ)-DP that ρ-zCDP implies, by the best of many Rényi orders."""
    if rho == 0:
        return 0.0
    renyi = importlib.import_module("dp_accounting.rdp.rdp_privacy_accountant")
    return float(renyi.compute_epsilon(ORDERS, ORDERS * rho, delta)[0])


def _gaussian_epsilon(noise: float, delta: float) -> float:
    """ε of one Gaussian mechanism, exactly."""
    with np.errstate(divide="ignore"):  # its search may look at a probability of 0
        return float(_accounting().get_epsilon_gaussian(noise, delta))


def _gaussian_noise(epsilon: float, delta: float) -> float:
    """The noise multiplier of one Gaussian mechanism that is (ε, δ)-DP."""
    with np.errstate(divide="ignore"):
        return float(_accounting().get_sigma_gaussian(epsilon, delta))


def _accounting() -> Any:
    """The package dp-accounting, an extra."""
    try:
        return importlib.import_module("dp_accounting")
    except ModuleNotFoundError:
        raise UsageError("dp needs dp-accounting to know what it costs; install it with priory[privacy].") from None
