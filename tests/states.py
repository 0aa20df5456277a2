"""All that a run keeps, as arrays by name: what two runs are compared by, and what a digest is taken of."""

import dataclasses
from typing import Any

import jax
import numpy as np

from priory.engine import devices

State = dict[str, np.ndarray]


def state_of(run: Any) -> State:
    """Return what server and clients of a run keep; a client that never joined has zeros."""
    mesh, num = run.evaluator.ready.plan.mesh, run.federation.num_clients
    rows = np.resize(np.arange(num), -(-num // mesh.size) * mesh.size)
    records = devices.to_host(run.evaluator.client_states.take(rows, run.completed), mesh)

    def of_joined(leaf: np.ndarray) -> np.ndarray:
        joined = records.joined.reshape((-1,) + (1,) * (leaf.ndim - 1))
        return np.where(joined, leaf, np.zeros_like(leaf))[:num]

    return named({"server": run.server, "clients": jax.tree.map(of_joined, records)})


def prepared_as(run: Any, completed: int | None = None, **changes: Any) -> Any:
    """Return the run as if it had been prepared with other values, or had done so many rounds."""
    evaluator = dataclasses.replace(run.evaluator, ready=dataclasses.replace(run.evaluator.ready, **changes))
    if completed is not None:
        evaluator = dataclasses.replace(evaluator, completed=completed)
    return dataclasses.replace(run, evaluator=evaluator)


def named(tree: Any) -> State:
    """Return the leaves of a tree by their path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
