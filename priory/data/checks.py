"""What a user typed, checked: each function returns the value or raises one sentence with value, rule and remedy."""

import difflib
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from priory.core.errors import UsageError
from priory.core.text import one_line

Given = ParamSpec("Given")
Found = TypeVar("Found")
Number = TypeVar("Number", int, float)
LARGEST = float(np.finfo(np.float32).max)
MOST_PROBLEMS = 10  # that are printed
LONGEST_NAME = 100  # characters; a file that is no table may have a first line of any length


class Problems:
    """Errors of one table, gathered so that a user sees all of them at once."""

    def __init__(self, errors: Iterable[UsageError] = ()) -> None:
        """Start with errors that were found already."""
        self.sentences = [str(error) for error in errors]

    def add(self, sentence: str) -> None:
        """Keep a sentence."""
        self.sentences.append(sentence)

    def catch(self, function: Callable[Given, Found], *args: Given.args, **options: Given.kwargs) -> Found | None:
        """Return what the function returns, or None after keeping the error that it raised."""
        try:
            return function(*args, **options)
        except UsageError as error:
            self.add(str(error))
            return None

    def check(self) -> None:
        """Raise one error with all sentences."""
        if len(self.sentences) == 1:
            raise UsageError(self.sentences[0])
        if self.sentences:
            shown = [f"({number}) {one}" for number, one in enumerate(self.sentences[:MOST_PROBLEMS], start=1)]
            rest = len(self.sentences) - len(shown)
            end = [f"And {rest} more."] if rest else []
            raise UsageError(f"The table has {len(self.sentences)} problems. {' '.join(shown + end)}")


def unknown(kind: str, value: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name that is not in a list, with the nearest names that are."""
    known = list(known)
    near = difflib.get_close_matches(value, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, near))}? The choice is" if near else "choose one of"
    return UsageError(f"{kind} {value!r} is not known; {hint} {listing(known, most=40)}.")


def whole(name: str, value: Any, least: int) -> int:
    """Return the value as an int that is at least `least`."""
    try:
        result = operator.index(value)
    except TypeError:
        raise UsageError(f"{name}={value!r} is not a whole number; give {name}={least} or more.") from None
    if result < least:
        raise UsageError(f"{name}={result} is below {least}; give {name}={least} or more.")
    return result


def fraction(name: str, value: Any) -> float:
    """Return the value as a float in [0, 1)."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name}={value!r} is not a number; give a fraction from 0 up to, not including, 1.") from None
    if not 0.0 <= result < 1.0:
        raise UsageError(f"{name}={value} lies outside [0, 1); give a fraction from 0 up to, not including, 1.")
    return result


def number(text: str, kind: type[Number], *, where: str, remedy: str) -> Number:
    """Return the text as a positive, finite int or float; `where` and `remedy` fill in the sentence when it is not."""
    try:
        result: Number | None = kind(text)
    except ValueError:
        result = None
    if result is None or not 0 < result <= (sys.maxsize if kind is int else sys.float_info.max):
        what = "whole number" if kind is int else "number"
        raise UsageError(f"{text!r} in {where} is not a positive {what}; {remedy}.")
    return result


def listing(names: Iterable[object], most: int = 12) -> str:
    """Return the names joined by commas, cut after `most` of them."""
    texts = [_short(one_line(str(name))) for name in names]
    rest = f", ... ({len(texts)} in all)" if len(texts) > most else ""
    return ", ".join(texts[:most]) + rest


def unusable(values: np.ndarray) -> str:
    """Return what is wrong with numbers that are not finite in single precision."""
    is_large = np.isfinite(np.asarray(values, float)) & ~np.isfinite(as_single(values))
    return f"beyond single precision (±{LARGEST:.2g})" if is_large.any() else "NaN or infinite"


def as_single(values: np.ndarray) -> np.ndarray:
    """Return numbers as float32; those that are too large become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def examples(x: ArrayLike) -> np.ndarray:
    """Return the examples as uint8 or finite float32, at least two-dimensional."""
    try:
        array = np.asarray(x)
    except ValueError:
        raise UsageError("x is ragged; give rows of one shape.") from None
    if array.dtype.kind not in "biuf":
        raise UsageError(f"x has type {array.dtype}, which is not numeric; give numbers, or a data frame for text.")
    if not array.size:
        raise UsageError(f"x has shape {array.shape}, which holds no numbers; give at least one example.")
    if array.ndim < 2:
        array = array.reshape(-1, 1)
    if array.dtype == np.uint8:
        return array
    result = as_single(array)
    bad = ~np.isfinite(result).reshape(len(result), -1)
    if bad.any():
        row = int(np.flatnonzero(bad.any(axis=1))[0])
        raise UsageError(
            f"x is {unusable(array)} in {int(bad.any(axis=1).sum())} of {len(result)} rows, first in row {row}; "
            "mend or drop them, or give a data frame, whose gaps are filled."
        )
    return result


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
