"""The sentences that a bad hyper-parameter ends in."""

import math

from priory.core.errors import UsageError


def at_least(name: str, value: float, least: float) -> None:
    """Raise unless value ≥ least and finite."""
    if not (value >= least and math.isfinite(value)):
        raise UsageError(f"{name}={value} is out of range; choose {least:g} or more.")


def positive(name: str, value: float) -> None:
    """Raise unless value > 0 and finite."""
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{name}={value} is not a positive number; choose one above 0.")
