"""Accountants: ε after so many rounds, the noise that a budget needs, and the rounds that it allows.

The mathematics is dp-accounting's. Its events mean different things by a noise multiplier: σ over the distance between
neighbours everywhere but for Poisson sampling, where it is σ over the norm of one message, which is the distance when a
client is added or removed. Here it is always σ over that distance.

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

import abc
import bisect
import importlib
import math
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import Array, lax

from priory.core import rng
from priory.core.errors import UsageError
from priory.core.rng import Key, Stream
from priory.engine.cohort import Participation

ORDERS = 1 + np.geomspace(1e-2, 1e5, 4000)  # Rényi orders, so dense that the best is within 1e-5 of the best of all
GRID_BITS = 30  # the grid of a deployment's noise is so many halvings of σ, and a factor below 2, apart
STEPS = 10  # halvings of a factor of 2 when noise is solved for: it is at most 0.07 % more than necessary


class Spending(abc.ABC):
    """What the rounds of a run cost."""

    amplified: ClassVar[bool] = True  # whether it counts on nobody knowing who is drawn

    @property
    @abc.abstractmethod
    def accountant(self) -> str:
        """How it is computed, for summaries."""

    @property
    def continuous(self) -> "Spending":
        """The cost if the same noise were Gaussian numbers of infinite precision."""
        return self

    @abc.abstractmethod
    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        """Return ε after so many rounds."""


@dataclass(frozen=True)
class Counted(Spending):
    """Every participation of a client counts, and the client with the most of them decides (sequential, parallel).

    Attributes:
        most: After t rounds, the participations of the client with the most, (rounds + 1,).
    """

    most: tuple[int, ...]
    amplified = False
    accountant = "exact Gaussian composition over each client's own participations, the largest over clients"

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        num = self.most[rounds]
        # k mechanisms with noise z are one with z/√k.
        return _gaussian_epsilon(noise / math.sqrt(num), delta) if num else 0.0


@dataclass(frozen=True)
class Concentrated(Counted):
    """The same with discrete Gaussian noise, added up by zCDP."""

    accountant = "zCDP of the discrete Gaussian over each client's own participations, the largest over clients"

    @property
    def continuous(self) -> Counted:
        return Counted(self.most)

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        return concentrated_epsilon(self.most[rounds] / (2 * noise**2), delta)


@dataclass(frozen=True)
class OnGrid(Spending):
    """Sampled rounds with discrete Gaussian noise on so many numbers, compared with a Gaussian rounded to the grid.

    The χ² divergence of the two is 1/(288 s⁴) for each number, s = σ/grid ≥ 2³⁰, up to terms that are smaller still; so
    their total variation distance is below √size / (2 · 16 s²) per round, and δ grows by (1 + e^ε) of that for each.
    """

    sampled: "Poisson | WithoutReplacement"
    size: int

    @property
    def accountant(self) -> str:
        return f"{self.sampled.accountant}; discrete noise within δ/1000 of it"

    @property
    def continuous(self) -> "Poisson | WithoutReplacement":
        return self.sampled

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        found = self.sampled.epsilon(noise, rounds, delta * 0.999)
        distance = rounds * math.sqrt(self.size) / (32 * 4.0**GRID_BITS)
        return found if found < 100 and (1 + math.exp(found)) * distance <= delta / 1000 else math.inf


@dataclass(frozen=True)
class Poisson(Spending):
    """Each client is drawn independently, and a draw above the capacity is cut to a random part of it."""

    num_clients: int
    probability: float
    capacity: int
    accountant = "privacy loss distribution of the truncated Poisson-subsampled Gaussian (dp-accounting)"

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
class WithoutReplacement(Spending):
    """Each round draws so many clients, every choice equally likely."""

    num_clients: int
    cohort: int
    accountant = "Rényi DP of the Gaussian sampled without replacement, or no sampling if less (dp-accounting)"

    @property
    def share(self) -> float:
        """The share of rounds that a client is drawn in."""
        return self.cohort / self.num_clients

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        if rounds == 0:
            return 0.0
        orders, rdp = _renyi(self.num_clients, self.cohort, noise)
        amplified = dp_accounting(".rdp.rdp_privacy_accountant").compute_epsilon(orders, rounds * rdp, delta)[0]
        # The bound for sampling is loose where nearly all are drawn; that each round counts fully is always true.
        return float(min(amplified, _gaussian_epsilon(noise / math.sqrt(rounds), delta)))


def spending_of(
    mode: str, participation: Participation, stateful: bool, root: Key, rounds: int, delta: float
) -> Counted | Poisson | WithoutReplacement:
    """Return what rounds cost whose clients are drawn so.

    Args:
        stateful: Whether clients keep a state.
    """
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


def grid_of(sd: float) -> float:
    """Return the distance of neighbouring numbers for noise of about this σ: a power of 2 that floats hold exactly."""
    return 2.0 ** (math.floor(math.log2(sd)) - GRID_BITS)


def solve_noise(spending: Spending, epsilon: float, delta: float, rounds: int) -> float:
    """Return the least noise multiplier, up to 0.07 %, with which so many rounds cost at most ε."""
    rounds = max(rounds, 1)
    if type(spending) is Counted:
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
    """Return the most of the planned rounds that cost at most ε."""

    def cost(rounds: int) -> float:
        return spending.epsilon(noise, rounds, delta)

    return planned if cost(planned) <= epsilon else bisect.bisect_right(range(planned), epsilon, key=cost) - 1


def participations(participation: Participation, root: Key, rounds: int) -> np.ndarray:
    """Return, after t rounds, the uploads of the client with the most, (rounds + 1,); no data decide who is drawn."""
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


@lru_cache(maxsize=4096)
def _poisson_epsilon(spending: Poisson, noise: float, rounds: int, delta: float) -> float:
    accounting, pld = dp_accounting(), dp_accounting(".pld")
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
    """Return orders, and the Rényi divergence of one round at each."""
    accounting, rdp = dp_accounting(), dp_accounting(".rdp")
    accountant = rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    event = accounting.SampledWithoutReplacementDpEvent(num_clients, cohort, accounting.GaussianDpEvent(noise))
    accountant.compose(event)
    return accountant.orders, accountant.rdp


@lru_cache(maxsize=4096)
def concentrated_epsilon(rho: float, delta: float) -> float:
    """Return ε of (ε, δ)-DP that ρ-zCDP implies, by the best of many Rényi orders."""
    if rho == 0:
        return 0.0
    return float(dp_accounting(".rdp.rdp_privacy_accountant").compute_epsilon(ORDERS, ORDERS * rho, delta)[0])


def _gaussian_epsilon(noise: float, delta: float) -> float:
    """Return ε of one Gaussian mechanism, exactly."""
    with np.errstate(divide="ignore"):  # its search may look at a probability of 0
        return float(dp_accounting().get_epsilon_gaussian(noise, delta))


def _gaussian_noise(epsilon: float, delta: float) -> float:
    """Return the noise multiplier of one Gaussian mechanism that is (ε, δ)-DP."""
    with np.errstate(divide="ignore"):
        return float(dp_accounting().get_sigma_gaussian(epsilon, delta))


def dp_accounting(module: str = "") -> ModuleType:
    """Return a module of the package dp-accounting, an extra."""
    try:
        return importlib.import_module(f"dp_accounting{module}")
    except ModuleNotFoundError:
        raise UsageError("dp needs dp-accounting to know what it costs; install it with priory[privacy].") from None
