"""Inputs without labels that all know: as data to train on, and what a network says of them."""

import jax
import jax.numpy as jnp
from jax import Array

from priory.fed.method import Task
from priory.fed.shard import Pool, Shard
from priory.models.model import Params


def as_shard(x: Array) -> Shard:
    """Return inputs as a shard whose labels are their own numbers."""
    num = x.shape[0]
    pool = Pool(x, jnp.arange(num), None, jnp.zeros(()), jnp.ones(()))
    return Shard(pool, jnp.zeros(1, jnp.int32), jnp.full(1, num, jnp.int32), num)


def probabilities(task: Task, params: Params, x: Array, size: int) -> Array:
    """Return class probabilities (inputs, classes), `size` inputs at a time, whose activations stay in a cache."""
    size = min(size, x.shape[0])
    # The last batch is filled up with the first inputs.
    batches = jnp.resize(x, (-(-x.shape[0] // size) * size, *x.shape[1:])).reshape(-1, size, *x.shape[1:])
    said = jax.lax.map(lambda batch: jax.nn.softmax(task.model.apply(params, batch)[0]), batches)
    return said.reshape(-1, said.shape[-1])[: x.shape[0]]
