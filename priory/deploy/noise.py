"""Noise that a deployed client or server adds: whole numbers of a grid, from a cryptographically secure source.

Noise in floating point gives differential privacy away: of two messages a receiver can tell which one plus a number
that a generator can produce is what it got. So a difference is scaled down to the clipping norm, rounded towards zero
to a grid, which makes no norm larger, and gets a discrete Gaussian number for each of its own. Both messages then reach
the same numbers. The sampler is OpenDP's, exact and without a seed.

Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy, NeurIPS 2020, arXiv:2004.00010.
"""

import importlib
from typing import Any, TypeVar

import jax
import numpy as np

from priory.core.errors import UsageError
from priory.fed.parts import WHOLE, Parts

Payload = TypeVar("Payload")

MARGIN = 2.0**-30  # of the clipping norm: above what float64 can miss of a sum of squares
LARGEST = 2.0**52  # of a number on the grid: float64 counts that far
LARGEST_SCALE = 2.0**40  # steps of the grid; a deployment has at most 2³¹ and what rounding adds
CHUNK = 1 << 16  # numbers drawn at once, so that their Python lists stay small


def release(differences: Payload, clip: float, sd: float, grid: float, parts: Parts = WHOLE) -> Payload:
    """Return the sum of clipped differences with noise on every number, in float64.

    Args:
        differences: Stacked along the first axis.
        clip: The largest norm of each; infinite where the method bounds it.
        sd: σ of the noise.
        grid: Distance between neighbouring numbers.
        parts: What is clipped apart, in whose units `clip`, `sd` and `grid` are.
    """
    scaled = parts.to_units(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), differences))
    return parts.from_units(parts.each(lambda part, _: _released(part, clip, sd, grid), scaled))


def _released(differences: Payload, clip: float, sd: float, grid: float) -> Payload:
    """Return the noised sum of one part."""
    arrays, structure = jax.tree.flatten(differences)
    norms = np.sqrt(sum(np.square(array).reshape(len(array), -1).sum(axis=1) for array in arrays))
    # A client that has nothing finite to send sends zeros; here nothing may depend on that.
    finite = np.isfinite(norms)
    arrays, norms = [np.where(_like(finite, array), array, 0.0) for array in arrays], np.where(finite, norms, 0.0)
    bound = clip * (1 - MARGIN)
    factor = np.where(norms > bound, bound / np.where(norms > 0, norms, 1.0), 1.0)
    totals = [_on_grid(array, factor, grid).sum(axis=0) for array in arrays]
    noised = [total + discrete_gaussian(total.shape, sd / grid) for total in totals]
    return jax.tree.unflatten(structure, [grid * whole.astype(np.float64) for whole in noised])


def _on_grid(array: np.ndarray, factor: np.ndarray, grid: float) -> np.ndarray:
    """Round scaled numbers towards zero to whole multiples of the grid.

    A number that float64 cannot count is held at the largest it can. That does not make two messages differ by more,
    and an error would reveal that the number is large.
    """
    scaled = np.trunc(array * _like(factor, array) / grid)
    return np.clip(scaled, -LARGEST, LARGEST).astype(np.int64)


def _like(numbers: np.ndarray, array: np.ndarray) -> np.ndarray:
    """Return a number for each row in the dimensions of an array."""
    return numbers.reshape(-1, *[1] * (array.ndim - 1))


def discrete_gaussian(shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Draw whole numbers k with probability proportional to exp(−k²/2·scale²), exactly."""
    if not scale < LARGEST_SCALE:
        raise ValueError(f"σ is {scale:.3g} steps of the grid, and whole numbers of 64 bits hold less")
    opendp = sampler()
    space = opendp.vector_domain(opendp.atom_domain(T="i64")), opendp.l2_distance(T="f64")
    draw = opendp.m.make_gaussian(*space, scale=scale)
    size = int(np.prod(shape))
    counts = [min(CHUNK, size - start) for start in range(0, size, CHUNK)]
    drawn = [np.asarray(draw([0] * count), np.int64) for count in counts]
    return np.concatenate([np.empty(0, np.int64), *drawn]).reshape(shape)


def sampler() -> Any:
    """Return OpenDP's module, an extra; raise if it is not installed."""
    try:
        opendp = importlib.import_module("opendp.prelude")
    except ModuleNotFoundError:
        raise UsageError(
            "dp on a network draws its noise with opendp; install priory[privacy] on the server and on every node."
        ) from None
    opendp.enable_features("contrib")
    return opendp
