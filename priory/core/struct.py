"""`@struct`: a frozen dataclass that is also a pytree.

Fields are traced leaves unless marked `static()`: a number that scales a term stays traced, whatever sets a shape,
a loop length or a Python branch is static. Equality and hash go by value, so a rebuilt object compiles nothing.

>>> @struct
... class Ball:
...     radius: float = 1.0
...     sides: int = static(default=3)
>>> jax.tree.leaves(Ball())
[1.0]
>>> replace(Ball(), radius=2.0)
Ball(radius=2.0, sides=3)
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar, dataclass_transform

import jax

__all__ = ["replace", "static", "struct"]

T = TypeVar("T")


def static(*, default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING) -> Any:
    """A compile-time field: part of the tree's structure, so a new value means a new compilation."""
    return dataclasses.field(default=default, default_factory=default_factory, metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def struct(cls: type[T]) -> type[T]:
    """The class as a frozen dataclass registered with JAX; `ClassVar`s are left alone."""
    made = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(made)  # type: ignore[arg-type]
    static_names = [f.name for f in fields if f.metadata.get("static", False)]
    traced_names = [f.name for f in fields if f.name not in static_names]

    # Not `register_dataclass`: the tree structures that it gives to two classes with like fields compare equal.
    def flatten(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(value, n) for n in traced_names), tuple(getattr(value, n) for n in static_names)

    def flatten_with_keys(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, meta = flatten(value)
        keys = map(jax.tree_util.GetAttrKey, traced_names)
        return tuple(zip(keys, children, strict=True)), meta

    def unflatten(meta: tuple[Any, ...], children: Iterable[Any]) -> T:
        traced, fixed = zip(traced_names, children, strict=True), zip(static_names, meta, strict=True)
        return made(**dict(traced), **dict(fixed))

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return made
