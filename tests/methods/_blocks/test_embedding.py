"""A network as an embedding and a last layer: together they are the network, and what has no such form is refused."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from priory.core import trees
from priory.core.errors import UsageError
from priory.fed.method import Task
from priory.methods._blocks.embedding import Embedding, Layer
from priory.models import CNN, MLP, Gaussian, Head, Linen, Params, Reddi, WithScale, as_model
from priory.models.likelihood import Categorical
from tests.methods.problems import Tiny

SHAPE = (8, 8, 1)


def task_of(model, likelihood=None, head=None):
    model = as_model(model)
    is_head = Head(head or model.last_layer(SHAPE))
    return Task(model, likelihood or Categorical(3), SHAPE, 2, 10, is_head)


def normal(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


MODULES = {
    "mlp": MLP((6,), 3),
    "linear": MLP((), 3),
    "cnn": CNN(3, (2,), 5),
    "reddi": Reddi(3, (2,), 7),
    "norm": Tiny(),
}


@pytest.mark.parametrize("name", MODULES)
def test_features_and_a_layer_give_what_the_network_with_that_layer_gives(name):
    task = task_of(Linen(MODULES[name]))
    embedding = Embedding(task)
    shape = (embedding.width, embedding.num_outputs)
    layer = Layer(normal(1, shape), normal(2, shape[1:]))

    @jax.jit
    def both(key, x):
        params = embedding.init(key)
        features, _ = embedding.features(params, x)
        whole, _ = task.model.apply(Params(embedding.with_layer(params.weights, layer), params.stats), x)
        return features, embedding.outputs(params.weights, layer, features), whole

    features, outputs, whole = both(jax.random.key(0), normal(3, (4, *SHAPE)))
    assert features.shape == (4, embedding.width)
    np.testing.assert_allclose(outputs, whole, rtol=1e-5, atol=1e-5)


def test_a_learned_scale_stays_beside_the_layer():
    task = task_of(WithScale(Linen(MLP((6,), 1))), Gaussian("learned"))
    embedding = Embedding(task)
    assert embedding.num_outputs == 1
    layer = Layer(np.ones((6, 1), np.float32), np.full(1, 2.0, np.float32))

    @jax.jit
    def both(key, x):
        params = embedding.init(key)
        weights = {**params.weights, "log_scale": jnp.float32(-0.7)}
        outputs = embedding.outputs(weights, layer, embedding.features(Params(weights, params.stats), x)[0])
        return outputs, task.model.apply(Params(embedding.with_layer(weights, layer), params.stats), x)[0]

    outputs, whole = both(jax.random.key(0), normal(3, (4, *SHAPE)))
    np.testing.assert_allclose(outputs, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outputs[:, 1], np.full(4, -0.7), rtol=1e-6)


def test_the_network_of_a_layer_has_the_structure_of_a_fresh_one():
    task = task_of(Linen(Tiny()))
    embedding = Embedding(task)

    def both(key, other):
        made = embedding.with_layer(embedding.init(key).weights, Layer(jnp.zeros((4, 3)), jnp.zeros(3)))
        return made, task.init(other).weights

    made, whole = jax.eval_shape(both, jax.random.key(0), jax.random.key(0))
    assert jax.tree.structure(made) == jax.tree.structure(whole)


def test_the_embedding_holds_all_weights_but_those_of_the_last_layer():
    task = task_of(Linen(Reddi(3, (2,), 7)))
    embedding = Embedding(task)
    last = (embedding.width + 1) * embedding.num_outputs
    sizes = [trees.size(jax.eval_shape(init, jax.random.key(0)).weights) for init in (embedding.init, task.init)]
    assert sizes[0] == sizes[1] - last


def test_a_key_switches_dropout_and_the_statistics_of_a_batch_norm_on():
    embedding = Embedding(task_of(Linen(Tiny())))
    params = jax.jit(embedding.init)(jax.random.key(0))
    features = jax.jit(embedding.features)
    x = normal(3, (6, *SHAPE))
    still, same = features(params, x)
    moving, moved = features(params, x, jax.random.key(4))
    assert not np.allclose(still, moving)
    np.testing.assert_array_equal(jax.tree.leaves(same)[0], jax.tree.leaves(params.stats)[0])
    assert not np.array_equal(jax.tree.leaves(moved)[0], jax.tree.leaves(params.stats)[0])


class Picture(nn.Module):
    """The last layer sees an image: its outputs are averaged over the pixels."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Conv(4, (3, 3))(x))).mean(axis=(1, 2))


class Pixels(nn.Module):
    """The last layer sees an image, and nothing follows it."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Conv(4, (3, 3))(x))


class NoBias(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, use_bias=False)(nn.relu(nn.Dense(5)(x.reshape(x.shape[0], -1))))


class Squashed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(3)(x.reshape(x.shape[0], -1)))


class Nnx(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(64, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x.reshape(x.shape[0], -1))


class Flat(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return self.layer(x.reshape(-1))


WITHOUT = {
    "an image before a mean": lambda: Picture(),
    "an image": lambda: Pixels(),
    "no bias": lambda: NoBias(),
    "something after it": lambda: Squashed(),
    "nnx": lambda: Nnx(),
    "equinox": lambda: Flat(eqx.nn.Linear(64, 3, key=jax.random.key(0))),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_network_without_a_vector_before_a_dense_last_layer_is_refused(name):
    with pytest.raises(UsageError, match=r"has no embedding that is a vector.*flatten before nn.Dense"):
        Embedding(task_of(WITHOUT[name]())).split  # noqa: B018


def test_a_head_that_is_more_than_the_last_layer_is_refused():
    with pytest.raises(UsageError, match=r"its head is not one dense layer .*leave --head out"):
        Embedding(task_of(Linen(MLP((6, 5), 3)), head="Dense_1|Dense_2")).split  # noqa: B018
