"""How the columns of a table are read, as text: a line for each of them, and what the user should look at."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from priory.core.text import one_line
from priory.data import checks

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Column", "feature_kind", "holds_dates", "lines", "numbering"]

FEW_VALUES = 10  # a numeric column with at most so many whole numbers may hold codes
MOST_LISTED = 20  # features with a line each
MOST_NOTES = 10
NEARLY_ALL = 0.9
LEAST_STEPS = 10  # differences that show that a column counts
LEAST_ROWS = 30  # rows that have different whole numbers by chance only where these are large
MONTH = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([t ].*)?"
    rf"|\d{{1,2}}[-/. ]+({MONTH}|\d{{1,2}})[-/., ]+(\d{{4}}|\d{{2}})( .*)?"
    rf"|{MONTH}\.? \d{{1,2}},? \d{{4}}( .*)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Column:
    """How one column of a table was read.

    Attributes:
        role: target, client, group, scale, feature or dropped.
        kind: Of values: number, yes/no, categories with their number, classes; empty if dropped.
        missing: Cells without a value.
        note: Sentence on what the user should look at; empty for most columns.
    """

    name: str
    role: str
    kind: str
    missing: int = 0
    note: str = ""


def lines(columns: Sequence[Column]) -> list[str]:
    """Return a line for each column that is not a feature, for up to 20 features, and for what should be looked at."""
    features = [column for column in columns if column.role == "feature"]
    listed = features
    if len(features) > MOST_LISTED:
        listed = [column for column in features if column.kind != "number" or column.missing][:MOST_LISTED]
    others = [column for column in columns if column.role not in ("feature", "dropped")]
    width = max((len(one_line(column.name)) for column in (*others, *listed)), default=0)
    told = []
    for column in (*others, *listed):
        gaps = f", {column.missing} missing" if column.missing else ""
        told.append(f"  {one_line(column.name):{width}}  {column.role:7}  {column.kind}{gaps}")
    left = Counter(_sort(column) for column in features if column not in listed)
    more = "more " if listed else ""
    told += [f"  and {num} {more}{sort} column{'' if num == 1 else 's'}" for sort, num in left.items()]
    dropped = [column.name for column in columns if column.role == "dropped"]
    told += [f"  dropped: {checks.listing(dropped)}"] if dropped else []
    notes = [f"  {column.note}" for column in (*others, *features) if column.note]
    left_out = [f"  and {len(notes) - MOST_NOTES} more such columns"] if len(notes) > MOST_NOTES else []
    return told + notes[:MOST_NOTES] + left_out


def feature_kind(values: "pd.Series", categories: Sequence[str] | None) -> str:
    """Return the kind of an input column: a number, yes/no, or categories with their names."""
    if categories is not None:
        return (
            f"{len(categories)} categor{'y' if len(categories) == 1 else 'ies'}: {checks.listing(categories, most=4)}"
        )
    whole = _whole_numbers(values)
    distinct = np.unique(whole) if whole is not None else np.zeros(0)
    if 1 <= len(distinct) <= 2 and set(distinct.tolist()) <= {0.0, 1.0}:
        return "yes/no (0, 1)"
    return f"number, {len(distinct)} values" if 1 < len(distinct) <= FEW_VALUES else "number"


def numbering(name: str, values: "pd.Series", owner: np.ndarray | None) -> str:
    """Return a warning if a numeric column seems to number the rows, of all or of each client, else an empty text.

    Args:
        owner: (rows,) client of each row.
    """
    whole = _whole_numbers(values)
    if whole is None or len(whole) < len(values) or len(whole) <= LEAST_STEPS:
        return ""
    everybody = np.zeros(len(whole), np.int32)
    if _counts_up(whole, everybody) or (owner is not None and _counts_up(whole, owner)):
        why = "counts up by 1, as row numbers do"
    elif len(whole) >= LEAST_ROWS and len(np.unique(whole)) == len(whole):
        why = "has another whole number in every row, as identifiers do"
    else:
        return ""
    return f"warning: column {name!r} {why}; if it is no measurement, leave it out with --drop {name}"


def holds_dates(values: Iterable[object]) -> bool:
    """Return whether nearly all of the texts are dates, such as 2024-03-01, 1.3.2024 or 1 March 2024."""
    texts = [str(value).strip() for value in values]
    return bool(texts) and sum(DATE.fullmatch(text) is not None for text in texts) >= NEARLY_ALL * len(texts)


def _counts_up(whole: np.ndarray, owner: np.ndarray) -> bool:
    """Return whether the numbers of each owner, in order, nearly always go up by 1."""
    order = np.lexsort((whole, owner))
    step = np.diff(whole[order])[np.diff(owner[order]) == 0]
    return len(step) >= LEAST_STEPS and bool(np.mean(step == 1) >= NEARLY_ALL)


def _whole_numbers(values: "pd.Series") -> np.ndarray | None:
    """Return the values that are not missing, or None if some are not whole numbers."""
    present = values.dropna().to_numpy(float)
    return present if bool((np.floor(present) == present).all()) else None


def _sort(column: Column) -> str:
    if column.kind.startswith("number"):
        return "numeric"
    return "yes/no" if column.kind.startswith("yes/no") else "category"
