"""Who is drawn for what: independent random streams, and stratified draws within clients.

Every purpose has its own stream, so that asking for a validation part or for newcomers reshuffles nothing else.
"""

from enum import IntEnum

import numpy as np

__all__ = ["Purpose", "draw", "hold_out", "hold_out_units", "majority", "rank", "stream"]


class Purpose(IntEnum):
    """What a random stream is for."""

    DEAL = 0
    DEAL_TEST = 1
    TEST = 2
    VALIDATION = 3
    NEWCOMERS = 4
    SIZES = 5
    CLUSTER = 6
    ROTATE = 7
    CORRUPT = 8
    PIXELS = 9
    NATURAL = 10
    ALIGN = 11


def stream(seed: int, purpose: Purpose, *more: int) -> np.random.Generator:
    """Return a generator that depends on the seed, the purpose and nothing else."""
    return np.random.default_rng([seed, int(purpose), *more])


def draw(client: np.ndarray, label: np.ndarray, wanted: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a mask that picks `wanted[k]` rows of each client k, its classes in proportion.

    Each class first gives the whole part of its share; what is left goes to the largest remainders, and a class
    gives its last row only when no other class can give one.

    Args:
        client: (rows,) client of each row, from 0.
        label: (rows,) class of each row, from 0; all zero for regression.
        wanted: (clients,) rows to pick; at most what the client has.
    """
    if not len(client):
        return np.zeros(0, bool)
    num_labels = int(label.max()) + 1
    cells, cell = np.unique(client.astype(np.int64) * num_labels + label, return_inverse=True)
    size = np.bincount(cell)
    owner = cells // num_labels
    rows = np.bincount(client, minlength=len(wanted))
    share = size * wanted[owner] / rows[owner]
    take = np.floor(share + 1e-9).astype(np.int64)
    extra = wanted - np.bincount(owner, weights=take, minlength=len(wanted)).astype(np.int64)
    left = size - take
    order = np.lexsort((rng.random(len(cells)), take - share, left < 2, left < 1, owner))
    take[order] += rank(owner[order]) < extra[owner[order]]
    shuffled = np.lexsort((rng.random(len(cell)), cell))
    mask = np.zeros(len(cell), bool)
    mask[shuffled] = rank(cell[shuffled]) < take[cell[shuffled]]
    return mask


def hold_out(client: np.ndarray, label: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Return a mask of about `fraction` of each client's rows, stratified by class; every client keeps one or more."""
    rows = np.bincount(client)
    wanted = np.minimum(np.floor(fraction * rows + 0.5), np.maximum(rows - 1, 0)).astype(np.int64)
    return draw(client, label, wanted, rng)


def hold_out_units(
    client: np.ndarray, label: np.ndarray, unit: np.ndarray | None, fraction: float, rng: np.random.Generator
) -> np.ndarray:
    """Return the mask of `hold_out`, with the rows of one unit (a patient's visits, say) always on the same side."""
    if unit is None:
        return hold_out(client, label, fraction, rng)
    _, first, inverse = np.unique(unit, return_index=True, return_inverse=True)
    return hold_out(client[first], majority(inverse, label), fraction, rng)[inverse]


def majority(unit: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Return the commonest class of each unit; `unit` counts from 0 without gaps."""
    num_labels = int(label.max()) + 1
    counts = np.bincount(unit.astype(np.int64) * num_labels + label, minlength=(int(unit.max()) + 1) * num_labels)
    return counts.reshape(-1, num_labels).argmax(axis=1)


def rank(key: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, ... within each run of equal values of a sorted key."""
    starts = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    return np.arange(len(key)) - np.repeat(starts, np.diff(np.r_[starts, len(key)]))
