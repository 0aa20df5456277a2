"""Names to numbers: classes, clients and groups as codes from 0, and the kind of task that a target suggests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from priory.core.errors import UsageError
from priory.data import checks

__all__ = [
    "codes",
    "known_codes",
    "odd_one_out",
    "plain",
    "read_roles",
    "read_target",
    "real_numbers",
    "standard_errors",
]

TASKS = ("classification", "regression")
MOST_CLASSES = 100  # a whole-number target with more distinct values than this is taken for a quantity
SURELY_CLASSES = 10  # one with at most this many for classes, however few its rows
ROWS_A_CLASS = 5  # between the two it must have this many rows a class on average
MOST_NAMED = 1000  # more classes than this, or than a tenth of the rows, are surely no classes


def codes(values: ArrayLike, what: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return int32 codes from 0 and the sorted names they stand for; missing values are refused."""
    array = _one_dimensional(values, what)
    missing = int(_missing(array).sum())
    if missing:
        raise UsageError(f"{what} is missing in {missing} of {len(array)} rows; fill them in or drop those rows.")
    if array.dtype == object:
        array = array.astype(str)
    names, code = np.unique(array, return_inverse=True)
    return code.astype(np.int32), tuple(plain(name) for name in names.tolist())


def read_target(
    values: ArrayLike, what: str, task: str | None = None, classes: tuple[str, ...] = ()
) -> tuple[np.ndarray, int | None, tuple[str, ...]]:
    """Return the target as labels or real numbers, the number of classes (None for regression) and the class names.

    Labels are renumbered from 0 in sorted order and keep their names, unless `classes` names them all: then they
    must already be 0 to C - 1. Without `task` and `classes`, more than 10 classes are refused if they are more than a
    tenth of the rows or more than 1,000.
    """
    if task_of(values, what, task, bool(classes)) == "regression":
        return real_numbers(values, what), None, ()
    label, names = codes(values, what)
    if task is None and not classes:
        _check_classes(values, names, len(label), what)
    if not classes:
        return label, len(names), names
    raw = _one_dimensional(values, what)
    if raw.dtype.kind not in "iub" or raw.min() < 0 or raw.max() >= len(classes):
        raise UsageError(
            f"{what} has the labels {checks.listing(names)}, and {len(classes)} classes are named; "
            f"give whole numbers from 0 to {len(classes) - 1}, or name more classes."
        )
    return raw.astype(np.int32), len(classes), tuple(map(str, classes))


def _check_classes(values: ArrayLike, names: tuple[str, ...], rows: int, what: str) -> None:
    """Raise where there are too many classes for the target to have any, unless the task is asked for."""
    num = len(names)
    if num <= SURELY_CLASSES or (num <= MOST_NAMED and 10 * num <= rows):
        return
    rule = f"and classes are at most {f'{MOST_NAMED:,}' if num > MOST_NAMED else 'a tenth of the rows'}"
    if np.asarray(values).dtype.kind in "iuf":
        raise UsageError(
            f"{what} has {num:,} different whole numbers in {rows:,} rows, {rule}; choose --task regression for "
            "a quantity, or --task classification for classes."
        )
    odd = odd_one_out(names)
    because = "" if odd is None else f", because of values such as {odd!r},"
    remedy = "name another column with --target" if odd is None else "drop those rows"
    raise UsageError(
        f"{what} is text{because} with {num:,} different values in {rows:,} rows, {rule}; {remedy}, or choose "
        "--task classification if each is a class."
    )


def odd_one_out(values: Sequence[str]) -> str | None:
    """Return a value that is no number where most are, such as '?' for a gap; None for true categories."""
    odd = []
    for value in values:
        try:
            float(value)
        except ValueError:
            odd.append(value)
    return odd[0] if odd and len(odd) < len(values) / 2 and len(values) > 2 else None


def known_codes(values: ArrayLike, classes: tuple[str, ...], what: str) -> np.ndarray:
    """Return int32 codes of labels, which are class names, or numbers from 0 where the names are words."""
    array = _one_dimensional(values, what)
    place = {name: code for code, name in enumerate(classes)}
    names = [plain(value) for value in array.tolist()]
    if all(name in place for name in names):
        return np.array([place[name] for name in names], np.int32)
    words = not any(name.lstrip("-").isdigit() for name in classes)
    if words and array.dtype.kind in "iu" and array.min() >= 0 and array.max() < len(classes):
        return array.astype(np.int32)
    unknown = sorted({name for name in names if name not in place})
    raise UsageError(
        f"{what} has the labels {checks.listing(unknown)}, which the federation never saw; "
        f"label the rows with {checks.listing(classes)}."
    )


def task_of(values: ArrayLike, what: str, task: str | None, named_classes: bool = False) -> str:
    """Return 'classification' or 'regression': as asked, else from the values.

    Text, truth values and up to 100 distinct whole numbers are classes, beyond 10 only with 5 rows of each on
    average (prices in a short table are whole numbers too); everything else is a quantity.
    """
    if task is not None:
        if task not in TASKS:
            raise checks.unknown("task", str(task), TASKS)
        return task
    array = _one_dimensional(values, what)
    if named_classes or array.dtype.kind not in "iuf":
        return "classification"
    distinct = np.unique(array)
    few = len(distinct) <= max(SURELY_CLASSES, min(MOST_CLASSES, len(array) // ROWS_A_CLASS))
    return "classification" if few and bool((np.floor(distinct) == distinct).all()) else "regression"


def real_numbers(values: ArrayLike, what: str) -> np.ndarray:
    """Return the values as finite float32."""
    array = _one_dimensional(values, what)
    try:
        result = checks.as_single(array)
    except (TypeError, ValueError):
        raise UsageError(f"{what} is not numeric; give numbers, or task='classification' for names.") from None
    bad = int((~np.isfinite(result)).sum())
    if bad:
        raise UsageError(f"{what} is {checks.unusable(array)} in {bad} of {len(result)} rows; mend or drop those rows.")
    return result


def standard_errors(values: ArrayLike, what: str) -> np.ndarray:
    """Return the values as float32 standard errors, all above 0."""
    result = real_numbers(values, what)
    if not (result > 0).all():
        raise UsageError(f"{what} has the value {result.min():g}, and a standard error is above 0; mend those rows.")
    return result


def read_roles(
    values: Mapping[str, Any],
    called: Mapping[str, str],
    read: Callable[..., Any] = lambda function, *args: function(*args),
) -> dict[str, Any]:
    """Return the fields of a `Dataset` that say whose each row is, what group it is of, and its standard error.

    Args:
        values: (rows,) values by role (client, group, scale); None or absent where there are none.
        called: What errors call the values.
        read: Calls a function, and may return None where that raises.
    """
    given = {role: values[role] for role in ("client", "group", "scale") if values.get(role) is not None}
    found = {role: read(standard_errors if role == "scale" else codes, given[role], called[role]) for role in given}
    fields = {"scale": found.get("scale")}
    for role in ("client", "group"):
        fields[role], fields[f"{role}s"] = found.get(role) or (None, ())
    return fields


def _one_dimensional(values: ArrayLike, what: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise UsageError(f"{what} has shape {array.shape}; give one value a row.")
    if array.dtype.kind not in "biufUSO":
        raise UsageError(f"{what} has type {array.dtype}; give numbers or text.")
    return array


def _missing(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "f":
        return np.isnan(array)
    if array.dtype == object:
        return np.array([value is None or value != value for value in array.tolist()], bool)
    return np.zeros(len(array), bool)


def plain(value: object) -> str:
    """Return a value as a name, without a needless '.0'."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
