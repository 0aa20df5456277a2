"""Tables: a data frame or a CSV file as a `Dataset`, and the encoding of its columns as numbers.

Numeric columns are standardised and their gaps filled with the mean; text becomes one column a category; a column
with gaps gains an indicator column. The schema (columns, categories, which columns have gaps) is read from the whole
table. The means and deviations come from the training rows of the participants, pooled, never from validation rows,
test rows or newcomers: in a real federation the clients would share them as sums. Nothing of this is read from the rows
where a schema file states columns and bounds (`schema`).
"""

import importlib.util
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from priory.core.errors import UsageError
from priory.core.reading import check_memory, check_regular
from priory.data import checks, labels
from priory.data.checks import Problems
from priory.data.columns import NEARLY_ALL, Column, feature_kind, holds_dates, numbering
from priory.data.dataset import Dataset

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Encoder", "Feature", "bounded_encoder", "fit_encoder", "from_csv", "from_frame"]

MOST_CATEGORIES = 50


@dataclass(frozen=True)
class Feature:
    """One column of a table: its categories (None for numbers), whether it has gaps, and the bounds of its numbers.

    Only a schema states bounds. Numbers outside them are clipped.
    """

    name: str
    categories: tuple[str, ...] | None
    missing: bool
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class Encoder:
    """How raw columns become inputs: fitted on training rows or stated by a schema, applied to every row."""

    features: tuple[Feature, ...]
    mean: np.ndarray  # (features,) 0 for categories
    deviation: np.ndarray  # (features,) 1 for categories and for constant columns

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each encoded column."""
        columns = []
        for feature in self.features:
            columns += [f"{feature.name}={value}" for value in feature.categories or ()]
            columns += [feature.name] if feature.categories is None else []
            columns += [f"{feature.name} missing"] if feature.missing else []
        return tuple(columns)

    def encode(self, raw: np.ndarray) -> np.ndarray:
        """(rows, columns) float32 inputs from the (rows, features) raw matrix."""
        columns = []
        for index, feature in enumerate(self.features):
            value = raw[:, index]
            gap = np.isnan(value)
            if feature.bounds is not None:
                value = np.clip(value, *feature.bounds)
            if feature.categories is None:
                columns.append(np.where(gap, 0.0, (value - self.mean[index]) / self.deviation[index])[:, None])
            else:
                columns.append(value[:, None] == np.arange(len(feature.categories)))
            if feature.missing:
                columns.append(gap[:, None])
        return np.concatenate(columns, axis=1).astype(np.float32)

    def encode_frame(self, frame: "pd.DataFrame") -> np.ndarray:
        """(rows, columns) float32 inputs from a new data frame; a category never seen counts as missing."""
        named = frame.set_axis([str(column) for column in frame.columns], axis=1)
        return self.encode(raw_matrix(named, self.features))


def fit_encoder(features: tuple[Feature, ...], raw: np.ndarray) -> Encoder:
    """The encoder whose means and deviations are those of the given (training) rows."""
    numeric = np.array([feature.categories is None for feature in features])
    seen = ~np.isnan(raw)
    count = np.maximum(seen.sum(axis=0), 1)
    mean = np.where(seen, raw, 0.0).sum(axis=0) / count
    deviation = np.sqrt(np.where(seen, (raw - mean) ** 2, 0.0).sum(axis=0) / count)
    return Encoder(features, np.where(numeric, mean, 0.0), np.where(numeric & (deviation > 1e-12), deviation, 1.0))


def bounded_encoder(features: tuple[Feature, ...]) -> Encoder:
    """Return the encoder of features with bounds: a value that is uniform between them gets mean 0 and deviation 1.

    x' = √12 (x - (low + high)/2) / (high - low), which is between -√3 and √3.
    """
    low, high = np.array([feature.bounds or (0.0, 0.0) for feature in features]).T
    numeric = np.array([feature.categories is None for feature in features])
    return Encoder(features, low / 2 + high / 2, np.where(numeric, (high - low) / math.sqrt(12), 1.0))


def from_csv(path: str, *, target: str | None, client: str | None = None, **columns: Any) -> Dataset:
    """The table in a CSV file, as `from_frame` reads it."""
    frame, errors = _parse_csv(path, used=[target, client, *columns.get("drop", ())])
    if target is None:
        raise UsageError(f"{path} needs target=, the column to predict; its columns are {checks.listing(frame)}.")
    return _read(frame, Problems(errors), target=target, client=client, name=Path(path).stem, **columns)


def read_csv(path: str, used: Sequence[str] = ()) -> "pd.DataFrame":
    """The table in a CSV file whose every column, except those `used` without one, has a name of its own."""
    frame, errors = _parse_csv(path, used)
    Problems(errors).check()
    return frame


def _parse_csv(path: str, used: Sequence[str | None] = ()) -> "tuple[pd.DataFrame, list[UsageError]]":
    """The table in a CSV file, and what is wrong with the names of its columns, but for those `used` without one."""
    import pandas as pd

    try:
        check_memory(check_regular(Path(path)), "it needs")
        # Two lines, so that a header shorter than its rows is an error: pandas would take the rest for row names.
        header = pd.read_csv(path, header=None, nrows=2, dtype=str, skipinitialspace=True, keep_default_na=False)
        frame = pd.read_csv(path, skipinitialspace=True)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; give the path of a .csv file.") from None
    except pd.errors.EmptyDataError:
        raise UsageError(f"{path} is empty; give a file with a header line and rows.") from None
    except (OSError, ValueError, pd.errors.ParserError) as error:  # a UnicodeDecodeError is a ValueError
        reason = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} cannot be read as CSV ({reason}); save it as comma-separated UTF-8 text.") from None
    return frame, _errors_of_header(path, [str(name) for name in header.iloc[0]], used)


def read_parquet(path: str) -> "pd.DataFrame":
    """The table in a parquet file; needs the extra `priory[parquet]`."""
    check_parquet()
    import pandas as pd
    from pyarrow.parquet import ParquetFile

    try:
        check_regular(Path(path))
        with ParquetFile(path) as file:
            declared = file.metadata  # a column that repeats one value has few bytes, whatever its rows
        size = sum(declared.row_group(group).total_byte_size for group in range(declared.num_row_groups))
        check_memory(max(size, 8 * declared.num_rows * declared.num_columns), "its columns need")
        return pd.read_parquet(path)
    except (OSError, ValueError, NotImplementedError, KeyError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} cannot be read as parquet ({reason}); write it again, or as .csv.") from None


def check_parquet() -> None:
    """Raise unless the library that reads and writes parquet is installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UsageError("pyarrow is not installed; install `priory[parquet]` for parquet files, or use .csv.")


def from_frame(
    frame: "pd.DataFrame",
    *,
    target: str,
    client: str | None = None,
    drop: Sequence[str] = (),
    group: str | None = None,
    scale: str | None = None,
    task: str | None = None,
    categorical: Sequence[str] = (),
    name: str = "frame",
) -> Dataset:
    """The table as a data set; every column that has no role below becomes a feature.

    Args:
        client: Column of client names; without it the rows must be partitioned.
        group: Column of units (a patient, say) whose rows never fall on both sides of a split.
        scale: Column of known standard errors of the target (regression).
        task: 'classification' or 'regression'; by default inferred from the target.
        categorical: Numeric columns to be read as categories; text is so anyway.
    """
    return _read(
        frame,
        Problems(),
        target=target,
        client=client,
        drop=drop,
        group=group,
        scale=scale,
        task=task,
        categorical=categorical,
        name=name,
    )


def _read(
    frame: "pd.DataFrame",
    problems: Problems,
    *,
    target: str,
    client: str | None,
    name: str,
    drop: Sequence[str] = (),
    group: str | None = None,
    scale: str | None = None,
    task: str | None = None,
    categorical: Sequence[str] = (),
) -> Dataset:
    """The table as a data set, unless there is a problem, found before or here."""
    frame = frame.set_axis([str(column) for column in frame.columns], axis=1)
    roles = {"target": target, "client": client, "group": group, "scale": scale}
    named = {role: column for role, column in roles.items() if column is not None}
    _check_columns(frame, problems, named, [*drop, *categorical])

    def read(function: Callable[..., Any], role: str, *more: Any) -> Any:
        column = named.get(role)
        if column not in frame.columns:
            return None
        return problems.catch(function, frame[column].to_numpy(), f"{role} column {column!r}", *more)

    y, num_classes, classes = read(labels.read_target, "target", task) or (np.zeros(0), None, ())
    client_codes, clients = read(labels.codes, "client") or (None, ())
    group_codes, groups = read(labels.codes, "group") or (None, ())
    errors = read(standard_errors, "scale")
    used = {*named.values(), *drop}
    features = _features(frame[[column for column in frame.columns if column not in used]], problems, categorical)
    problems.check()
    dataset = Dataset(
        name=name,
        x=raw_matrix(frame, features),
        y=y,
        num_classes=num_classes,
        classes=classes,
        client=client_codes,
        clients=clients,
        group=group_codes,
        groups=groups,
        scale=errors,
        features=features,
        source={"data": name, "memory": True, **named},
    )
    return replace(dataset, columns=describe_columns(frame, dataset, named, task))


def _features(frame: "pd.DataFrame", problems: Problems, categorical: Sequence[str]) -> tuple[Feature, ...]:
    """The schema of a table; columns that cannot be used are problems by name."""
    if not len(frame.columns):
        problems.add("no column is left to predict from; drop fewer columns.")
    found = [problems.catch(_feature, frame[name], name, name in categorical) for name in frame.columns]
    return tuple(feature for feature in found if feature is not None)


def _feature(column: "pd.Series", name: str, is_categorical: bool) -> Feature:
    import pandas as pd

    gaps, remedy = bool(column.isna().any()), f"leave it out with --drop {name}"
    if column.isna().all():
        raise UsageError(f"column {name!r} has no value in any row; {remedy}.")
    if column.dtype.kind in "Mm" or pd.api.types.is_complex_dtype(column):
        raise UsageError(f"column {name!r} has type {column.dtype}; make it a number, or {remedy}.")
    is_numeric = pd.api.types.is_numeric_dtype(column)
    if is_numeric:
        _check_range(name, column.to_numpy(float, na_value=np.nan), f", or {remedy}")
    if is_numeric and not is_categorical:
        return Feature(name, None, gaps)
    present = column.dropna().to_numpy()
    _, values = labels.codes(present, f"column {name!r}")
    if not is_numeric and holds_dates(values):
        raise UsageError(
            f"column {name!r} holds dates such as {values[0]!r}, and text becomes categories; write it as a number, "
            f"such as days since a date, or {remedy}."
        )
    odd = None if is_numeric else labels.odd_one_out(values)
    is_name = not is_numeric and odd is None and len(values) > max(labels.SURELY_CLASSES, NEARLY_ALL * len(present))
    if is_name or len(values) > MOST_CATEGORIES:
        because = "" if odd is None else f", because of values such as {odd!r},"
        rule = "like an identifier" if is_name else f"above the {MOST_CATEGORIES} that become columns"
        merge = "" if is_name else ", or merge its rare values" if odd is None else ", or correct those values"
        raise UsageError(
            f"column {name!r} is not numeric{because} and has {len(values)} different values in {len(present)} rows, "
            f"{rule}; {remedy}{merge}."
        )
    if odd is not None:
        warnings.warn(
            f"column {name!r} is read as {len(values)} categories, because {odd!r} is no number; "
            "leave such cells empty if it should be numeric.",
            stacklevel=2,
        )
    return Feature(name, values, gaps)


def describe_columns(
    frame: "pd.DataFrame", dataset: Dataset, named: dict[str, str], task: str | None
) -> tuple[Column, ...]:
    """Return how each column was read, in the order of the table."""
    kinds, note = {"scale": "standard error of the target"}, ""
    kinds |= {"client": f"{len(dataset.clients)} names", "group": f"{len(dataset.groups)} names"}
    num, values = dataset.num_classes, frame[named["target"]]
    kinds["target"] = "number" if num is None else f"{num} classes: {checks.listing(dataset.classes, most=4)}"
    if num is not None and num > 2 and task is None and values.dtype.kind in "iuf":
        note = f"the target is whole numbers, taken for {num} classes; --task regression takes them for a quantity"
    of_role = {column: role for role, column in named.items()}
    of_feature = {feature.name: feature for feature in dataset.features or ()}
    found = []
    for name in frame.columns:
        column, feature = frame[name], of_feature.get(name)
        if feature is None:
            role = of_role.get(name, "dropped")
            found.append(Column(name, role, kinds.get(role, ""), note=note if role == "target" else ""))
            continue
        counts = numbering(name, column, dataset.client) if feature.categories is None else ""
        kind = feature_kind(column, feature.categories)
        found.append(Column(name, "feature", kind, int(column.isna().sum()), counts))
    return tuple(found)


def raw_matrix(frame: "pd.DataFrame", features: tuple[Feature, ...]) -> np.ndarray:
    """(rows, features) float64: numbers as they are, categories as codes, NaN for a gap or an unknown category."""
    absent = [feature.name for feature in features if feature.name not in frame.columns]
    if absent:
        raise UsageError(f"column {absent[0]!r} is absent; the columns are {checks.listing(frame.columns)}.")
    raw = np.full((len(frame), len(features)), np.nan)
    for index, feature in enumerate(features):
        column = frame[feature.name]
        if feature.categories is None:
            try:
                raw[:, index] = column.to_numpy(float, na_value=np.nan)
            except (TypeError, ValueError):
                raise UsageError(f"column {feature.name!r} is not numeric; make it a number.") from None
            _check_range(feature.name, raw[:, index])
        else:
            present = np.flatnonzero(column.notna())
            code, names = labels.codes(column.iloc[present].to_numpy(), f"column {feature.name!r}")
            place = {name: float(place) for place, name in enumerate(feature.categories)}
            known = np.array([place.get(name, np.nan) for name in names])
            raw[present, index] = known[code]
    return raw


def _check_range(name: str, values: np.ndarray, otherwise: str = "") -> None:
    """Raise where a number, which is no gap, has no single precision."""
    given = values[~np.isnan(values)]
    bad = given[~np.isfinite(checks.as_single(given))]
    if len(bad):
        what = "infinite" if np.isinf(bad).all() else checks.unusable(bad)
        raise UsageError(f"column {name!r} is {what} in {len(bad)} rows; correct those rows{otherwise}.")


def standard_errors(values: Any, what: str) -> np.ndarray:
    """The values as float32 standard errors, all above 0."""
    result = labels.real_numbers(values, what)
    if not (result > 0).all():
        raise UsageError(f"{what} has the value {result.min():g}, and a standard error is above 0; mend those rows.")
    return result


def _errors_of_header(path: str, names: list[str], used: Sequence[str | None]) -> list[UsageError]:
    """What pandas would let pass: one name for two columns, columns without a name; another separator is raised."""
    if len(names) == 1:
        for separator, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
            if separator in names[0]:
                raise UsageError(f"{path} seems to be separated by {word}; save it as comma-separated text.")
    errors = [
        UsageError(f"{path} has two columns named {name!r}; give every column its own name.")
        for name, count in Counter(names).items()
        if name and count > 1
    ]
    for place, name in enumerate(names):
        unnamed = f"Unnamed: {place}"
        if not name and unnamed not in used:
            errors.append(
                UsageError(
                    f"{path} has no name for column {place + 1}, which may be a row index; name it, or leave it out "
                    f"with drop={unnamed!r}."
                )
            )
    return errors


def _check_columns(frame: "pd.DataFrame", problems: Problems, named: dict[str, str], others: Sequence[str]) -> None:
    """Gather what is wrong with the names; raise where no column can be read."""
    columns = list(map(str, frame.columns))
    unknown = [str(name) for name in (*named.values(), *others) if name not in columns]
    for name in dict.fromkeys(unknown):
        problems.add(str(checks.unknown("column", name, columns)))
    before = len(problems.sentences)
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        problems.add(f"column {twice!r} occurs twice; give every column its own name.")
    if len(set(named.values())) < len(named):
        problems.add(f"one column has two roles in {named}; name a different column for each role.")
    if not len(frame):
        problems.add(f"the table with columns {checks.listing(columns)} has no rows; give at least one.")
    if len(problems.sentences) > before:
        problems.check()
