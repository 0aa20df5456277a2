"""Choosing hyper-parameters on validation rows: all traced values and seeds of a grid in one compiled, vmapped run.

A method is a pytree whose traced fields are its leaves, so a grid over them is the method with a leading axis, and a
seed is one more. A static field (epochs, batch size) changes the program; those are an outer loop.

How many clusters a method has is chosen by itself: by the likelihood of validation rows, client by client.
"""

from priory.tune.clusters import Tried, check, fewest, is_open, settle, try_clusters
from priory.tune.search import Axis, Setting, ranked, tune
from priory.tune.validation import without_test

__all__ = [
    "Axis",
    "Setting",
    "Tried",
    "check",
    "fewest",
    "is_open",
    "ranked",
    "settle",
    "try_clusters",
    "tune",
    "without_test",
]
