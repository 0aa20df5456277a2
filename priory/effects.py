"""The random effects of the clients in a mixed-effects model: estimates, intervals, and whether their chains mixed.

Draws are personalised → summarised, one client after another in one mapped function, so that no draws are stacked over
clients unless they are asked for. R-hat and the effective sample size are those of Vehtari et al., Rank-normalization,
folding, and localization, Bayesian Analysis 2021, arXiv:1903.08008, as ArviZ has them by default.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.struct import struct
from priory.evaluate import ClientSlot, EvaluationContext, Layout, evaluated_posterior
from priory.fed import capabilities
from priory.fed.method import Method, Task
from priory.fed.shard import Shards

MOST_RHAT = 1.01  # Vehtari et al. (2021), section 4
LEAST_ESS = 400.0
FEWEST_DRAWS = 4  # of a chain: two in each half


@dataclass(frozen=True)
class Population:
    """The normal distribution that the random effects come from, by coordinate.

    Attributes:
        mean: (draws, coordinates); a single draw is a point estimate.
        sd: Standard deviation between clients, (draws, coordinates).
    """

    mean: np.ndarray
    sd: np.ndarray

    def intervals(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Central intervals of mean and standard deviation, (2, coordinates) each; of no width for a point estimate."""
        ends = [(1 - level) / 2, (1 + level) / 2]
        return np.quantile(self.mean, ends, axis=0), np.quantile(self.sd, ends, axis=0)

    @property
    def is_point(self) -> bool:
        """Whether the population was estimated (empirical Bayes) and has no posterior of its own."""
        return len(self.mean) == 1


@dataclass(frozen=True)
class Effects:
    """The random effects of every client that takes part, summarised over the draws of its posterior.

    Attributes:
        clients: Names.
        names: Of the coordinates: the path of the parameter, and the index in it where there are several.
        examples: Training examples of each client, (clients,).
        level: Probability of the central intervals.
        mean: (clients, coordinates), as are the next five.
        sd: Standard deviation of the posterior.
        low: Lower end of the interval.
        high: Upper end of the interval.
        rhat: Rank-normalised split R-hat; NaN where draws do not vary or a chain has fewer than four.
        ess: Bulk effective sample size; 0 where draws do not vary.
        population: What the effects have in common.
        fixed: The tree of the effects that all clients share.
        draws: A tree like one draw whose leaves are (clients, chains, draws, ...); None unless asked for.
        advice: Sentences of the method on the run that these are of, by kind: they may not be estimates yet.
    """

    clients: tuple[str, ...] = field(repr=False)
    names: tuple[str, ...]
    examples: np.ndarray = field(repr=False)
    level: float
    mean: np.ndarray = field(repr=False)
    sd: np.ndarray = field(repr=False)
    low: np.ndarray = field(repr=False)
    high: np.ndarray = field(repr=False)
    rhat: np.ndarray = field(repr=False)
    ess: np.ndarray = field(repr=False)
    population: Population = field(repr=False)
    fixed: Any = field(repr=False)
    draws: Any = field(repr=False)
    advice: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def warning(self) -> str | None:
        """A sentence on chains that did not mix or are too short, None if there is nothing to say."""
        # Written so that NaN, which says nothing about mixing, counts as a fault.
        unmixed, short = ~(self.rhat <= MOST_RHAT), ~(self.ess >= LEAST_ESS)
        faults = []
        if unmixed.any():
            most = _worst(np.max, self.rhat[unmixed], ".3g")
            faults.append(f"R-hat is above {MOST_RHAT} for {self._share(unmixed)} (worst {most})")
        if short.any():
            least = _worst(np.min, self.ess[short], ".0f")
            faults.append(
                f"the effective sample size is below {LEAST_ESS:.0f} for {self._share(short)} (worst {least})"
            )
        if not faults:
            return None
        remedy = "take more draws, more chains or a longer warm-up"
        return f"{' and '.join(faults)}, so their estimates and intervals are rough; {remedy}."

    def _share(self, faulty: np.ndarray) -> str:
        return f"{int(faulty.any(axis=1).sum())} of {len(self.clients)} clients"


def _worst(of: Any, values: np.ndarray, how: str) -> str:
    """The extreme value as text; `undefined` where draws do not vary at all, so that none can be computed."""
    return "undefined" if np.isnan(values).any() else format(float(of(values)), how)


def check_effects(method: Method, name: str, level: float) -> None:
    """Raises `UsageError` for a method without random effects, and for a level that is no probability."""
    if not isinstance(method, capabilities.MixedEffects):
        raise UsageError(
            f"{name} has no random effects, since it has no `effects`, `population_effects` and `fixed_effects`; "
            "choose a method for mixed-effects models, or give it these."
        )
    if not 0 < level < 1:
        raise UsageError(f"level={level} is no probability of an interval; choose a number between 0 and 1.")


def num_coordinates(method: Method, task: Task, down: Any) -> int:
    """The number of random effects of a client, 0 for a method without any; nothing is computed."""
    if not isinstance(method, capabilities.MixedEffects):
        return 0
    return len(names_of(jax.eval_shape(effects_of_server, method, task, down)[0]))


@struct
class Summaries:
    """What is known of a client's draws, a number for each coordinate; the draws themselves, or None."""

    mean: Array
    sd: Array
    low: Array
    high: Array
    rhat: Array
    ess: Array
    draws: Any


@partial(jax.jit, static_argnames=("keep", "layout"))
def effects_of_clients(
    context: EvaluationContext, train: Shards, level: Array, slots: ClientSlot, *, keep: bool, layout: Layout
) -> Summaries:
    """The summaries of each client's random effects under the posterior that an evaluation would use, stacked.

    Args:
        keep: Whether the draws are kept as well.
    """

    def one(shared: tuple[EvaluationContext, Shards, Array], slot: ClientSlot) -> Summaries:
        context, train, level = shared
        posterior, *_ = evaluated_posterior(context, slot, train.of(slot.id), batched=layout.is_batched)
        assert isinstance(context.method, capabilities.MixedEffects)
        return _summarise(context.method.effects(context.task, posterior), level, keep)

    return layout.map(one, (context, train, level), slots)


@jax.jit
def effects_of_server(method: capabilities.MixedEffects, task: Task, down: Any) -> tuple[Any, Any, Any]:
    """Mean and standard deviation of the population, with draws on axis 0, and the fixed effects."""
    return *method.population_effects(task, down), method.fixed_effects(task, down)


def gather(
    found: Any,
    server: tuple[Any, Any, Any],
    clients: tuple[str, ...],
    examples: np.ndarray,
    level: float,
    advice: dict[str, str],
) -> Effects:
    """The effects from the summaries of clients and server on the host."""
    mean, sd, fixed = server
    names = names_of(mean)
    assert found.mean.shape[1] == len(names), "`effects` and `population_effects` disagree on the coordinates"
    population = Population(_flat(mean, num_axes=1), _flat(sd, num_axes=1))
    return Effects(
        clients, names, examples, level, found.mean, found.sd, found.low, found.high, found.rhat, found.ess,
        population, fixed, found.draws, advice,
    )  # fmt: skip


def names_of(tree: Any, num_axes: int = 1) -> tuple[str, ...]:
    """The names of the coordinates in order, `num_axes` leading axes of each leaf not counted.

    >>> names_of({"bias": np.zeros((1, 1)), "kernel": np.zeros((1, 2, 1))})
    ('bias', 'kernel[0]', 'kernel[1]')
    """
    names: list[str] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, shape = _name(path), _trimmed(leaf.shape[num_axes:])
        places = [f"[{','.join(map(str, place))}]" if place else "" for place in np.ndindex(*shape)]
        names += [name + place for place in places]
    return tuple(names)


def inference_data(found: Effects, **attributes: str) -> Any:
    """The draws of the random effects as `arviz.InferenceData`, see `draws_data`."""
    return draws_data(found.draws, found.clients, **attributes)


def draws_data(draws: Any, clients: Sequence[str], **attributes: str) -> Any:
    """A tree of draws, its leaves (clients, chains, draws, ...), as `arviz.InferenceData`.

    Each leaf is a variable (chain, draw, client, ...). A slash in a parameter's path becomes a dot, for netCDF takes it
    for a folder; trailing axes of length 1 go.
    """
    variables, dims = {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(draws):
        name, shape = _name(path).replace("/", "."), _trimmed(leaf.shape[3:])
        variables[name] = np.moveaxis(leaf.reshape(*leaf.shape[:3], *shape), 0, 2)
        dims[name] = ["client", *(f"{name}_dim_{axis}" for axis in range(len(shape)))]
    return arviz().from_dict(
        posterior=variables,
        coords={"client": list(clients)},
        dims=dims,
        posterior_attrs={"inference_library": "priory", **attributes},
    )


def arviz() -> Any:
    """The module ArviZ, which is an extra."""
    try:
        with warnings.catch_warnings():  # it says once a day, to whoever imports it, that 1.0 will be different
            warnings.filterwarnings(
                "ignore", message=r"\s*ArviZ is undergoing a major refactor", category=FutureWarning
            )
            import arviz
    except ImportError:
        raise UsageError("ArviZ is not installed; install `priory[arviz]` to export draws.") from None
    return arviz


def _summarise(tree: Any, level: Array, keep: bool) -> Summaries:
    draws = _flat(tree, num_axes=2)  # (chains, draws, coordinates)
    pooled = draws.reshape(-1, draws.shape[-1])
    low, high = jnp.quantile(pooled, jnp.stack([(1 - level) / 2, (1 + level) / 2]), axis=0)
    rhat, ess = _diagnose(draws)
    return Summaries(pooled.mean(axis=0), pooled.std(axis=0, ddof=1), low, high, rhat, ess, tree if keep else None)


def _diagnose(draws: Array) -> tuple[Array, Array]:
    """R-hat and the effective sample size of each coordinate."""
    with jax.ensure_compile_time_eval():  # as in `bayes.kernels`: it computes something on import
        from blackjax.diagnostics import ess_bulk, rhat

    if draws.shape[1] < FEWEST_DRAWS:
        return jnp.full(draws.shape[2], jnp.nan), jnp.full(draws.shape[2], jnp.nan)
    # One coordinate at a time: BlackJAX squeezes every axis of length 1 and promotes ranks.
    return jax.vmap(rhat, in_axes=2)(draws), jax.vmap(ess_bulk, in_axes=2)(draws)


def _flat(tree: Any, num_axes: int) -> Any:
    """The leaves side by side on the last axis, behind their leading axes."""
    leaves = [leaf.reshape(*leaf.shape[:num_axes], -1) for leaf in jax.tree.leaves(tree)]
    xp = jnp if isinstance(leaves[0], Array) else np
    return xp.concatenate(leaves, axis=-1)


def _name(path: Any) -> str:
    return trees.path_of(path) or "effect"  # a tree that is one array has an empty path


def _trimmed(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape without its trailing axes of length 1."""
    kept = list(shape)
    while kept and kept[-1] == 1:
        kept.pop()
    return tuple(kept)
