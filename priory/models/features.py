"""What a network's last layer sees: where only that layer changes, the rest is computed once.

A dense last layer whose outputs are those of the network splits it in two, body and head. Whether a network does so is
found by running it once on shapes, so any Linen module that ends in `nn.Dense` has it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.models.linen import Linen, watching
from priory.models.model import Model, Params, PyTree, shapes

__all__ = ["Split", "split"]

Weights = Any


@dataclass(frozen=True)
class Split:
    """A network in two parts.

    Attributes:
        model: The whole network.
        path: Where its last layer is.
        layer: That layer, on its own.
    """

    model: Linen
    path: tuple[str, ...]
    layer: nn.Dense

    def features(self, body: Params, head: Weights, x: Array, *, key: Array | None = None) -> tuple[Array, PyTree]:
        """Return inputs (batch, width) of the last layer, and statistics; neither depends on the head."""
        seen: list[Array] = []

        def see(module: nn.Module, x: Array, _: Array) -> None:
            if module.path == self.path:
                seen.append(x)

        with watching(see):
            _, stats = self.model.apply(Params(trees.merge(head, body.weights), body.stats), x, key=key)
        return seen[0], stats

    def outputs(self, head: Weights, features: Array) -> Array:
        """Return the outputs (batch, num_outputs) of the network, from the inputs of its last layer."""
        weights = head
        for name in self.path:
            weights = weights[name]
        return self.layer.apply({"params": weights}, features)  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def split(model: Model, input_shape: tuple[int, ...], is_head: Callable[[str], bool]) -> Split | None:
    """Return the network in two parts, or None where the head is not just one dense layer that ends it."""
    if not isinstance(model, Linen):
        return None
    path = tuple(model.last_layer(input_shape).split("/"))
    calls: list[tuple[nn.Module, Array, Array]] = []
    ends: list[bool] = []

    def see(module: nn.Module, x: Array, outputs: Array) -> None:
        if module.path == path:
            calls.append((module, x, outputs))

    def tried(params: Params) -> None:
        with watching(see):
            outputs, _ = model.apply(params, jnp.zeros((2, *input_shape)))
        # The very same array: nothing comes after the layer.
        ends.append(len(calls) == 1 and outputs is calls[0][2] and calls[0][1].ndim == 2)

    params = shapes(model, input_shape)
    jax.eval_shape(tried, params)
    names = [trees.path_of(place) for place, _ in jax.tree_util.tree_flatten_with_path(params.weights)[0]]
    is_that_layer = all(is_head(name) == (tuple(name.split("/")[:-1]) == path) for name in names)
    if not (ends[0] and is_that_layer and type(calls[0][0]) is nn.Dense):
        return None
    return Split(model, path, calls[0][0].clone(parent=None, name=None))
