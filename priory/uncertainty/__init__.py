"""Numbers about what the models of a run know and do not know, from nothing but what they predict."""

from priory.uncertainty.answers import Answers, Examples, ForeignInputs, collect, foreign_inputs, validation_of
from priory.uncertainty.measure import check, measure, stands_for
from priory.uncertainty.tables import (
    Band,
    ClassPart,
    Coverage,
    Curve,
    Foreign,
    Histogram,
    Intervals,
    Metric,
    Rejection,
    Sets,
    TargetPart,
    Uncertainty,
)

__all__ = [
    "Answers",
    "Band",
    "ClassPart",
    "Coverage",
    "Curve",
    "Examples",
    "Foreign",
    "ForeignInputs",
    "Histogram",
    "Intervals",
    "Metric",
    "Rejection",
    "Sets",
    "TargetPart",
    "Uncertainty",
    "check",
    "collect",
    "foreign_inputs",
    "measure",
    "stands_for",
    "validation_of",
]
