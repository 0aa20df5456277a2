"""The sentences that a bad hyper-parameter ends in."""

import dataclasses
import math
import typing
from typing import Any, Literal

import numpy as np

from priory.core.errors import UsageError

LARGEST = float(np.finfo(np.float32).max)
MOST = int(np.iinfo(np.int32).max)


def at_least(name: str, value: float, least: float) -> None:
    """Raise unless value ≥ least and finite."""
    if not least <= value < math.inf:
        raise UsageError(f"{name}={value} is out of range; choose {least:g} or more.")
    single(name, value)


def positive(name: str, value: float) -> None:
    """Raise unless value > 0 and finite."""
    if not 0 < value < math.inf:
        raise UsageError(f"{name}={value} is not a positive number; choose one above 0.")
    single(name, value)


def finite(name: str, value: float) -> None:
    """Raise unless value is a number."""
    if not -math.inf < value < math.inf:
        raise UsageError(f"{name}={value} is not a finite number; choose one.")
    single(name, value)


def single(name: str, value: float) -> None:
    """Raise on a number that single precision would make infinite."""
    if abs(value) > LARGEST:
        raise UsageError(f"{name}={value} is beyond single precision; choose one between ±{LARGEST:.2g}.")


def countable(name: str, value: int) -> None:
    """Raise on a whole number that compiled code, which counts in 32 bits, cannot hold."""
    if abs(value) > MOST:
        raise UsageError(f"{name}={value} exceeds the 32-bit limit of compiled code; choose less.")


def check_fields(settings: Any) -> None:
    """Raise on a field of a dataclass that names its choices and holds none of them, or that is itself in error."""
    choices(settings)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value) and hasattr(value, "check"):
            value.check()


def choices(settings: Any) -> None:
    """Raise when a field of a dataclass that names its choices holds something else."""
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            known = ", ".join(map(str, typing.get_args(hint)))
            raise UsageError(f"{field.name.replace('_', '-')}={value!r} is not known; choose from {known}.")
