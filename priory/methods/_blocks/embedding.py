"""A network as an embedding and a last layer that is made anew for each client.

The embedding is what the last layer of the task's own network sees, so any Linen module that ends in a dense layer has
one, and the network with a client's own last layer is a network of the task again.
"""

import textwrap
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import struct
from priory.fed.method import Task
from priory.fed.shard import Pool, Shard
from priory.models import features
from priory.models.likelihood import WithScale
from priory.models.model import Params

Weights = Any


@struct
class Layer:
    """A dense last layer: kernel (width, outputs), bias (outputs,)."""

    kernel: Array
    bias: Array


@dataclass(frozen=True)
class Embedding:
    """The task's network without its last layer; lives inside one trace.

    Its weights are a dict: `network`, and `log_scale` where a regression learns its noise.
    """

    task: Task

    @property
    def split(self) -> features.Split:
        """The network in two parts."""
        model = self.task.model.model if isinstance(self.task.model, WithScale) else self.task.model
        found = features.split(cast(Hashable, model), self.task.input_shape, self.task.is_head)
        if found is None or not found.layer.use_bias:
            raise UsageError(
                f"model={textwrap.shorten(repr(self.task.model), 100)} has no embedding that is a vector, for its head "
                "is not one dense layer with a bias at the end of a Linen module; flatten before "
                "nn.Dense(num_outputs), and leave --head out."
            )
        return found

    @property
    def num_outputs(self) -> int:
        """Outputs of the last layer."""
        return self.split.layer.features

    @property
    def width(self) -> int:
        """Numbers in a vector of features."""
        layer = self._head_shapes()
        for name in self.split.path:
            layer = layer[name]
        return int(layer["kernel"].shape[0])

    def init(self, key: Key) -> Params:
        """Return fresh weights of the embedding, and statistics."""
        drawn = self.task.init(key)
        weights = {"network": trees.partition(_without_scale(drawn.weights), self.task.is_head)[1]}
        if isinstance(self.task.model, WithScale):
            weights["log_scale"] = drawn.weights["log_scale"]
        return Params(weights, drawn.stats)

    def features(self, params: Params, x: Array, key: Key | None = None) -> tuple[Array, Any]:
        """Return vectors (batch, width) of inputs, and statistics; a key means training."""
        body = Params(params.weights["network"], params.stats)
        return self.split.features(body, trees.zeros(self._head_shapes()), x, key=key)

    def outputs(self, weights: Weights, layer: Layer, seen: Array) -> Array:
        """Return the outputs that the likelihood takes, from features."""
        outputs = seen @ layer.kernel + layer.bias[None, :]
        if not isinstance(self.task.model, WithScale):
            return outputs
        return jnp.concatenate([outputs, jnp.broadcast_to(weights["log_scale"], outputs.shape)], axis=-1)

    def with_layer(self, weights: Weights, layer: Layer) -> Weights:
        """Return weights of the task's network whose last layer is this one."""
        # The body's tree holds None in the place of the head's two leaves, which are named like the layer's fields.
        whole = jax.tree_util.tree_map_with_path(
            lambda path, leaf: getattr(layer, path[-1].key) if leaf is None else leaf,
            weights["network"],
            is_leaf=lambda leaf: leaf is None,
        )
        return {**whole, "log_scale": weights["log_scale"]} if isinstance(self.task.model, WithScale) else whole

    def embedded(self, params: Params, data: Shard, size: int) -> Shard:
        """Return a client's examples with features for inputs, `size` at a time: the embedding runs once."""
        order, whole = jnp.arange(data.capacity), data.padded()

        def fill(i: Array, rows: Array) -> Array:
            found, _ = self.features(params, data.take(order, i, size).x)
            return jax.lax.dynamic_update_slice_in_dim(rows, found, i * size, axis=0)

        rows = jnp.zeros((-(-data.capacity // size) * size, self.width))
        rows = jax.lax.fori_loop(0, data.num_batches(size), fill, rows)[: data.capacity]
        pool = Pool(rows, whole.y, whole.scale, jnp.zeros(()), jnp.ones(()))
        return Shard(pool, jnp.zeros(1, jnp.int32), data.count[None], data.capacity)

    def _head_shapes(self) -> Weights:
        """Return the head of the network as shapes, None for the body."""
        drawn = jax.eval_shape(self.task.init, jax.eval_shape(lambda: jax.random.key(0))).weights
        return trees.partition(_without_scale(drawn), self.task.is_head)[0]


def _without_scale(weights: Weights) -> Weights:
    return {name: layer for name, layer in weights.items() if name != "log_scale"}
