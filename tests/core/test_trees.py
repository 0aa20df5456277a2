"""Arithmetic on trees, above all what a weight of zero does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core import trees

A = {"x": jnp.array([1.0, 2.0]), "y": jnp.array(3.0)}
B = {"x": jnp.array([5.0, -2.0]), "y": jnp.array(0.5)}


def assert_equal(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_vector_space_operations_are_those_of_the_leaves():
    assert_equal(trees.add(A, B), {"x": jnp.array([6.0, 0.0]), "y": jnp.array(3.5)})
    assert_equal(trees.sub(A, B), {"x": jnp.array([-4.0, 4.0]), "y": jnp.array(2.5)})
    assert_equal(trees.scale(2.0, A), {"x": jnp.array([2.0, 4.0]), "y": jnp.array(6.0)})
    assert_equal(trees.axpy(2.0, A, B), {"x": jnp.array([7.0, 2.0]), "y": jnp.array(6.5)})


def test_the_inner_product_runs_over_all_leaves():
    assert trees.dot(A, B) == 1 * 5 + 2 * -2 + 3 * 0.5
    assert trees.norm_squared(A) == 14
    assert trees.norm(A) == pytest.approx(np.sqrt(14))
    assert trees.norm(()) == 0


def test_the_gradient_of_the_norm_is_zero_at_zero_and_the_direction_elsewhere():
    at_zero = jax.grad(trees.norm)({"x": jnp.zeros(2)})
    assert_equal(at_zero, {"x": jnp.zeros(2)})
    elsewhere = jax.grad(trees.norm)({"x": jnp.array([3.0, 4.0])})
    np.testing.assert_allclose(elsewhere["x"], [0.6, 0.8], rtol=1e-6)


def test_a_weighted_mean_is_the_mean_of_the_members():
    stacked = {"x": jnp.array([[1.0, 2.0], [4.0, 8.0]])}
    mean = trees.weighted_mean(stacked, jnp.array([1.0, 3.0]), otherwise={"x": jnp.zeros(2)})
    np.testing.assert_allclose(mean["x"], [3.25, 6.5])


@pytest.mark.parametrize("hole", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_member_of_weight_zero_adds_nothing_whatever_it_holds(hole):
    stacked = {"x": jnp.array([[1.0, 2.0], [hole, hole], [3.0, 4.0]])}
    mean = trees.weighted_mean(stacked, jnp.array([1.0, 0.0, 1.0]), otherwise={"x": jnp.zeros(2)})
    np.testing.assert_array_equal(mean["x"], [2.0, 3.0])


def test_without_any_weight_the_mean_is_what_stands_in_for_it():
    stacked = {"x": jnp.full((2, 2), jnp.nan)}
    mean = trees.weighted_mean(stacked, jnp.zeros(2), otherwise={"x": jnp.array([7.0, 8.0])})
    np.testing.assert_array_equal(mean["x"], [7.0, 8.0])


def test_a_weighted_sum_keeps_scalar_leaves_scalar():
    assert trees.weighted_sum(jnp.array([2.0, 3.0]), jnp.array([1.0, 10.0])) == 32


def test_a_weighted_sum_is_of_what_is_made_of_each_member():
    stacked = {"x": jnp.array([[1.0, 2.0], [3.0, -4.0]]), "y": jnp.array([5.0, 6.0])}
    weight = jnp.array([2.0, 10.0])
    total = trees.weighted_sum(stacked, weight, of=lambda member: (member["x"] ** 2, member["x"][0] * member["y"]))
    assert_equal(total, (jnp.array([2 * 1.0 + 10 * 9, 2 * 4 + 10 * 16]), jnp.array(2 * 5.0 + 10 * 18)))
    mean = trees.weighted_mean(stacked, weight, otherwise=jnp.zeros(()), of=lambda member: member["y"] ** 2)
    np.testing.assert_allclose(mean, (2 * 25 + 10 * 36) / 12, rtol=1e-6)


@pytest.mark.parametrize("hole", [jnp.nan, jnp.inf, 0.0])
def test_what_is_made_of_a_member_of_weight_zero_adds_nothing(hole):
    stacked, weight = jnp.array([2.0, hole]), jnp.array([1.0, 0.0])
    assert trees.weighted_sum(stacked, weight, of=lambda member: 1 / member) == 0.5
    assert trees.weighted_mean(stacked, weight, otherwise=jnp.zeros(()), of=lambda member: 1 / member) == 0.5


def test_select_takes_the_whole_of_one_tree():
    assert_equal(trees.select(jnp.bool_(True), A, B), A)
    assert_equal(trees.select(jnp.bool_(False), A, B), B)


@pytest.mark.parametrize(("value", "finite"), [(1.0, True), (np.nan, False), (np.inf, False)])
def test_all_finite_looks_at_every_floating_leaf_and_at_no_other(value, finite):
    assert bool(trees.all_finite({"a": jnp.array([0.0, value]), "n": jnp.array([1]), "on": jnp.array(True)})) is finite


def test_the_bytes_of_a_tree_are_those_of_its_leaves_whether_arrays_or_shapes():
    tree = {"a": jnp.zeros((2, 3)), "n": jnp.zeros(5, jnp.int8), "on": jnp.array(True), "none": None}
    assert trees.num_bytes(tree) == 24 + 5 + 1
    assert trees.num_bytes(jax.eval_shape(lambda: tree)) == 30
    assert trees.num_bytes(()) == 0


def test_a_partition_shares_out_the_leaves_by_path_and_merge_undoes_it():
    tree = {"body": {"kernel": 1.0, "bias": 2.0}, "head": [3.0, 4.0]}
    head, body = trees.partition(tree, lambda path: path.startswith("head"))
    assert head == {"body": {"kernel": None, "bias": None}, "head": [3.0, 4.0]}
    assert body == {"body": {"kernel": 1.0, "bias": 2.0}, "head": [None, None]}
    assert jax.tree.leaves(head) == [3.0, 4.0]
    assert trees.merge(head, body) == tree
    assert trees.merge(body, head) == tree


def test_a_partition_sees_paths_joined_by_slashes():
    seen = []
    trees.partition({"a": {"b": [1.0, 2.0]}}, lambda path: bool(seen.append(path)))
    assert set(seen) == {"a/b/0", "a/b/1"}


def test_the_sum_over_nobody_is_zero():
    found = trees.weighted_sum({"a": jnp.ones((0, 3))}, jnp.ones(0), of=lambda member: trees.scale(2.0, member))
    np.testing.assert_array_equal(found["a"], np.zeros(3))


def test_a_running_sum_and_a_reduction_agree(monkeypatch):
    stacked, weight = {"a": jnp.arange(12.0).reshape(4, 3).at[1].set(jnp.nan)}, jnp.array([1.0, 0.0, 2.0, 0.5])
    running = trees.weighted_sum(stacked, weight, of=lambda member: jax.tree.map(jnp.square, member))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    reduced = trees.weighted_sum(stacked, weight, of=lambda member: jax.tree.map(jnp.square, member))
    np.testing.assert_allclose(running["a"], reduced["a"], rtol=1e-6)
