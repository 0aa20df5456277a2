"""Arithmetic on pytrees: the few vector-space operations that the methods need, and the split by path."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Tree = TypeVar("Tree")
PyTree = Any


def add(a: Tree, b: Tree) -> Tree:
    """The sum a + b."""
    return jax.tree.map(jnp.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """The difference a − b."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(factor: Array | float, a: Tree) -> Tree:
    """The multiple factor · a."""
    return jax.tree.map(lambda leaf: factor * leaf, a)


def axpy(factor: Array | float, a: Tree, b: Tree) -> Tree:
    """The combination factor · a + b."""
    return jax.tree.map(lambda x, y: factor * x + y, a, b)


def dot(a: PyTree, b: PyTree) -> Array:
    """The inner product of two trees, summed over all leaves."""
    return reduce(jnp.add, jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)), jnp.float32(0))


def norm_squared(a: PyTree) -> Array:
    """‖a‖² over all leaves."""
    return dot(a, a)


def norm(a: PyTree) -> Array:
    """‖a‖ over all leaves; its gradient at zero is zero rather than NaN."""
    squared = norm_squared(a)
    positive = squared > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squared, 1.0)), 0.0)


def select(condition: Array, a: Tree, b: Tree) -> Tree:
    """The tree a where a scalar condition holds, else b."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def zeros(shapes: Tree) -> Tree:
    """Zeros of the shapes and types of a tree of arrays, or of what `jax.eval_shape` gives."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def either(condition: Array, yes: Callable[[], Tree], no: Callable[[], Tree], *, batched: bool) -> Tree:
    """The result of one of two functions; under a `vmap` (`batched`) both are computed, as it would do with a `cond`.

    Written out, because a batched `cond` selects among its inputs, and JAX's key check takes that for a second use.
    """
    return select(condition, yes(), no()) if batched else jax.lax.cond(condition, yes, no)


def all_finite(a: PyTree) -> Array:
    """Whether every number of every floating leaf is finite."""
    floats = [leaf for leaf in jax.tree.leaves(a) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return reduce(jnp.logical_and, [jnp.all(jnp.isfinite(leaf)) for leaf in floats], jnp.bool_(True))


def size(a: PyTree) -> int:
    """The number of numbers in the leaves of a tree (arrays or shapes)."""
    return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(a))


def num_bytes(a: PyTree) -> int:
    """The bytes that the leaves of a tree (arrays or shapes) take on the wire."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(a))


def weighted_sum(stacked: PyTree, weight: Array, of: Callable[[PyTree], Tree] = lambda member: member) -> Tree:
    """Σ_k weight_k · of(member k) over the leading axis; a member of weight 0 adds nothing, whatever it holds."""

    def term(weight: Array, member: PyTree) -> Tree:
        # 0 · NaN is NaN: `where` first.
        return jax.tree.map(lambda value: jnp.where(weight > 0, weight * value, 0), of(member))

    if jax.default_backend() != "cpu" or weight.shape[0] == 0:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), jax.vmap(term)(weight, stacked))
    if weight.shape[0] == 1:
        return term(weight[0], jax.tree.map(lambda leaf: leaf[0], stacked))
    # A running sum: XLA's reduction over the leading axis takes ten times as long on a CPU.
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (weight, stacked))

    def add_member(k: Array, total: Tree) -> Tree:
        return add(total, term(weight[k], jax.tree.map(lambda leaf: leaf[k], stacked)))

    return jax.lax.fori_loop(0, weight.shape[0], add_member, zeros(jax.eval_shape(term, *one)))


def weighted_mean(
    stacked: PyTree, weight: Array, otherwise: Tree | None = None, of: Callable[[PyTree], Tree] = lambda member: member
) -> Tree:
    """Σ_k w_k of(member k) / Σ_k w_k over the leading axis, or `otherwise` (of(member 0) by default) if all are 0."""
    total = jnp.sum(weight)
    if otherwise is None:
        otherwise = of(jax.tree.map(lambda leaf: leaf[0], stacked))
    share = weight / jnp.where(total > 0, total, 1.0)
    return select(total > 0, weighted_sum(stacked, share, of), otherwise)


def partition(tree: PyTree, is_first: Callable[[str], bool]) -> tuple[PyTree, PyTree]:
    """Two trees that share out the leaves by their "/"-joined path; `None` stands where the other has the leaf.

    >>> partition({"body": 1, "head": 2}, lambda path: path.startswith("head"))
    ({'body': None, 'head': 2}, {'body': 1, 'head': None})
    """

    def keep(wanted: bool) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if is_first(path_of(path)) == wanted else None, tree
        )

    return keep(True), keep(False)


def merge(first: PyTree, second: PyTree) -> PyTree:
    """The tree that `partition` took apart."""
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None)


def path_of(path: Any) -> str:
    """A key path as text: `Dense_0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def same_form(one: Any, other: Any) -> bool:
    """Return whether two trees have one structure and leaves of the same shapes."""
    outline: Any = jax.tree.structure(one)
    shapes, others = (list(map(jnp.shape, jax.tree.leaves(tree))) for tree in (one, other))
    return bool(outline == jax.tree.structure(other)) and shapes == others
