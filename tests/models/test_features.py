import flax.linen as nn
import jax
import jax.numpy as jnp
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
    params = model.init(jax.random.key(0), SHAPE)
    head, body = trees.partition(params.weights, is_head)
    return split(model, SHAPE, is_head), head, Params(body, params.stats), params


@pytest.mark.parametrize("spec", ["linear", "mlp:5", "mlp:5,4", "cnn:2,3"])
def test_features_and_head_together_are_the_network(spec):
    model = parse(spec, input_shape=SHAPE, num_outputs=3)
    halves, head, body, params = parts(model)
    x = jax.random.normal(jax.random.key(1), (6, *SHAPE))
    features, _ = halves.features(body, head, x)
    np.testing.assert_allclose(halves.outputs(head, features), model.apply(params, x)[0], rtol=1e-6, atol=1e-6)


def test_a_layer_inside_another_module_splits_too():
    halves, head, body, params = parts(Linen(Inside()))
    x = jax.random.normal(jax.random.key(1), (6, *SHAPE))
    features, _ = halves.features(body, head, x)
    assert features.shape == (6, 4)
    np.testing.assert_allclose(halves.outputs(head, features), Linen(Inside()).apply(params, x)[0], rtol=1e-6)


def test_features_do_not_depend_on_the_head_that_fills_its_place():
    halves, head, body, _ = parts(parse("mlp:5", input_shape=SHAPE, num_outputs=3))
    x = jax.random.normal(jax.random.key(1), (6, *SHAPE))
    other = jax.tree.map(lambda leaf: leaf + jnp.nan, head)
    np.testing.assert_array_equal(halves.features(body, head, x)[0], halves.features(body, other, x)[0])


def test_training_updates_statistics_of_the_body():
    model = Linen(Tiny())
    is_head = Head(model.last_layer((5,)))
    params = model.init(jax.random.key(0), (5,))
    head, body = trees.partition(params.weights, is_head)
    x, key = 3 + jax.random.normal(jax.random.key(1), (6, 5)), jax.random.key(2)
    _, stats = split(model, (5,), is_head).features(Params(body, params.stats), head, x, key=key)
    _, whole = model.apply(params, x, key=jax.random.clone(key))
    jax.tree.map(np.testing.assert_array_equal, stats, whole)
    assert float(jnp.abs(stats["batch_stats"]["BatchNorm_0"]["mean"]).max()) > 0


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
