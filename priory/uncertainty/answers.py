"""What the models of a run say of every held-out example, on the host: the rows that all numbers are computed from."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.data import Federation
from priory.data.dataset import Dataset
from priory.data.federation import Split, checksum
from priory.evaluate import ClassRows, ClientRows, Rows, batch_size
from priory.fed.shard import Pool, Shard, Shards

MOST_FOREIGN = 1000  # inputs from elsewhere that every personal model is asked about
MOST_BYTES = 1 << 28  # of rows that a device gives at once
SEED = 0

OfEach = Callable[[np.ndarray, Callable[..., Any]], Any]


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of one part of the clients, sorted by client, and what the models say of them.

    Attributes:
        rows: Columns, (examples, ...).
        y: Labels or targets.
        client: Place of each example's client in `Answers.clients`.
    """

    rows: Rows
    y: np.ndarray
    client: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The whole uncertainty of each example: the entropy of the class, or the standard deviation of the target."""
        parts = np.asarray(self.rows.aleatoric), np.asarray(self.rows.epistemic)
        return np.add(*parts) if isinstance(self.rows, ClassRows) else np.hypot(*parts)

    def of(self, client: int) -> slice:
        """Where the examples of a client stand."""
        return slice(*np.searchsorted(self.client, [client, client + 1]).tolist())


@dataclass(frozen=True, eq=False)
class Answers:
    """What one kind of model says, of the clients that it is for.

    Attributes:
        clients: Their names.
        train: Training examples of each.
        test: Test examples.
        validation: Validation examples, which conformal prediction is calibrated on; None where nobody has any.
        foreign: Uncertainty about foreign inputs, all of it and its epistemic part, (clients, 2, inputs); or None.
    """

    clients: tuple[str, ...]
    train: np.ndarray
    test: Examples
    validation: Examples | None
    foreign: np.ndarray | None


@dataclass(frozen=True, eq=False)
class ForeignInputs:
    """Inputs from elsewhere in the form of a federation's pool, and where they come from."""

    data: str
    x: np.ndarray
    scale: np.ndarray | None

    @property
    def checksum(self) -> str:
        """Tells these inputs from others."""
        return checksum(self.x, self.scale)[:16]

    def shard(self, pool: Pool) -> Shard:
        """The shard of all of them, scaled as the pool is."""
        own = replace(
            pool, x=jnp.asarray(self.x), y=None, scale=None if self.scale is None else jnp.asarray(self.scale)
        )
        return Shard(own, jnp.zeros(1, jnp.int32), jnp.full(1, len(self.x), jnp.int32), len(self.x))


def foreign_inputs(federation: Federation, given: Any) -> ForeignInputs:
    """The inputs of another data set, of an array or of a data frame; at most 1000, drawn with a fixed seed."""
    if isinstance(given, Dataset):
        name, x, scale = given.name, _inputs_of(federation, given), given.scale
    else:
        name, x, scale = "inputs", federation.form.read_inputs(given), None
    if federation.scale is not None and scale is None:
        raise UsageError(
            f"{name} has no standard errors, and the targets of {federation.name} are known with theirs; give a data "
            "set that has them."
        )
    if not len(x):
        raise UsageError(f"{name} has no rows to compare test inputs with; give at least one.")
    if x.dtype != federation.x.dtype:
        raise UsageError(
            f"{name} has inputs of type {x.dtype} where those of {federation.name} are {federation.x.dtype}, which are "
            "scaled in another way; give them in the same type and units."
        )
    chosen = np.arange(len(x))
    if len(x) > MOST_FOREIGN:
        chosen = np.sort(np.random.default_rng(SEED).permutation(len(x))[:MOST_FOREIGN])
    errors = None if federation.scale is None or scale is None else np.asarray(scale[chosen], np.float32)
    return ForeignInputs(name, x[chosen], errors)


def _inputs_of(federation: Federation, given: Dataset) -> np.ndarray:
    if federation.encoder is None and given.features is None:
        return federation.form.read_inputs(given.x)
    own = () if federation.encoder is None else federation.encoder.features
    columns = [[(feature.name, feature.categories) for feature in features] for features in (own, given.features or ())]
    if federation.encoder is None or columns[0] != columns[1]:
        raise UsageError(
            f"{given.name} does not have the columns and categories of {federation.name}; give a data frame that has."
        )
    return federation.encoder.encode(given.x)


def validation_of(federation: Federation, test: Shards) -> Shards:
    """The validation rows of the clients, over the pool of the test rows."""
    split = federation.validation
    start, count = (jnp.asarray(values, jnp.int32) for values in (split.start, split.count))
    return replace(test, start=start, count=count, capacity=int(split.count.max(initial=0)))


def collect(
    federation: Federation, ids: np.ndarray, of_each: OfEach, ask: Callable[..., ClientRows]
) -> dict[str, Answers]:
    """What the models say of the clients with these ids, by the part's name in `ClientTallies`.

    Clients of like size are asked together, so that memory follows the examples and not the largest client.

    Args:
        of_each: Gives what `function(task, ids, joined, states)` says of each of the clients.
        ask: `rows_of_clients` but for `batches` and what `of_each` passes.
    """
    splits = (federation.test, federation.validation)
    found: list[tuple[np.ndarray, dict[str, list[Any]]]] = []
    sizes = tuple(batch_size(int(split.count.max(initial=0))) for split in splits)
    for some, batches in _alike(splits, sizes, ids):
        step = _at_once(federation, batches * sum(sizes))
        for piece in (some[i : i + step] for i in range(0, len(some), step)):
            padded = np.resize(piece, min(step, len(some)))  # one program for all pieces
            found.append((piece, _trimmed(of_each(padded, partial(ask, batches=batches)), splits, piece)))
    order = np.argsort(np.concatenate([piece for piece, _ in found]))
    parts = {part: [one for _, parts in found for one in parts[part]] for part in found[0][1]}
    return {part: _joined(federation, ids, [clients[i] for i in order]) for part, clients in parts.items()}


def _alike(splits: tuple[Split, Split], sizes: tuple[int, ...], ids: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Clients with at most 1, 2, 4, 8, … batches of test and of validation rows, and that number."""
    most = np.ones(len(ids), int)
    for split, size in zip(splits, sizes, strict=True):
        most = np.maximum(most, -(-split.count[ids] // size))
    power = 2 ** np.ceil(np.log2(most)).astype(int)
    return [(ids[power == batches], int(batches)) for batches in np.unique(power)]


def _at_once(federation: Federation, rows: int) -> int:
    """Clients that are asked at once, each about so many rows."""
    columns = 16 if federation.num_classes is None else federation.num_classes + 2
    return max(1, MOST_BYTES // (4 * (3 * rows * columns + 2 * MOST_FOREIGN)))  # three kinds of model at most


def _trimmed(rows: ClientRows, splits: tuple[Split, Split], ids: np.ndarray) -> dict[str, list[Any]]:
    """For each part, a client at a time, test rows, validation rows and foreign scores without padding."""
    test, validation = splits

    def cut(tree: Any, place: int, num: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[place, :num], tree)

    def one(part: str, place: int, client: int) -> tuple[Rows, Rows | None, np.ndarray | None]:
        checked = rows.validation.get(part)
        return (
            cut(rows.test[part], place, test.count[client]),
            None if checked is None else cut(checked, place, validation.count[client]),
            None if rows.foreign is None or part != "personal" else np.asarray(rows.foreign[place]),
        )

    return {part: [one(part, place, client) for place, client in enumerate(ids)] for part in rows.test}


def _joined(federation: Federation, ids: np.ndarray, clients: list[Any]) -> Answers:
    ids = np.sort(ids)
    tests, checks, foreign = zip(*clients, strict=True)
    return Answers(
        clients=tuple(federation.clients[client] for client in ids),
        train=np.asarray(federation.train.count[ids]),
        test=_examples(federation, federation.test, ids, tests),
        validation=None if checks[0] is None else _examples(federation, federation.validation, ids, checks),
        foreign=None if foreign[0] is None else np.stack(foreign),
    )


def _examples(federation: Federation, split: Split, ids: np.ndarray, rows: tuple[Rows, ...]) -> Examples:
    together = jax.tree.map(lambda *leaves: np.concatenate(leaves).astype(np.float64), *rows)
    index = np.concatenate([np.arange(split.start[i], split.start[i] + split.count[i]) for i in ids])
    client = np.repeat(np.arange(len(ids)), split.count[ids])
    y = federation.y[index.astype(int)]
    return Examples(together, y if isinstance(together, ClassRows) else y.astype(np.float64), client)
