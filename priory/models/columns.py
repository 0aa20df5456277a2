"""Dropout of columns: everything that leaves one input unit of a layer, gone or there for a whole minibatch.

A column runs along the last axis of a kernel (a leaf of that name, or `embedding`), at one place of the axis before it:
Flax's layout, dense or convolutional. Biases, layers with a single column (which would vanish whole) and the weights of
other libraries, whose axes mean other things, have none. Nothing is divided by the probability: as a posterior (Gal and
Ghahramani, Dropout as a Bayesian Approximation, ICML 2016, arXiv:1506.02142) a dropped column sits at zero.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.models.linen import Linen, first_of, watching
from priory.models.model import Model, Params, PyTree, shapes

Weights = Any


def keep_probabilities(weights: Weights, keep: Array | float) -> Weights:
    """Return the probability that a column of each leaf stays: `keep`, or 1 where there are none."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.float32(keep) if _has_columns(path, leaf) else jnp.float32(1), weights
    )


def draw_masks(key: Array, weights: Weights, keep: Array | float) -> Weights:
    """Return which columns stay, (columns,) for each kernel and None for what has none."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(weights)
    drawn = [
        jax.random.bernoulli(jax.random.fold_in(key, i), keep, (leaf.shape[-2],)) if _has_columns(path, leaf) else None
        for i, (path, leaf) in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, drawn)


def drop(weights: Weights, masks: Weights) -> Weights:
    """Return the weights with the columns that do not stay at zero."""

    def one(leaf: Array | None, mask: Array | None) -> Array | None:
        return leaf if leaf is None or mask is None else jnp.where(mask[:, None], leaf, 0)

    return jax.tree.map(one, weights, masks, is_leaf=lambda leaf: leaf is None)


def apply_without(
    model: Model, params: Params, masks: Weights, x: Array, *, key: Array | None = None
) -> tuple[Array, PyTree]:
    """Return the outputs and statistics of the network without the dropped columns.

    A dense or convolutional Linen layer gets its input with those units at zero, which is the same and cheaper than a
    copy of the kernel; whatever else has columns is copied.
    """
    if not isinstance(model, Linen):
        return model.apply(Params(drop(params.weights, masks), params.stats), x, key=key)
    at_input = _layers(model, x.shape[1:])
    flat = {trees.path_of(path): mask for path, mask in jax.tree_util.tree_flatten_with_path(masks)[0]}
    early = {name: flat[f"{name}/kernel"] for name in at_input if f"{name}/kernel" in flat}
    _, late = trees.partition(masks, lambda path: path.removesuffix("/kernel") in early)
    with nn.intercept_methods(functools.partial(_silence_inputs, early)):
        return model.apply(Params(drop(params.weights, late), params.stats), x, key=key)


def _silence_inputs(
    masks: dict[str, Array], next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    mask = masks.get("/".join(context.module.path))
    if context.method_name != "__call__" or mask is None:
        return next_fun(*args, **kwargs)
    x = first_of(args, kwargs)
    silenced = jnp.where(mask.reshape((1,) * (x.ndim - 1) + mask.shape), x, 0)
    if args:
        return next_fun(silenced, *args[1:], **kwargs)
    return next_fun(**(kwargs | {"inputs": silenced}))


@functools.lru_cache(maxsize=64)
def _layers(model: Linen, input_shape: tuple[int, ...]) -> frozenset[str]:
    """Return the paths of the layers whose kernel has a column for each unit of the last axis of their input."""
    found: set[str] = set()

    def see(module: nn.Module, *_: Array) -> None:
        if type(module) is nn.Dense or (type(module) is nn.Conv and module.feature_group_count == 1):
            found.add("/".join(module.path))

    with watching(see):
        shapes(model, input_shape)
    return frozenset(found)


def _has_columns(path: Any, leaf: Array) -> bool:
    name = trees.path_of(path).rpartition("/")[2]
    return name in ("kernel", "embedding") and jnp.ndim(leaf) >= 2 and leaf.shape[-2] > 1
