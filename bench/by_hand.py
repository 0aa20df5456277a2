"""The FedAvg round as one would write it by hand in JAX: no protocol, no store, nothing but the mathematics.

What the engine adds to a round is measured against this.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

CLIENTS, EXAMPLES, BATCH, WIDTH = 10, 600, 50, 256


def fedavg_round(x: np.ndarray, y: np.ndarray) -> tuple[Callable[[Any, Any], Any], Any]:
    """A jitted round over all clients on all devices, and the weights it starts from; x is (clients, examples, 784)."""
    mesh = Mesh(np.array(jax.devices()), ("clients",))
    x, y = (jax.device_put(a, NamedSharding(mesh, P("clients"))) for a in (x, y))
    optimiser = optax.sgd(0.1, momentum=0.9)
    widths = [(784, WIDTH), (WIDTH, 10)]
    keys = jax.random.split(jax.random.key(0), len(widths))
    start = [(jax.random.normal(k, w) / np.sqrt(w[0]), jnp.zeros(w[1])) for k, w in zip(keys, widths, strict=True)]

    def loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        (w1, b1), (w2, b2) = weights
        hidden = jax.nn.relu(x @ w1 + b1[None])
        logits = hidden @ w2 + b2[None]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

    def client(weights: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        rows = jax.random.permutation(key, EXAMPLES).reshape(-1, BATCH)

        def step(carry: Any, batch: jax.Array) -> tuple[Any, None]:
            weights, state = carry
            pixels = x[batch].astype(jnp.float32) / 255
            updates, state = optimiser.update(jax.grad(loss)(weights, pixels, y[batch]), state, weights)
            return (optax.apply_updates(weights, updates), state), None

        return jax.lax.scan(step, (weights, optimiser.init(weights)), rows)[0][0]

    def device(weights: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def one(total: Any, own: Any) -> tuple[Any, None]:
            index, x, y = own
            trained = client(weights, x, y, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, trained), None

        index = jax.lax.axis_index("clients") * x.shape[0] + jnp.arange(x.shape[0])
        total, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, weights), (index, x, y))
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf, "clients") / CLIENTS, total)

    spec = (P(), P(), P("clients"), P("clients"))
    mapped = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False))
    return partial(_call, mapped, x, y), jax.device_put(start, NamedSharding(mesh, P()))


def _call(mapped: Any, x: jax.Array, y: jax.Array, weights: Any, key: jax.Array) -> Any:
    return mapped(weights, key, x, y)
