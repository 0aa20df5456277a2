"""Parts of a payload whose scales differ, so that each has a norm and a unit of its own.

If one norm bounds all parts together, the largest part uses it up and the noise covers the others. In units C_p, each
of P parts of a clipped message has a norm of at most 1 and the message a norm of at most √P: one σ fits every number.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, TypeVar

import jax
from jax import Array

from priory.core import trees
from priory.core.struct import static, struct

Payload = TypeVar("Payload")


@struct
class Parts:
    """The parts of a payload and their units; without names, the payload is one part in the unit 1.

    Attributes:
        names: "/"-joined paths; a part is all that is at or below one of them.
        units: C_p, one for each name.
    """

    names: tuple[str, ...] = static(default=())
    units: tuple[float, ...] = ()

    @property
    def norm(self) -> float:
        """√P, the norm of a payload whose parts all have norm 1."""
        return math.sqrt(max(1, len(self.names)))

    def split(self, payload: Payload) -> list[Payload]:
        """Return the parts as trees like the payload, with None in the place of all other leaves."""
        if not self.names:
            return [payload]
        found, rest = [], payload
        for name in self.names:
            part, rest = trees.partition(rest, partial(_is_below, name))
            found.append(part)
        if left := jax.tree_util.tree_leaves_with_path(rest):
            raise ValueError(f"{trees.path_of(left[0][0])} is in no part of {', '.join(self.names)}; name one for it.")
        return found

    def each(self, change: Callable[[Payload, Array | float], Payload], payload: Payload) -> Payload:
        """Return the payload after `change(part, unit)` of every part."""
        units = self.units if self.names else (1.0,)
        return reduce(trees.merge, map(change, self.split(payload), units))

    def to_units(self, payload: Payload) -> Payload:
        """Return the payload with each part divided by its unit."""
        return self.each(lambda part, unit: jax.tree.map(lambda x: x / unit, part), payload) if self.names else payload

    def from_units(self, payload: Payload) -> Payload:
        """Return the payload with each part multiplied by its unit."""
        return self.each(lambda part, unit: trees.scale(unit, part), payload) if self.names else payload

    def by_name(self, value: float) -> Any:
        """Return a number of units as numbers by the name of the part; for one part, as it is."""
        return {name: value * unit for name, unit in zip(self.names, self.units, strict=True)} or value


WHOLE = Parts()


def _is_below(name: str, path: str) -> bool:
    """Return whether a path is that of a part or below it."""
    return path == name or path.startswith(f"{name}/")
