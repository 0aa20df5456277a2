"""Dropout of columns: what is dropped, how often, and that no short cut shows in the outputs."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core import trees
from priory.models import CNN, MLP, Linen, Params, as_model, columns

IMAGES = np.random.default_rng(7).normal(0.5, 1.0, (3, 4, 4, 2)).astype(np.float32)
ROWS = IMAGES.reshape(3, -1)
WORDS = np.arange(12, dtype=np.float32).reshape(3, 4) % 7


class Normed(nn.Module):
    """Batch norm between the layers, and a layer that is called twice, by place and by name."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(6)(x.reshape(x.shape[0], -1))
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))
        twice = nn.Dense(6, name="twice")
        return nn.Dense(2)(twice(inputs=nn.relu(twice(x))))


class Grouped(nn.Module):
    """A kernel with fewer columns than its input has channels."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), feature_group_count=2)(x)
        return nn.Dense(2)(x.reshape(x.shape[0], -1))


class Embedded(nn.Module):
    """Rows of a table, chosen by the input: there is no input unit that could be silenced."""

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(7, 5)(x.astype(jnp.int32))
        return nn.Dense(2)(x.mean(axis=1))


class Named(nn.Module):
    """Arguments given by name, a class of the user's own, a layer in a layer, a convolution in one dimension."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(3, (3,), name="conv")(x.reshape(x.shape[0], 4, -1)).reshape(x.shape[0], -1)
        x = nn.Dense(4)(inputs=x)
        x = Own(4)(nn.relu(x))
        return MLP((3,), 2, name="inner")(x)


class Own(nn.Dense):
    pass


def pair_init(key, input_shape):
    return {"w": jax.random.normal(key, (*input_shape, 2)), "b": jnp.ones(2)}


def pair_apply(weights, x):
    return jnp.tanh(x) @ weights["w"] + weights["b"][None]


MODELS = {
    "mlp": (Linen(MLP((5, 4), 3)), ROWS),
    "linear layer alone": (Linen(nn.Dense(3)), ROWS),
    "cnn": (Linen(CNN(3, (3, 4), 6)), IMAGES),
    "batch norm": (Linen(Normed()), ROWS),
    "grouped": (Linen(Grouped()), IMAGES),
    "embedding": (Linen(Embedded()), WORDS),
    "odd calls": (Linen(Named()), ROWS),
    "pair": (as_model((pair_init, pair_apply)), ROWS),
}

every_model = pytest.mark.parametrize("name", MODELS)


def network(name):
    """A model, parameters and masks from NumPy (nothing to compile), and inputs."""
    model, x = MODELS[name]
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x.shape[1:]))
    draw = np.random.default_rng(0)
    weights = jax.tree.map(lambda leaf: draw.normal(0.1, 0.5, leaf.shape).astype(np.float32), shapes.weights)
    stats = jax.tree.map(lambda leaf: draw.uniform(0.5, 1.0, leaf.shape).astype(np.float32), shapes.stats)
    masks = jax.tree.map(lambda leaf: draw.random(leaf.shape[-2]) < 0.5 if leaf.ndim > 1 else None, weights)
    return model, Params(weights, stats), masks, x


@cache
def both_ways(name):
    """Outputs and gradients without some columns and of the network with those weights at zero, and untouched outputs.

    One compilation a model.
    """

    model, params, masks, x = network(name)

    def compute(params, masks):
        everything = jax.tree.map(jnp.ones_like, masks)

        def without(weights, key=None):
            return columns.apply_without(model, Params(weights, params.stats), masks, x, key=key)

        def copied(weights, key=None):
            return model.apply(Params(columns.drop(weights, masks), params.stats), x, key=key)

        def both(function):
            def loss(weights):
                return jnp.sum(function(weights)[0] ** 2)

            weights = params.weights
            return function(weights)[0], function(weights, jax.random.key(2)), jax.grad(loss)(weights)

        kept = columns.apply_without(model, params, everything, x)[0]
        return both(without), both(copied), kept, model.apply(params, x)[0]

    return jax.jit(compute)(params, masks)


def assert_close(a, b, tolerance=1e-5):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance), a, b)


@every_model
def test_a_network_without_columns_is_the_network_of_dropped_weights(name):
    (evaluated, trained, _), (evaluated_copy, trained_copy, _), _, whole = both_ways(name)
    assert_close(evaluated, evaluated_copy)
    assert_close(trained, trained_copy)  # outputs and statistics
    assert not np.allclose(evaluated, whole, atol=1e-3)


@every_model
def test_the_gradient_is_that_of_dropped_weights(name):
    (_, _, found), (_, _, expected), _, _ = both_ways(name)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * largest), found, expected)


@every_model
def test_a_network_that_keeps_every_column_is_itself(name):
    _, _, kept, whole = both_ways(name)
    assert_close(kept, whole)


def test_layers_are_silenced_at_their_input_and_only_what_has_none_is_copied():
    found = {name: columns._layers(model, x.shape[1:]) for name, (model, x) in MODELS.items() if name != "pair"}
    assert found["mlp"] == {"Dense_0", "Dense_1", "Dense_2"}
    assert found["cnn"] == {"Conv_0", "Conv_1", "Dense_0", "Dense_1"}
    assert found["batch norm"] == {"Dense_0", "Dense_1", "twice"}
    assert found["grouped"] == {"Dense_0"}
    assert found["embedding"] == {"Dense_0"}
    assert found["odd calls"] == {"conv", "Dense_0", "inner/Dense_0", "inner/Dense_1"}


def test_a_part_of_a_network_is_dropped_and_the_rest_stays():
    model, params, _, x = network("mlp")
    _, body = trees.partition(params.weights, lambda path: path.startswith("Dense_2"))

    @jax.jit
    def compute(params, key):
        masks = columns.draw_masks(key, body, 0.5)
        dropped = columns.drop(params.weights, masks)
        return masks, dropped, columns.apply_without(model, params, masks, x)[0], model.apply(Params(dropped), x)[0]

    masks, dropped, found, expected = compute(params, jax.random.key(1))
    assert masks["Dense_2"] == {"bias": None, "kernel": None}
    assert_close(dropped["Dense_2"], params.weights["Dense_2"], tolerance=0)
    assert_close(found, expected)


def test_a_column_is_all_that_leaves_one_input_unit():
    # A convolution over two places, of three channels.
    kernel = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
    mask = {"kernel": np.array([True, False, True]), "bias": None}
    dropped = jax.jit(columns.drop)({"kernel": kernel, "bias": np.ones(4, np.float32)}, mask)
    dropped = jax.tree.map(np.asarray, dropped)
    np.testing.assert_array_equal(dropped["kernel"][:, 1], 0)
    np.testing.assert_array_equal(dropped["kernel"][:, [0, 2]], kernel[:, [0, 2]])  # nothing is divided by p
    np.testing.assert_array_equal(dropped["bias"], 1)


@jax.jit
def many_masks(keep):
    weights = {"dense": {"kernel": jnp.zeros((50, 2))}, "conv": {"kernel": jnp.zeros((3, 3, 50, 2))}}
    keys = jax.random.split(jax.random.key(0), 500)
    drawn = jax.vmap(lambda key: columns.draw_masks(key, weights, keep))(keys)
    return {name: masks["kernel"] for name, masks in drawn.items()}


@pytest.mark.parametrize("keep", [0.1, 0.75, 0.999])
def test_columns_go_as_often_as_they_should(keep):
    masks = many_masks(keep)
    assert {name: mask.shape for name, mask in masks.items()} == {"dense": (500, 50), "conv": (500, 50)}
    for mask in masks.values():
        standard_error = np.sqrt(keep * (1 - keep) / mask.size)
        assert abs(np.mean(mask) - keep) < 4 * standard_error


def test_columns_of_one_layer_go_independently_of_another():
    masks = many_masks(0.75)
    correlation = np.corrcoef(np.ravel(masks["dense"]), np.ravel(masks["conv"]))[0, 1]
    assert abs(correlation) < 4 / np.sqrt(masks["dense"].size)


def test_only_kernels_of_several_columns_have_any():
    weights = {
        "kernel": jnp.zeros((3, 2)),
        "depthwise": {"kernel": jnp.zeros((3, 3, 1, 8))},  # its one column is the whole layer
        "equinox": {"weight": jnp.zeros((2, 3))},  # outputs come first there
        "bias": jnp.zeros(2),
        "log_scale": jnp.zeros(()),
    }
    masks = columns.draw_masks(jax.random.key(0), weights, 0.0)
    assert not masks.pop("kernel").any()
    assert jax.tree.leaves(masks) == []
    kept = columns.keep_probabilities(weights, 0.25)
    assert float(kept.pop("kernel")) == 0.25
    assert set(map(float, jax.tree.leaves(kept))) == {1.0}
