import flax.linen as nn
import jax
import numpy as np
import pytest

from priory.core import trees
from priory.models.features import split
from priory.models.linen import Linen
from priory.models.model import Head, Params, parse
from tests.methods.problems import Location, Tiny

SHAPE = (8, 8, 1)


class Squashed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(3)(x.reshape(x.shape[0], -1)))


class Twice(nn.Module):
    def setup(self):
        self.layer = nn.Dense(3)

    def __call__(self, x):
        return self.layer(self.layer(x.reshape(x.shape[0], -1)[:, :3]))


class Inside(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(3)])(x.reshape(x.shape[0], -1))


def parts(model, pattern=None):
    is_head = Head(model.last_layer(SHAPE) if pattern is None else pattern)
    params = jax.jit(lambda key: model.init(key, SHAPE))(jax.random.key(0))
    head, body = trees.partition(params.weights, is_head)
    return split(model, SHAPE, is_head), head, Params(body, params.stats), params


X = np.random.default_rng(1).standard_normal((6, *SHAPE), np.float32)


def by_halves_and_whole(model):
    """Features, outputs made of them, and outputs of the whole network."""
    halves, head, body, params = parts(model)

    @jax.jit
    def compute(head, body, params):
        features, _ = halves.features(body, head, X)
        return features, halves.outputs(head, features), model.apply(params, X)[0]

    return compute(head, body, params)


@pytest.mark.parametrize("spec", ["linear", "mlp:5", "mlp:5,4", "cnn:2,3"])
def test_features_and_head_together_are_the_network(spec):
    _, outputs, whole = by_halves_and_whole(parse(spec, input_shape=SHAPE, num_outputs=3))
    np.testing.assert_allclose(outputs, whole, rtol=1e-6, atol=1e-6)


def test_a_layer_inside_another_module_splits_too():
    features, outputs, whole = by_halves_and_whole(Linen(Inside()))
    assert features.shape == (6, 4)
    np.testing.assert_allclose(outputs, whole, rtol=1e-6)


def test_features_do_not_depend_on_the_head_that_fills_its_place():
    halves, head, body, _ = parts(parse("mlp:5", input_shape=SHAPE, num_outputs=3))
    features = jax.jit(lambda head: halves.features(body, head, X)[0])
    other = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), head)
    np.testing.assert_array_equal(features(head), features(other))


def test_training_updates_statistics_of_the_body():
    model = Linen(Tiny())
    is_head = Head(model.last_layer((5,)))
    params = jax.jit(lambda key: model.init(key, (5,)))(jax.random.key(0))
    head, body = trees.partition(params.weights, is_head)
    x = 3 + np.random.default_rng(1).standard_normal((6, 5), np.float32)

    @jax.jit
    def by_halves(key):
        return split(model, (5,), is_head).features(Params(body, params.stats), head, x, key=key)[1]

    stats = by_halves(jax.random.key(2))
    whole = jax.jit(lambda key: model.apply(params, x, key=key)[1])(jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, stats, whole)
    assert np.abs(stats["batch_stats"]["BatchNorm_0"]["mean"]).max() > 0


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        (parse("mlp:5", input_shape=SHAPE, num_outputs=3), "Dense_0"),
        (parse("mlp:5", input_shape=SHAPE, num_outputs=3), "Dense_1/bias"),
        (parse("mlp:5", input_shape=SHAPE, num_outputs=3), ""),
        (Linen(Squashed()), None),
        (Linen(Twice()), None),
        (Location(), None),
    ],
    ids=["another layer", "a part of it", "all layers", "something after it", "called twice", "not Linen"],
)
def test_other_heads_do_not_split(model, pattern):
    is_head = Head(model.last_layer(SHAPE) if pattern is None else pattern)
    assert split(model, SHAPE, is_head) is None
