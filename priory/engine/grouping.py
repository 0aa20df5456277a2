"""Clients in groups: the clusters they ended in, how those agree with the truth, and scores by architecture."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory.data import Federation
from priory.evaluate import ClientSlot
from priory.fed.capabilities import Clustered
from priory.fed.method import Method, Task
from priory.metrics import RegressionScores, Scores

OfEach = Callable[[np.ndarray, Callable[..., Any]], np.ndarray]


def clusters_of(method: Method, federation: Federation, of_each: OfEach) -> dict[str, Any]:
    """What a summary says of clusters: each client's number by name, and the adjusted Rand index; nothing without any.

    A client that is in none has None, and is left out of the index, which needs a truth. Newcomers are in none.

    Args:
        of_each: Gives the result of `function(task, slots)` for each of the clients with these ids.
    """
    if not isinstance(method, Clustered):
        return {}

    def numbers(task: Task, slots: ClientSlot) -> Array:
        del task
        return jnp.where(slots.joined, jax.vmap(method.cluster)(slots.state), -1)

    num = federation.num_clients
    found = of_each(np.arange(num), numbers)
    named = zip(federation.clients[:num], found.tolist(), strict=True)
    told: dict[str, Any] = {"clusters": {name: number if number >= 0 else None for name, number in named}}
    truth = federation.truth.get("cluster")
    if truth is not None and np.any(found >= 0):
        from sklearn.metrics import adjusted_rand_score  # few runs need it, and its import takes a second

        told["adjusted_rand_index"] = float(adjusted_rand_score(truth[:num][found >= 0], found[found >= 0]))
    return told


def by_architecture(models: tuple[str, ...], scores: Scores | RegressionScores) -> dict[str, dict[str, float | None]]:
    """Clients and their mean accuracy (or RMSE) for each model, client i having model i mod G; None without any."""
    name = "accuracy" if isinstance(scores, Scores) else "rmse"
    table: dict[str, dict[str, float | None]] = {}
    for group, model in enumerate(models):
        values = scores.per_client[name][group :: len(models)]
        # A model may be listed twice, to have it more often.
        label = model if model not in table else f"{model} ({group + 1})"
        known = values[np.isfinite(values)]
        table[label] = {"clients": len(values), name: float(known.mean()) if len(known) else None}
    return table
