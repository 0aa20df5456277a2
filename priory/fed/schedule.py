"""Schedules: a hyper-parameter as a function of the round.

No verb of a method takes the round number. Floats are traced, so the runner passes the method with the scheduled value
in place; the simulator and a deployed client both call `resolve`.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.fed.method import Method

RENAMED = {"kind": "optimiser"}  # `--kind adam` would not say of what
SYNTAX = "FIELD=step:FACTOR@FRACTION[,FRACTION...], FIELD=cosine[:END] or FIELD=linear[:END]"


@dataclass(frozen=True)
class Schedule:
    """A factor on one traced hyper-parameter, as a function of round t of T.

    Attributes:
        field: Name of the hyper-parameter, such as `step_size`.
        kind: `step` multiplies at each milestone; `cosine` and `linear` go down to `factor`, as if one round more came.
        factor: What a step multiplies by, or the share that is left in the end.
        milestones: Fractions of T after which a step happens.
    """

    field: str
    kind: Literal["step", "cosine", "linear"]
    factor: float = 0.0
    milestones: tuple[float, ...] = ()

    def at(self, t: Array | int, rounds: int) -> Array:
        """The factor in round t = 0 … rounds − 1."""
        if self.kind == "step":
            # In float64 with a little room, since 0.29 · 100 is 28.999…
            edges = jnp.array([math.floor(milestone * rounds + 1e-9) for milestone in self.milestones])
            return jnp.float32(self.factor) ** jnp.sum(t >= edges)
        progress = jnp.float32(t) / max(rounds, 1)  # as Optax counts: the end is reached after the last round
        left = 0.5 * (1 + jnp.cos(jnp.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.factor + (1 - self.factor) * left

    def __str__(self) -> str:
        at = "@" + ",".join(f"{m:g}" for m in self.milestones) if self.milestones else ""
        return f"{self.field.replace('_', '-')}={self.kind}:{self.factor:g}{at}"


def parse(text: str) -> Schedule:
    """The schedule that a flag describes.

    >>> parse("step-size=step:0.1@0.5,0.75")
    Schedule(field='step_size', kind='step', factor=0.1, milestones=(0.5, 0.75))
    """
    number = r"[0-9.eE+-]+"
    match = re.fullmatch(rf"([\w-]+)=(?:(step):({number})@([0-9.,]+)|(cosine|linear)(?::({number}))?)", text.strip())
    try:
        if match is None:
            raise ValueError
        field, step, factor, milestones, smooth, end = match.groups()
        name = field.replace("-", "_")
        if step:
            made = Schedule(name, "step", float(factor), tuple(float(m) for m in milestones.split(",")))
        else:
            made = Schedule(name, smooth, float(end or 0.0))  # type: ignore[arg-type]
    except ValueError:
        raise UsageError(f"schedule={text!r} is not understood; write {SYNTAX}.") from None
    if made.factor < 0 or any(not 0 < m < 1 for m in made.milestones):
        raise UsageError(f"schedule={text!r} has a negative factor or a fraction outside (0, 1); write {SYNTAX}.")
    return made


def traced_fields(settings: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of the traced numbers of a method: those that a schedule or a sweep can set."""
    for field in dataclasses.fields(settings):
        value, path = getattr(settings, field.name), (*prefix, field.name)
        if field.metadata.get("static"):
            continue
        if dataclasses.is_dataclass(value):
            yield from traced_fields(value, path)
        elif value is not None:  # left for the method to choose
            yield path


def paths_of(settings: Any, prefix: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """The paths of all settings of a method, static ones too, by the name that a user types."""
    found: dict[str, tuple[str, ...]] = {}
    for field in dataclasses.fields(settings):
        value, path = getattr(settings, field.name), (*prefix, field.name)
        if dataclasses.is_dataclass(value):
            found |= paths_of(value, path)
        else:
            found[RENAMED.get(field.name, field.name)] = path
    return found


def find(method: Method, name: str) -> tuple[str, ...]:
    """The path of the traced hyper-parameter of that name."""
    paths = list(traced_fields(method))
    for path in paths:
        if path[-1] == name or ".".join(path) == name:
            return path
    known = ", ".join(path[-1].replace("_", "-") for path in paths)
    raise UsageError(f"{name.replace('_', '-')} is not a number that can change during a run; choose from {known}.")


def get(settings: Any, path: tuple[str, ...]) -> Any:
    """The value at a path of field names."""
    return reduce(getattr, path, settings)


def put(settings: Any, path: tuple[str, ...], value: Any) -> Any:
    """The settings with another value at a path of field names."""
    first, *rest = path
    inner = put(getattr(settings, first), tuple(rest), value) if rest else value
    return replace(settings, **{first: inner})


def resolve(method: Method, schedules: tuple[Schedule, ...], t: Array | int, rounds: int) -> Method:
    """The method as it is in round t."""
    for schedule in schedules:
        path = find(method, schedule.field)
        method = put(method, path, get(method, path) * schedule.at(t, rounds))
    return method
