"""Tables: a data frame or a CSV file as a `Dataset`.

The features (columns, categories, which columns have gaps) are read from the whole table, unless a schema file states
them (`schema`); `encoder` makes inputs of them.
"""

import importlib.util
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from priory.core.errors import UsageError
from priory.core.reading import check_memory, check_regular, reason
from priory.data import checks, labels
from priory.data.checks import Problems
from priory.data.columns import NEARLY_ALL, Column, feature_kind, holds_dates, numbering
from priory.data.dataset import Dataset
from priory.data.encoder import Feature, check_range, raw_matrix
from priory.data.options import ROLES, ReadOptions, takes

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["check_parquet", "describe_columns", "from_csv", "from_frame", "read_csv", "read_parquet"]

MOST_CATEGORIES = 50


def from_csv(path: str, options: ReadOptions) -> Dataset:
    """Return the table in a CSV file, as `from_frame` reads it."""
    problems = Problems()
    frame = read_csv(path, (options.target, options.client, *options.drop), problems)
    if options.target is None:
        raise UsageError(f"{path} needs target=, the column to predict; its columns are {checks.listing(frame)}.")
    return _read(frame, problems, options, Path(path).stem)


def read_csv(path: str, used: Sequence[str | None] = (), problems: Problems | None = None) -> "pd.DataFrame":
    """Return the table in a CSV file whose every column, except those `used` without one, has a name of its own.

    Args:
        problems: Keeps what is wrong with the names of columns, which is raised otherwise.
    """
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
        why = reason(error)
        raise UsageError(f"{path} cannot be read as CSV ({why}); save it as comma-separated UTF-8 text.") from None
    found = Problems() if problems is None else problems
    _check_header(path, [str(name) for name in header.iloc[0]], used, found)
    if problems is None:
        found.check()
    return frame


def read_parquet(path: str) -> "pd.DataFrame":
    """Return the table in a parquet file; needs the extra `priory[parquet]`."""
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
        raise UsageError(f"{path} cannot be read as parquet ({reason(error)}); write it again, or as .csv.") from None


def check_parquet() -> None:
    """Raise unless the library that reads and writes parquet is installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UsageError("pyarrow is not installed; install `priory[parquet]` for parquet files, or use .csv.")


@takes(ReadOptions)
def from_frame(
    frame: "pd.DataFrame", *, categorical: Sequence[str] = (), name: str = "frame", **options: Any
) -> Dataset:
    """Return the table as a data set; every column that has no role below becomes a feature.

    Args:
        categorical: Numeric columns to be read as categories; text is so anyway.
        options: Those of `ReadOptions`, except scaling and schema.
    """
    chosen = ReadOptions.make(options)
    chosen.refuse(name, "scaling", "schema")
    if chosen.target is None:
        raise UsageError(f"{name} needs target=, the column to predict; its columns are {checks.listing(frame)}.")
    return _read(frame, Problems(), chosen, name, categorical)


def _read(
    frame: "pd.DataFrame", problems: Problems, options: ReadOptions, name: str, categorical: Sequence[str] = ()
) -> Dataset:
    """Return the table as a data set, unless there is a problem, found before or here."""
    frame = frame.set_axis([str(column) for column in frame.columns], axis=1)
    named = {role: column for role in ROLES[:-1] if (column := getattr(options, role)) is not None}
    _check_columns(frame, problems, named, [*options.drop, *categorical])
    values = {role: frame[column].to_numpy() for role, column in named.items() if column in frame.columns}
    called = {role: f"{role} column {column!r}" for role, column in named.items()}
    label = None
    if "target" in values:
        label = problems.catch(labels.read_target, values["target"], called["target"], options.task)
    roles = labels.read_roles(values, called, problems.catch)
    used = {*named.values(), *options.drop}
    features = _features(frame[[column for column in frame.columns if column not in used]], problems, categorical)
    problems.check()
    assert label is not None
    y, num_classes, classes = label
    dataset = Dataset(
        name=name,
        x=raw_matrix(frame, features),
        y=y,
        num_classes=num_classes,
        classes=classes,
        features=features,
        source={"data": name, "memory": True, **named},
        **roles,
    )
    return replace(dataset, columns=describe_columns(frame, dataset, named, options.task))


def _features(frame: "pd.DataFrame", problems: Problems, categorical: Sequence[str]) -> tuple[Feature, ...]:
    """Return the features of a table; columns that cannot be used are problems by name."""
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
        check_range(name, column.to_numpy(float, na_value=np.nan), f", or {remedy}")
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


def _check_header(path: str, names: list[str], used: Sequence[str | None], problems: Problems) -> None:
    """Add what pandas would let pass, two columns of one name and columns without one; raise on another separator."""
    if len(names) == 1:
        for separator, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
            if separator in names[0]:
                raise UsageError(f"{path} seems to be separated by {word}; save it as comma-separated text.")
    for name, count in Counter(names).items():
        if name and count > 1:
            problems.add(f"{path} has two columns named {name!r}; give every column its own name.")
    for place, name in enumerate(names):
        unnamed = f"Unnamed: {place}"
        if not name and unnamed not in used:
            problems.add(
                f"{path} has no name for column {place + 1}, which may be a row index; name it, or leave it out with "
                f"drop={unnamed!r}."
            )


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
