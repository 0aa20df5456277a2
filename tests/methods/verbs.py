"""The verbs of a method, each compiled once per method, problem and shapes: called one by one, every operation is.

They return NumPy arrays, so that a test can pick and compare numbers without compiling anything more.
"""

import math
from functools import partial
from typing import Any

import jax
import numpy as np


def on_host(tree: Any) -> Any:
    """Return a tree with NumPy arrays in place of JAX's, except for keys and where it is being traced."""

    def leaf_on_host(leaf: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return np.asarray(leaf)

    return jax.tree.map(leaf_on_host, tree)


def _verb(name: str) -> Any:
    """Return the verb of that name, as a function of the method and its arguments."""

    def call(method: Any, *arguments: Any) -> Any:
        return getattr(method, name)(*arguments)

    call.__name__ = name
    compiled = jax.jit(call)
    return lambda method, *arguments: on_host(compiled(method, *arguments))


init_server = _verb("init_server")
broadcast = _verb("broadcast")
init_client = _verb("init_client")
updated = _verb("client_update")
aggregated = _verb("aggregate")
personalised = _verb("personalise")
population = _verb("population")
predicted = _verb("predict")


def drawn(method: Any, task: Any, posterior: Any, key: Any, num: int) -> Any:
    """Draw networks from a posterior."""
    return on_host(_drawn(method, task, posterior, key, num))


def outputs(task: Any, params: Any, x: Any) -> Any:
    """Return what a network says about inputs."""
    return on_host(_outputs(task, params, x))


def parameters(task: Any, key: Any) -> Any:
    """Draw the parameters of a network."""
    return on_host(_parameters(task, key))


def distance(one: Any, other: Any) -> float:
    """Return the Euclidean distance of two trees."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return math.sqrt(sum(float(np.sum((np.asarray(a, np.float64) - np.asarray(b)) ** 2)) for a, b in pairs))


@partial(jax.jit, static_argnames="num")
def _drawn(method: Any, task: Any, posterior: Any, key: Any, num: int) -> Any:
    return method.draws(task, posterior, key, num)


@jax.jit
def _outputs(task: Any, params: Any, x: Any) -> Any:
    return task.model.apply(params, x)[0]


@jax.jit
def _parameters(task: Any, key: Any) -> Any:
    return task.init(key)
