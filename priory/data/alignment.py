"""Alignment sets: unlabelled rows that everybody knows, on which clients may compare what they predict.

    own:N               N rows of the data set itself, held out before anything is dealt, so that no client holds one
    own:N:classes=K     the same, of K classes only
    DATASET:N           rows of another data set of the same shape, by name; :classes=K as above
    FILE.npz, FILE.npz:N    all rows, or N, of the array x of a file, or of its only array

Rows are drawn from the training part where the data have an official test part, one of each class in turn, and of its
own rows the data set keeps one of each class. The order follows from the seed alone, so a smaller set is the beginning
of a larger one, and fewer classes are among more.
Where the data have groups, whole groups are held out, one of each class in turn by their commonest class. Rows of these
that the set has no use for belong to no client either, so that the rows of a group stay on one side.
Rows are raw, like the pool: shift and factor of the federation apply to them, and no transform touches them.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from priory.core.errors import UsageError
from priory.data import checks, npz
from priory.data.dataset import Dataset
from priory.data.encoder import Encoder
from priory.data.splits import Purpose, majority, rank, stream

__all__ = ["FORMS", "Alignment", "PublicRows", "draw", "encoded", "parse", "without"]

FORMS = ("own:500", "own:500:classes=5", "DATASET:500", "FILE.npz", "FILE.npz:500")
MOST_RATIO = 30.0  # by which the spread of the rows may differ from that of the data
MEASURED = 2000  # rows that are enough to measure a spread


@dataclass(frozen=True)
class Alignment:
    """An alignment set as the user wrote it, taken apart."""

    source: str  # own, a data set or the path of a .npz file
    rows: int | None  # None: all, of a file
    classes: int | None = None  # None: all

    @property
    def own(self) -> bool:
        """Whether the rows are held out of the data set itself."""
        return self.source == "own"

    @property
    def is_file(self) -> bool:
        """Whether the rows come from a file."""
        return self.source.endswith(".npz")

    def __str__(self) -> str:
        rows = "" if self.rows is None else f":{self.rows}"
        return self.source + rows + ("" if self.classes is None else f":classes={self.classes}")


@dataclass(frozen=True, eq=False)
class PublicRows:
    """The rows of an alignment set as their source has them: a table's still are raw columns."""

    spec: Alignment
    source: str
    index: np.ndarray  # (rows,) int64
    x: np.ndarray  # (rows, ...)
    held: np.ndarray  # the rows of the data set itself that no client may have


def parse(text: str) -> Alignment:
    """Return the alignment set that a text such as `own:500` names."""
    *parts, last = str(text).split(":")
    remedy = f"write one of {checks.listing(FORMS)}"
    classes = None
    if last.startswith("classes=") and parts:
        classes = checks.number(last.removeprefix("classes="), int, where=f"align {text!r}", remedy=remedy)
        *parts, last = parts
    if last.endswith(".npz"):
        source, rows = ":".join([*parts, last]), None
    elif parts and parts[0]:
        source, rows = ":".join(parts), checks.number(last, int, where=f"align {text!r}", remedy=remedy)
    else:
        raise UsageError(f"align {text!r} does not say how many rows of what; {remedy}.")
    if source.endswith(".npz"):
        if classes is not None:
            raise UsageError(f"align {text!r} chooses classes, and the rows of a file have none; leave out classes.")
        source = str(Path(source).resolve())  # a manifest may be run again from anywhere
    if classes is not None and rows is not None and classes > rows:
        raise UsageError(f"align {text!r} spreads {rows} rows over {classes} classes; ask for a row a class or more.")
    return Alignment(source, rows, classes)


def draw(spec: Alignment, dataset: Dataset, seed: int, mixed: str | None = None) -> PublicRows:
    """Return the rows that the spec names, checked against the data set that is to be dealt.

    Args:
        mixed: The data set that a transform deals to clients as well.
    """
    _check_apart(spec, dataset, mixed)
    if spec.is_file:
        x, name = _read(spec.source), spec.source
        index = held = _chosen(spec, np.zeros(len(x), np.int32), name, seed)
    else:
        source = dataset if spec.own else _load(spec.source)
        x, name = source.x, str(source.source.get("data", source.name))
        if spec.classes is not None and source.num_classes is None:
            raise UsageError(f"align '{spec}' chooses classes, and {name} is a regression; leave out classes.")
        part = np.arange(len(x)) if source.official_test is None else np.flatnonzero(~source.official_test)
        label = np.zeros(len(part), np.int32) if source.num_classes is None else source.y[part]
        if spec.own and source.group is not None:
            index, held = (part[rows] for rows in _chosen_by_group(spec, label, source.group[part], name, seed))
        else:
            index = held = part[_chosen(spec, label, name, seed)]
        if not spec.own:
            _check_kind(spec, source, dataset)
    x = x[index]
    return PublicRows(spec, name, index, x if spec.own else _fitting(spec, x, dataset), held)


def without(dataset: Dataset, index: np.ndarray) -> Dataset:
    """Return the data set without these rows; codes of groups count from 0 without gaps again."""
    keep = np.ones(len(dataset.y), bool)
    keep[index] = False
    left, group = (None, None) if dataset.group is None else np.unique(dataset.group[keep], return_inverse=True)

    def kept(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[keep]

    return replace(
        dataset,
        x=dataset.x[keep],
        y=dataset.y[keep],
        client=kept(dataset.client),
        coarse=kept(dataset.coarse),
        scale=kept(dataset.scale),
        official_test=kept(dataset.official_test),
        group=None if group is None else group.astype(np.int32),
        groups=() if left is None else tuple(dataset.groups[code] for code in left),
    )


def encoded(public: PublicRows, training: np.ndarray, factor: np.ndarray, encoder: Encoder | None) -> np.ndarray:
    """Return the rows in the form of the pool, once its training rows are known; a foreign scale is refused."""
    x = public.x if encoder is None else encoder.encode(public.x)
    if public.spec.own:
        return x
    data = _thinned(training)
    centre = data.mean(axis=0)
    # Around the centre of the data, so that one row has a spread as well, and a foreign origin is seen.
    theirs, ours = (float(np.sqrt(np.mean(((each - centre) * factor) ** 2))) for each in (_thinned(x), data))
    if not ours / MOST_RATIO <= theirs <= ours * MOST_RATIO:
        raise UsageError(
            f"align '{public.spec}' spreads {theirs:.3g} around the mean of the data once scaled like them, and they "
            f"spread {ours:.3g}, which is not within a factor of {MOST_RATIO:g}; bring it to the units of the data."
        )
    return x


def _check_apart(spec: Alignment, dataset: Dataset, mixed: str | None) -> None:
    """Raise where a client could hold a row of the alignment set, or rows that belong together would be parted."""
    name = dataset.source.get("data", dataset.name)
    if spec.source == name:
        raise UsageError(f"align '{spec}' takes rows that are dealt to clients; write own:N to hold them out first.")
    if mixed is not None and mixed == (name if spec.own else spec.source):
        raise UsageError(f"align '{spec}' takes rows that transform 'mix:{mixed}' deals to clients; choose another.")
    if not spec.own and dataset.features is not None:
        raise UsageError(
            f"align '{spec}' has no columns that fit the table {dataset.name}; hold out its own with own:N."
        )


def _load(source: str) -> Dataset:
    from priory.data.datasets import CATALOGUE, load

    names = [entry.name for entry in CATALOGUE]
    if source not in names and not source.startswith("synthetic:"):
        raise checks.unknown("alignment source", source, ["own", *names, "a .npz file"])
    return load(source)


def _read(path: str) -> np.ndarray:
    """Return the array x of a .npz file, or its only array, (rows, ...)."""
    called = f"align {path!r}"
    names = npz.read(path, (), called, "x=x")[1]
    chosen = "x" if "x" in names else names[0] if len(names) == 1 else None
    x = None if chosen is None else npz.read(path, (chosen,), called, "x=x")[0][chosen]
    if x is None:
        found = checks.listing(names) or "nothing"
        raise UsageError(f"{called} has no array 'x', only {found}; write it with numpy.savez(path, x=x).")
    if x.dtype.kind not in "biuf" or not x.size or not x.ndim:
        raise UsageError(f"{called} has {x.dtype} of shape {x.shape}, no row of numbers; give one or more rows.")
    return x if x.ndim > 1 else x[:, None]


def _chosen(spec: Alignment, label: np.ndarray, name: str, seed: int) -> np.ndarray:
    """Return the rows that are drawn, one of each class in turn; of its own the data set keeps one of each class."""
    if spec.rows is None:
        return np.arange(len(label))
    drawn = _in_turn(spec, label, name, seed)
    _check_number(spec, len(drawn), name)
    return drawn[: spec.rows]


def _chosen_by_group(
    spec: Alignment, label: np.ndarray, group: np.ndarray, name: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that are drawn, and all rows of their groups.

    A group that has the last row of a class stays in the data set.
    """
    assert spec.rows is not None
    _, unit = np.unique(group, return_inverse=True)
    of_unit = majority(unit, label)
    order = _in_turn(spec, of_unit, name, seed)
    fits = np.ones(len(label), bool) if spec.classes is None else np.isin(label, of_unit[order])
    members = np.split(np.argsort(unit, kind="stable"), np.cumsum(np.bincount(unit))[:-1])
    left, index, held = np.bincount(label), np.zeros(0, np.int64), np.zeros(0, np.int64)
    for rows in (members[place] for place in order):
        if len(index) >= spec.rows:
            break
        after = left - np.bincount(label[rows], minlength=len(left))
        if (after[label[rows]] > 0).all():
            left, held, index = after, np.r_[held, rows], np.r_[index, rows[fits[rows]]]
    _check_number(spec, len(index), name)
    return index[: spec.rows], held


def _check_number(spec: Alignment, found: int, name: str) -> None:
    if spec.rows is not None and spec.rows > found:
        of = "" if spec.classes is None else f" of {spec.classes} classes"
        raise UsageError(
            f"align '{spec}' asks for {spec.rows} rows{of}, and {name} can give {found}; ask for at most that."
        )


def _in_turn(spec: Alignment, label: np.ndarray, name: str, seed: int) -> np.ndarray:
    """Return all rows (or groups) that may be drawn, one of each class in turn."""
    rng = stream(seed, Purpose.ALIGN)
    to_give = np.bincount(label) - spec.own
    classes = rng.permutation(np.flatnonzero(to_give > 0))
    if spec.classes is not None and spec.classes > len(classes):
        raise UsageError(
            f"align '{spec}' asks for {spec.classes} classes, and {name} can give {len(classes)}; ask for at most that."
        )
    place = np.full(len(to_give), len(classes))
    place[classes] = np.arange(len(classes))
    shuffled = rng.permutation(len(label))
    by_class = shuffled[np.argsort(place[label[shuffled]], kind="stable")]
    turn = rank(label[by_class])
    allowed = (turn < to_give[label[by_class]]) & (place[label[by_class]] < (spec.classes or len(classes)))
    return by_class[allowed][np.argsort(turn[allowed], kind="stable")]


def _check_kind(spec: Alignment, source: Dataset, dataset: Dataset) -> None:
    if source.features is not None:
        raise UsageError(f"align '{spec}' is a table, whose columns mean nothing to {dataset.name}; write own:N.")
    ours, theirs = dataset.pixel_max, source.pixel_max
    if ours is not None and theirs is not None and ours != theirs:
        raise UsageError(
            f"align '{spec}' has pixels from 0 to {theirs}, and those of {dataset.name} go to {ours}; choose another."
        )


def _fitting(spec: Alignment, x: np.ndarray, dataset: Dataset) -> np.ndarray:
    """Return rows from elsewhere in the shape and type of the data set's."""
    shape, name = dataset.x.shape[1:], dataset.name
    if x.shape[1:] != shape:
        raise UsageError(
            f"align '{spec}' has rows of shape {x.shape[1:]}, and {name} has {shape}; give rows like those."
        )
    if dataset.x.dtype != np.uint8:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
    finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
    if not finite.all():
        raise UsageError(
            f"align '{spec}' is NaN or infinite in {int((~finite).sum())} of {len(x)} rows; mend or drop those rows."
        )
    if dataset.x.dtype != np.uint8:
        return x
    brightest = 255 if dataset.pixel_max is None else dataset.pixel_max
    if x.dtype != np.uint8 or x.max() > brightest:
        raise UsageError(
            f"align '{spec}' has {x.dtype} from {float(x.min()):g} to {float(x.max()):g}, and {name} has uint8 up to "
            f"{brightest}; bring the rows to that scale and save them as uint8."
        )
    return x


def _thinned(x: np.ndarray) -> np.ndarray:
    """Return at most `MEASURED` rows, evenly spread, in double precision."""
    return x[:: -(-len(x) // MEASURED)].astype(np.float64)
