"""The sentences that a bad hyper-parameter ends in."""

import dataclasses
import math
import typing
from typing import Any, Literal

from priory.core.errors import UsageError


def at_least(name: str, value: float, least: float) -> None:
    """Raise unless value ≥ least and finite."""
    if not (value >= least and math.isfinite(value)):
        raise UsageError(f"{name}={value} is out of range; choose {least:g} or more.")


def positive(name: str, value: float) -> None:
    """Raise unless value > 0 and finite."""
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{name}={value} is not a positive number; choose one above 0.")


def finite(name: str, value: float) -> None:
    """Raise unless value is a number."""
    if not math.isfinite(value):
        raise UsageError(f"{name}={value} is not a finite number; choose one.")


def choices(settings: Any) -> None:
    """Raise when a field of a dataclass that names its choices holds something else."""
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            known = ", ".join(map(str, typing.get_args(hint)))
            raise UsageError(f"{field.name.replace('_', '-')}={value!r} is not known; choose from {known}.")
