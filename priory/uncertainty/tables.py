"""What is known of the uncertainty of a run: frozen tables, and the way to JSON and back.

The JSON of a table has its fields by name. A number that is not finite, or not defined, is null there and NaN here.
"""

import dataclasses
import math
import types
from dataclasses import dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from priory.metrics import Spread

Table = TypeVar("Table")


@dataclass(frozen=True)
class Metric:
    """A number over all test examples, and its bootstrap standard error (NaN without a bootstrap)."""

    value: float
    standard_error: float


@dataclass(frozen=True, eq=False)
class Curve:
    """A reliability curve: examples, mean confidence and accuracy in each bin of confidence, NaN in an empty one.

    Attributes:
        client: Whose it is; None for all clients together.
    """

    count: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    client: str | None = None


@dataclass(frozen=True, eq=False)
class Histogram:
    """Examples between consecutive edges, the last edge included."""

    edges: np.ndarray
    count: np.ndarray


@dataclass(frozen=True, eq=False)
class Rejection:
    """Accuracy when only the most certain share of the examples is kept."""

    kept: np.ndarray
    accuracy: np.ndarray


@dataclass(frozen=True, eq=False)
class Coverage:
    """Share of the targets inside the central intervals of each level."""

    level: np.ndarray
    reached: np.ndarray
    standard_error: np.ndarray


@dataclass(frozen=True)
class Conformal:
    """Sets or intervals by split conformal, and what they cover.

    Attributes:
        level: What they should cover.
        calibration: Validation rows that they were calibrated on.
        coverage: Share of the test examples whose label or target is inside.
        assumption: Under which the coverage is at least the level.
        without: Clients that have test rows and no validation rows; they have no sets or intervals.
        too_few: Clients whose validation rows are too few for the level, so that a set holds every class and an
            interval is the whole line.
    """

    level: float
    calibration: int
    coverage: Metric
    assumption: str
    without: int
    too_few: int


@dataclass(frozen=True)
class Sets(Conformal):
    """Prediction sets of a classification; `size` is the mean number of classes in one."""

    size: Metric


@dataclass(frozen=True)
class Intervals(Conformal):
    """Intervals of a regression; `width` is their mean width, over the clients whose intervals are bounded."""

    width: Metric


@dataclass(frozen=True)
class Band:
    """Clients of like size.

    Attributes:
        least: Fewest training examples of a client in it.
        most: Most of them.
        clients: Clients in it that have test examples.
        test: Their test examples.
        scores: By name; in JSON beside the others.
    """

    least: int
    most: int
    clients: int
    test: int
    scores: dict[str, Metric]


@dataclass(frozen=True, eq=False)
class Part:
    """One kind of model (personal, global, of newcomers) on the test examples.

    Attributes:
        pooled: Over all examples, by name; `docs/guide/uncertainty.md` says how to read each.
        spread: Over the clients, each counting once.
        clients: Columns by name, one entry per client, NaN for one without test examples.
        by_size: Clients in at most four groups by training examples, small ones first.
        epistemic: Of the examples.
    """

    pooled: dict[str, Metric]
    spread: dict[str, Spread]
    clients: dict[str, np.ndarray]
    by_size: tuple[Band, ...]
    epistemic: Histogram


@dataclass(frozen=True, eq=False)
class ClassPart(Part):
    """One kind of model on the test examples of a classification.

    Attributes:
        reliability: The curve of all examples (`pooled`), and of the clients of `best`, `median` and `worst` accuracy.
        sets: None where there are none; `sets_missing` says why.
    """

    reliability: dict[str, Curve]
    rejection: Rejection
    entropy: Histogram
    sets: Sets | None
    sets_missing: str | None


@dataclass(frozen=True, eq=False)
class TargetPart(Part):
    """One kind of model on the test examples of a regression.

    Attributes:
        coverage: Of the central intervals of the predictive.
        intervals: None where there are none; `intervals_missing` says why.
    """

    coverage: Coverage
    intervals: Intervals | None
    intervals_missing: str | None


@dataclass(frozen=True, eq=False)
class Foreign:
    """How well the personal models tell inputs from elsewhere from their own clients' test inputs.

    Attributes:
        data: Where the inputs come from.
        examples: How many there are; each personal model sees all of them.
        checksum: Of the inputs.
        auroc: Probability that a foreign input is more uncertain than a test input of the same client, ties half.
        fpr95: Share of the foreign inputs below the uncertainty that 95 % of the client's test inputs keep to.
        auroc_epistemic: As `auroc`, by the epistemic part.
        epistemic: Of the foreign inputs, over all personal models.
        entropy: Likewise; for a regression of the standard deviation.
    """

    data: str
    examples: int
    checksum: str
    auroc: Metric
    fpr95: Metric
    auroc_epistemic: Metric
    epistemic: Histogram
    entropy: Histogram


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """What the models of a run know and do not know, measured on test examples.

    Attributes:
        kind: "classification" or "regression".
        classes: Names of the classes; none for a regression.
        rounds: Rounds that the run had done.
        level: What prediction sets, or conformal intervals, should cover.
        bootstrap: Replicates that standard errors come from.
        parts: `personal`, and where they exist `global`, `newcomers`, `newcomers_unlabelled`, `newcomers_global`.
        ood: Of inputs from elsewhere, where some were given.
    """

    kind: str
    classes: tuple[str, ...]
    rounds: int
    level: float
    bootstrap: int
    parts: dict[str, ClassPart | TargetPart]
    ood: Foreign | None

    def to_json(self) -> dict[str, Any]:
        """The tables as plain lists and dictionaries."""
        return _plain(self)

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Uncertainty":
        """What `to_json` gave; raises `KeyError`, `TypeError` or `ValueError` on anything else."""
        part = ClassPart if table["kind"] == "classification" else TargetPart
        parts = {name: _read(part, one) for name, one in table["parts"].items()}
        return _read_fields(cls, {**table, "parts": {}}, parts=parts)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        table = {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
        return table | table.pop("scores") if isinstance(value, Band) else table
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, np.ndarray | tuple | list):
        return [_plain(one) for one in (value.tolist() if isinstance(value, np.ndarray) else value)]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def _read(hint: Any, value: Any) -> Any:
    """The value of the type that the hint says, from what `_plain` made of it."""
    inner = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return None if value is None else _read(inner[0], value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _read_fields(hint, _with_scores(value) if hint is Band else value)
    if get_origin(hint) is dict:
        return {name: _read(inner[1], one) for name, one in value.items()}
    if get_origin(hint) is tuple:
        return tuple(_read(inner[0], one) for one in value)
    if hint is np.ndarray:
        return np.array([math.nan if one is None else one for one in value])
    return math.nan if hint is float and value is None else hint(value)


def _read_fields(kind: type[Table], table: dict[str, Any], **known: Any) -> Table:
    hints = get_type_hints(kind)
    names = [entry.name for entry in dataclasses.fields(kind) if entry.name not in known]  # type: ignore[arg-type]
    return kind(**{name: _read(hints[name], table[name]) for name in names}, **known)


def _with_scores(table: dict[str, Any]) -> dict[str, Any]:
    own = {entry.name for entry in dataclasses.fields(Band)}
    return table | {"scores": {name: one for name, one in table.items() if name not in own}}
