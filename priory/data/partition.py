"""Partitions: which client owns which row.

    iid                 shuffled and cut into equal parts
    dirichlet:A         each class is shared out over the clients by a draw from Dirichlet(A, ..., A)
    dirichlet:A:coarse  the same of the coarse classes, where the data have any (CIFAR-100)
    shards:S            each class is cut into S N / C equal shards, and a shuffled list of classes deals S to each
                        client (Oh et al., FedBABU, ICLR 2022, arXiv:2106.06042, and its code); two may be of one class
    classes:K           each client holds K different classes, drawn at random so that every class has as many holders
    classes:K:paired    client u holds the classes (K u + j) mod C, j < K (the split of the pFedBayes experiments)
    natural             the clients the data came with

A class is shared equally among its holders. An official test part follows the training part: each client's share of
a class in the test part is its share in the training part, so nobody is tested on a class it never saw.
"""

from dataclasses import dataclass

import numpy as np

from priory.core.errors import UsageError
from priory.data import checks

__all__ = ["KINDS", "Partition", "deal", "deal_alike", "deal_per_class", "parse"]

KINDS = ("iid", "dirichlet:A", "dirichlet:A:coarse", "shards:S", "classes:K", "classes:K:paired", "natural")
VARIANTS = {"classes": "paired", "dirichlet": "coarse"}  # words that may end a partition
EXAMPLES = {"dirichlet": "dirichlet:0.3", "shards": "shards:5", "classes": "classes:2"}
SWEEPS = 30  # pairwise trades that randomise `classes:K`; after a handful the start is forgotten


@dataclass(frozen=True)
class Partition:
    """A partition as the user wrote it, taken apart."""

    kind: str
    value: float = 0.0
    paired: bool = False
    coarse: bool = False

    def __str__(self) -> str:
        number = "" if self.kind in ("iid", "natural") else f":{self.value!r}".removesuffix(".0")
        return self.kind + number + (f":{VARIANTS[self.kind]}" if self.paired or self.coarse else "")


def parse(spec: str) -> Partition:
    """Return the partition that a text such as `dirichlet:0.3` names."""
    kind, *arguments = str(spec).split(":")
    forms = {form.split(":")[0]: form for form in KINDS if form.count(":") < 2}
    if kind not in forms:
        raise checks.unknown("partition", str(spec), KINDS)
    if kind in ("iid", "natural"):
        if arguments:
            raise UsageError(f"partition {spec!r} has an argument, and {kind} takes none; write {kind!r}.")
        return Partition(kind)
    varied = kind in VARIANTS and arguments[1:] == [VARIANTS[kind]]
    if len(arguments) != 1 + varied:
        forms |= {one: f"{forms[one]}' or '{forms[one]}:{word}" for one, word in VARIANTS.items()}
        raise UsageError(f"partition {spec!r} is malformed; write '{forms[kind]}' with a positive number.")
    remedy = f"write for example {EXAMPLES[kind]!r}"
    value = checks.number(
        arguments[0], float if kind == "dirichlet" else int, where=f"partition {spec!r}", remedy=remedy
    )
    return Partition(kind, value, paired=varied and kind == "classes", coarse=varied and kind == "dirichlet")


def deal(
    partition: Partition, label: np.ndarray, num_clients: int, num_classes: int, least: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the client of each row, -1 for a row that no client gets.

    Args:
        label: (rows,) class of each row.
        least: Rows that `dirichlet` makes sure every client has, by moving rows of the class a short client likes
            best from the client that has most of it.
    """
    if partition.kind == "iid":
        return _cut_equally(len(label), num_clients, rng)
    sizes = np.bincount(label, minlength=num_classes)
    if partition.kind == "dirichlet":
        counts = _dirichlet(partition.value, sizes, num_clients, least, rng)
    elif partition.kind == "shards":
        counts = _shards(int(partition.value), sizes, num_clients, rng)
    else:
        counts = _share_equally(held_classes(partition, num_clients, num_classes, rng), sizes)
    return _by_counts(counts, label, rng)


def deal_alike(
    partition: Partition,
    owner: np.ndarray,
    label: np.ndarray,
    other: np.ndarray,
    num_clients: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the client of each row of a second part, whose classes `other` are shared as `owner` shares `label`."""
    if partition.kind == "iid":
        return _cut_equally(len(other), num_clients, rng)
    num_classes = int(max(label.max(initial=0), other.max(initial=0))) + 1
    dealt = owner >= 0
    counts = np.bincount(
        owner[dealt].astype(np.int64) * num_classes + label[dealt], minlength=num_clients * num_classes
    ).reshape(num_clients, num_classes)
    share = counts / np.maximum(counts.sum(axis=0), 1)
    return _by_counts(_cut(share, np.bincount(other, minlength=num_classes)), other, rng)


def deal_per_class(
    partition: Partition,
    label: np.ndarray,
    num_clients: int,
    classes: tuple[str, ...],
    per_class: tuple[int, int],
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the client of each row or -1, and a mask of test rows: so many of each for every class a client holds."""
    if partition.kind not in ("iid", "classes"):
        raise UsageError(
            f"per_class does not go with partition '{partition}', which does not fix the classes of a client; "
            "use classes:K, classes:K:paired or iid (every class)."
        )
    if partition.kind == "iid":
        held = np.ones((num_clients, len(classes)), bool)
    else:
        held = held_classes(partition, num_clients, len(classes), rng)
    train, test = per_class
    owner = np.full(len(label), -1, np.int32)
    is_test = np.zeros(len(label), bool)
    for index, name in enumerate(classes):
        rows = rng.permutation(np.flatnonzero(label == index))
        holders = np.flatnonzero(held[:, index])
        need = len(holders) * (train + test)
        if need > len(rows):
            raise UsageError(
                f"per_class={train}/{test} asks for {need} examples of class {name!r} ({len(holders)} clients hold "
                f"it), and there are {len(rows)}; ask for fewer examples or fewer clients."
            )
        chosen = rows[:need].reshape(len(holders), train + test)
        owner[chosen] = holders[:, None]
        is_test[chosen[:, train:]] = True
    return owner, is_test


def held_classes(partition: Partition, num_clients: int, num_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Return (clients, classes) bool: who holds which class under `classes:K` or `classes:K:paired`."""
    k = int(partition.value)
    if k > num_classes:
        raise UsageError(
            f"partition '{partition}' gives a client {k} classes, and the data have {num_classes}; "
            f"choose K from 1 to {num_classes}."
        )
    held = np.zeros((num_clients, num_classes), bool)
    classes = (k * np.arange(num_clients)[:, None] + np.arange(k)) % num_classes
    np.put_along_axis(held, classes, True, axis=1)
    return held if partition.paired else _trade(held[:, rng.permutation(num_classes)], rng)


def _trade(held: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a random table with the same row and column sums (curveball chain: pairs of rows trade what differs)."""
    half = len(held) // 2
    for _ in range(SWEEPS):
        order = rng.permutation(len(held))
        first, second = order[:half], order[half : 2 * half]
        common, differ = held[first] & held[second], held[first] ^ held[second]
        rank = np.where(differ, rng.random(differ.shape), 2.0).argsort(axis=1).argsort(axis=1)
        to_first = differ & (rank < (held[first] & differ).sum(axis=1)[:, None])
        held[first], held[second] = common | to_first, common | (differ & ~to_first)
    return held


def _dirichlet(
    concentration: float, sizes: np.ndarray, num_clients: int, least: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the (clients, classes) numbers of rows that each client gets; every client has at least `least`."""
    share = rng.dirichlet(np.full(num_clients, concentration), size=len(sizes)).T
    if not np.isfinite(share).all():
        raise UsageError(f"dirichlet:{concentration:g} is too small to draw from; use 0.001 or more.")
    counts = _cut(share, sizes)
    total = counts.sum(axis=1)
    for short in np.flatnonzero(total < least):
        for label in np.argsort(-share[short], kind="stable"):
            while total[short] < least:
                spare = np.where(total > least, counts[:, label], 0)
                donor = int(spare.argmax())
                if spare[donor] == 0:
                    break
                moved = min(spare[donor], total[donor] - least, least - total[short])
                counts[donor, label] -= moved
                counts[short, label] += moved
                total[donor] -= moved
                total[short] += moved
    return counts


def _shards(shards: int, sizes: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Return the (clients, classes) numbers of rows that each client gets from its S shards."""
    num_classes = len(sizes)
    per_class, rest = divmod(shards * num_clients, num_classes)
    if rest:
        raise UsageError(
            f"shards:{shards} with {num_clients} clients makes {shards * num_clients} shards, which {num_classes} "
            "classes do not divide; choose S and clients so that S x clients is a multiple of the classes."
        )
    if per_class > sizes.min():
        raise UsageError(
            f"shards:{shards} with {num_clients} clients cuts each class into {per_class} shards, and the smallest "
            f"class has {sizes.min()} examples; choose fewer shards or fewer clients."
        )
    dealt = rng.permutation(np.repeat(np.arange(num_classes), per_class)).reshape(num_clients, shards)
    number = np.zeros((num_clients, num_classes), np.int64)
    np.add.at(number, (np.repeat(np.arange(num_clients), shards), dealt.ravel()), 1)
    # Whole shards only: the first `sizes mod per_class` shards of a class are one row longer than the others.
    stop = number.cumsum(axis=0)
    edges = stop * (sizes // per_class) + np.minimum(stop, sizes % per_class)
    return np.diff(edges, axis=0, prepend=0)


def _share_equally(held: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the (clients, classes) numbers of rows that each holder gets; the first few holders get the odd ones."""
    holders = np.maximum(held.sum(axis=0), 1)
    turn = held.cumsum(axis=0) - 1
    return held * (sizes // holders + (turn < sizes % holders))


def _cut(share: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return (clients, classes) whole numbers near share x size; zero where the share is zero."""
    edges = np.floor(share.cumsum(axis=0) * sizes + 1e-6).astype(np.int64)
    return np.diff(np.minimum(edges, sizes), axis=0, prepend=0)


def _by_counts(counts: np.ndarray, label: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the owner of each row, drawn at random so that client k gets counts[k, c] rows of class c."""
    owner = np.full(len(label), -1, np.int32)
    for index in range(counts.shape[1]):
        rows = rng.permutation(np.flatnonzero(label == index))
        taken = np.repeat(np.arange(len(counts), dtype=np.int32), counts[:, index])
        owner[rows[: len(taken)]] = taken
    return owner


def _cut_equally(num_rows: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Return the owner of each row: shuffled, then cut into parts that differ by at most one row."""
    owner = np.empty(num_rows, np.int32)
    owner[rng.permutation(num_rows)] = np.arange(num_rows) * num_clients // max(num_rows, 1)
    return owner
