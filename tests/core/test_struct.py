"""A frozen dataclass that is a pytree: what is traced, what is static, and when two are equal."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

from priory.core.struct import replace, static, struct


@struct
class Ball:
    radius: float = 1.0
    sides: int = static(default=3)
    names: tuple[str, ...] = static(default_factory=lambda: ("a",))

    shape: ClassVar[str] = "round"


@struct
class Box:
    ball: Ball = Ball()
    depth: float = 2.0


def test_traced_fields_are_leaves_and_static_ones_are_structure():
    assert jax.tree.leaves(Box()) == [1.0, 2.0]
    assert jax.tree.structure(Ball(radius=5.0)) == jax.tree.structure(Ball())
    assert jax.tree.structure(Ball(sides=4)) != jax.tree.structure(Ball())


def test_a_new_traced_value_does_not_trace_again_and_a_new_static_one_does():
    traces = []

    @jax.jit
    def volume(ball):
        traces.append(ball.sides)
        return ball.radius * ball.sides

    assert [float(volume(Ball(radius=r, sides=s))) for r, s in ((1.0, 3), (2.0, 3), (2.0, 4), (3.0, 3))] == [3, 6, 8, 9]
    assert traces == [3, 4]


@struct
class Bubble:
    radius: float = 1.0
    sides: int = static(default=3)
    names: tuple[str, ...] = static(default_factory=lambda: ("a",))


def test_two_classes_with_like_fields_never_share_a_structure():
    """Or `jit` would run one method's program for the other; JAX 0.10's own `register_dataclass` does not see to it."""
    assert jax.tree.structure(Ball()) != jax.tree.structure(Bubble())


def test_equality_and_hash_go_by_value():
    assert Box(Ball(2.0)) == Box(Ball(2.0))
    assert hash(Box(Ball(2.0))) == hash(Box(Ball(2.0)))
    assert Box(Ball(2.0)) != Box(Ball(3.0))


def test_replacing_makes_another_and_leaves_the_first_alone():
    first = Ball()
    assert replace(first, radius=4.0) == Ball(4.0)
    assert first == Ball()


def test_nothing_can_be_set():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ball().radius = 2.0


def test_a_mapped_tree_is_of_the_same_class_and_keeps_static_fields():
    stacked = jax.vmap(lambda r: Ball(r, sides=7))(jnp.arange(3.0))
    assert isinstance(stacked, Ball)
    assert stacked.radius.shape == (3,)
    assert stacked.sides == 7


def test_class_variables_are_no_fields():
    assert [field.name for field in dataclasses.fields(Ball)] == ["radius", "sides", "names"]
