"""Arrays on the devices of one process or of many."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from priory.core import rng, trees
from priory.core.rng import Key
from priory.data import Federation, Split
from priory.engine.rounds import AXIS
from priory.fed.shard import Pool, Shards

LEADING = P(AXIS)  # the leading axis is shared out over the devices


def mesh_of_all() -> Mesh:
    """One axis over every device that JAX sees."""
    return Mesh(np.array(jax.devices()), (AXIS,))


def everywhere(tree: Any, mesh: Mesh) -> Any:
    """The tree with a copy on each device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def root_key(seed: int, mesh: Mesh) -> Key:
    """The root key of a run with a copy on each device; a key cannot be sent to devices of another process."""
    return jax.jit(rng.root, out_shardings=NamedSharding(mesh, P()))(np.uint32(seed))


def agreed(value: int) -> int:
    """What the first process says: clocks and signals differ, and all must take the same path."""
    return value if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def shared_out(tree: Any, mesh: Mesh, spec: P = LEADING) -> Any:
    """The tree with an axis shared out over the devices, by default the leading one."""
    return jax.device_put(tree, NamedSharding(mesh, spec))


def zeros_shared_out(shapes: Any, mesh: Mesh, spec: P = LEADING) -> Any:
    """Make zeros of the given shapes where they will live, by default with the leading axis shared out."""
    leaves, structure = jax.tree.flatten(shapes)
    return jax.tree.unflatten(structure, _zeros(shapes=tuple(leaves), sharding=NamedSharding(mesh, spec)))


def shapes_everywhere(tree: Any, mesh: Mesh) -> Any:
    """The shapes of a tree that `everywhere` has placed."""
    return _placed(tree, NamedSharding(mesh, P()))


def shapes_shared_out(tree: Any, lead: tuple[int, ...], mesh: Mesh, spec: P = LEADING) -> Any:
    """The shapes of trees stacked along these leading axes, by default with the first one shared out."""
    return _placed(tree, NamedSharding(mesh, spec), lead)


def _placed(tree: Any, sharding: NamedSharding, lead: tuple[int, ...] = ()) -> Any:
    """The shapes with their places, without which JAX would not take a trace of them for one of the arrays."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(one, tree)


@partial(jax.jit, static_argnames=("shapes", "sharding"))
def _zeros(*, shapes: tuple[jax.ShapeDtypeStruct, ...], sharding: NamedSharding) -> list[Array]:
    return [jax.lax.with_sharding_constraint(leaf, sharding) for leaf in trees.zeros(list(shapes))]


@partial(jax.jit, static_argnames="mesh")
def take_rows(tree: Any, rows: Array, *, mesh: Mesh) -> Any:
    """The given rows of a tree that is shared out, shared out again."""
    sharding = NamedSharding(mesh, P(AXIS))
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf[rows], sharding), tree)


@partial(jax.jit, static_argnames="mesh", donate_argnames="tree")
def put_rows(tree: Any, rows: Array, new: Any, *, mesh: Mesh) -> Any:
    """The tree with the given rows replaced."""
    sharding = NamedSharding(mesh, P(AXIS))
    return jax.tree.map(
        lambda leaf, value: jax.lax.with_sharding_constraint(leaf.at[rows].set(value), sharding), tree, new
    )


def to_host(tree: Any, mesh: Mesh) -> Any:
    """The tree as numpy arrays, whichever process its parts live in."""
    if jax.process_count() > 1:
        tree = _copied_everywhere(tree, mesh=mesh)
    return jax.tree.map(np.asarray, tree)


@partial(jax.jit, static_argnames="mesh")
def _copied_everywhere(tree: Any, *, mesh: Mesh) -> Any:
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))


def shards_of(federation: Federation, mesh: Mesh, *parts: str) -> tuple[Shards, ...]:
    """The shards of the named parts over one pool, placed on each device once: a later call copies nothing."""
    scaling = np.float32(federation.shift), np.float32(federation.factor)
    pool = Pool(*everywhere((federation.x, federation.y, federation.scale, *scaling), mesh))

    def one(split: Split) -> Shards:
        start, count = everywhere((split.start.astype(np.int32), split.count.astype(np.int32)), mesh)
        return Shards(pool, start, count, int(split.count.max(initial=0)))

    return tuple(one(getattr(federation, part)) for part in parts)
