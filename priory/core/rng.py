"""Named key streams: one root key a run, only ever folded, never split.

A client's key is folded from its *id*, so order, chunking, dropouts and processes cannot change its draws, and
evaluating never perturbs training. Nothing is stored: (root, stream, round, id) rebuilds every key, so that a resumed
run draws what the run that never stopped would have drawn.
"""

from enum import IntEnum

import jax
from jax import Array

Key = Array


class Stream(IntEnum):
    """What a key is for. The numbers are part of every saved run: append, never renumber."""

    INIT = 0
    COHORT = 1
    CLIENT = 2
    ENROL = 3
    SERVER = 4
    CHANNEL = 5
    EVALUATION = 6
    CHOICE = 7
    EVIDENCE = 8
    CONFIDENCE = 9
    NOISE = 10
    CANARY = 11
    CERTIFICATE = 12


def root(seed: int) -> Key:
    """The root key of a run."""
    return jax.random.key(seed)


def key(root: Key, stream: Stream, *numbers: Array | int) -> Key:
    """The key of a stream at (round, client id), or of whatever numbers name the place."""
    folded = jax.random.fold_in(root, int(stream))
    for number in numbers:
        folded = jax.random.fold_in(folded, number)
    return folded
