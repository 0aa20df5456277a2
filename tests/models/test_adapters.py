import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from priory.core.errors import UsageError
from priory.models import MLP, Head, Linen, Params, as_model, conv

X = np.random.default_rng(7).standard_normal((5, 4), np.float32) + 1


def initial(model, seed=0):
    """Parameters, made by one program."""
    return jax.jit(lambda key: model.init(key, (4,)))(jax.random.key(seed))


class NnxNet(nnx.Module):
    """Layers named against their order, with batch norm and dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.z_first = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.a_last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.a_last(self.drop(nnx.relu(self.norm(self.z_first(x)))))


class EquinoxNet(eqx.Module):
    z_first: eqx.nn.Linear
    drop: eqx.nn.Dropout
    a_last: eqx.nn.Linear

    def __init__(self, key):
        key_first, key_last = jax.random.split(key)
        self.z_first = eqx.nn.Linear(4, 16, key=key_first)
        self.drop = eqx.nn.Dropout(0.5)
        self.a_last = eqx.nn.Linear(16, 3, key=key_last)

    def __call__(self, x, key):
        return self.a_last(self.drop(jax.nn.relu(self.z_first(x)), key=key))


class EquinoxConv(eqx.Module):
    layer: eqx.nn.Conv2d

    def __init__(self, key):
        self.layer = eqx.nn.Conv2d(1, 2, 3, padding=1, key=key)

    def __call__(self, x):
        return self.layer(x).reshape(-1)


class EquinoxState(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        del key
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="ema")

    def __call__(self, x, state):
        return self.norm(x, state)


def mlp(key):
    return eqx.nn.MLP(4, 3, 8, 2, key=key)


def make(key, input_shape):
    key_first, key_last = jax.random.split(key)
    return {
        "w": jax.random.normal(key_first, (*input_shape, 8)),
        "b": jnp.zeros(8),
        "v": jax.random.normal(key_last, (8, 3)),
        "c": jnp.zeros(3),
    }


def run(weights, x):
    return jax.nn.relu(x @ weights["w"] + weights["b"][None]) @ weights["v"] + weights["c"][None]


NETWORKS = {
    "Linen": MLP((8,), 3),
    "NNX factory": NnxNet,
    "NNX module": NnxNet(nnx.Rngs(0)),
    "Equinox factory": mlp,
    "Equinox class with dropout": EquinoxNet,
    "Equinox module": mlp(jax.random.key(0)),
    "functions": (make, run),
}
LAST = {
    "Linen": {"Dense_1/kernel", "Dense_1/bias"},
    "NNX factory": {"a_last/kernel", "a_last/bias"},
    "NNX module": {"a_last/kernel", "a_last/bias"},
    "Equinox factory": {"layers/2/weight", "layers/2/bias"},
    "Equinox class with dropout": {"a_last/weight", "a_last/bias"},
    "Equinox module": {"layers/2/weight", "layers/2/bias"},
    "functions": {"v", "c"},
}
everyone = pytest.mark.parametrize("name", NETWORKS)
with_dropout = pytest.mark.parametrize("name", ["NNX factory", "NNX module", "Equinox class with dropout"])


@everyone
def test_a_compiled_training_step_gives_outputs_and_gradients(name):
    model = as_model(NETWORKS[name])
    params = initial(model)

    @jax.jit
    def step(params, key):
        def loss(weights):
            outputs, stats = model.apply(Params(weights, params.stats), X, key=key)
            return (outputs**2).mean(), (outputs, stats)

        return jax.grad(loss, has_aux=True)(params.weights)

    gradient, (outputs, stats) = step(params, jax.random.key(1))
    assert outputs.shape == (5, 3)
    assert jax.tree.structure(stats) == jax.tree.structure(params.stats)
    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, params.weights)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient) if leaf.ndim == 2)


@everyone
def test_the_same_network_twice_is_one_description(name):
    first, second = as_model(NETWORKS[name]), as_model(NETWORKS[name])
    assert first == second
    assert hash(first) == hash(second)
    assert as_model(first) is first


@everyone
def test_the_last_layer_is_found_by_use_and_not_by_name(name):
    model = as_model(NETWORKS[name])
    head = Head(model.last_layer((4,)))
    weights = jax.eval_shape(lambda key: model.init(key, (4,)), jax.random.key(0)).weights
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
    paths = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}
    assert {path for path in paths if head(path)} == LAST[name]


@with_dropout
def test_dropout_draws_from_the_key_and_is_off_without(name):
    model = as_model(NETWORKS[name])
    params = initial(model)
    trained = jax.jit(lambda key: model.apply(params, X, key=key)[0])
    first, again, other = (trained(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    alone, together = jax.jit(lambda: (model.apply(params, X[:1])[0], model.apply(params, X)[0]))()
    np.testing.assert_allclose(alone, np.asarray(together)[:1], rtol=1e-5)


def test_nnx_statistics_are_updated_in_training_only():
    model, same = as_model(NnxNet), []
    params = initial(model)
    trained = jax.jit(lambda key: model.apply(params, X, key=key)[1])(jax.random.key(1))
    jax.eval_shape(lambda: same.append(model.apply(params, X)[1] is params.stats))
    assert same == [True]
    assert not np.allclose(trained["norm"]["mean"], params.stats["norm"]["mean"])


def test_a_factory_draws_new_weights_for_every_key():
    for factory in (NnxNet, mlp):
        first, second = (jax.tree.leaves(initial(as_model(factory), seed).weights) for seed in (0, 1))
        assert any(not np.allclose(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["NNX module", "Equinox module"])
def test_a_module_instance_brings_its_weights(name):
    first, second = (as_model(NETWORKS[name]).init(jax.random.key(seed), (4,)) for seed in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("name", ["NNX module", "Equinox module"])
def test_donated_parameters_do_not_empty_the_users_module(name):
    model = as_model(NETWORKS[name])
    jax.tree.map(lambda leaf: leaf.delete(), model.init(jax.random.key(0), (4,)))
    assert np.isfinite(model.apply(model.init(jax.random.key(0), (4,)), X)[0]).all()


def test_equinox_outputs_are_those_of_the_module_itself():
    module = mlp(jax.random.key(3))
    model = as_model(module)
    np.testing.assert_allclose(model.apply(model.init(jax.random.key(0), (4,)), X)[0], jax.vmap(module)(X), rtol=1e-6)


def test_a_partial_factory_is_a_factory():
    model = as_model(functools.partial(eqx.nn.MLP, 4, 3, 8, 1))
    assert model.apply(model.init(jax.random.key(0), (4,)), X)[0].shape == (5, 3)


def test_an_equinox_convolution_warns_that_it_is_slow():
    with pytest.warns(conv.SlowConvolutionWarning, match="only Flax layers"):
        as_model(EquinoxConv).init(jax.random.key(0), (1, 4, 4))


def test_equinox_state_is_refused():
    model = as_model(EquinoxState)
    with pytest.raises(UsageError, match="carries Equinox state"):
        model.init(jax.random.key(0), (4,))


@pytest.mark.parametrize(
    "network", [42, "mlp", (make,), MLP, nn.relu], ids=["number", "text", "single", "class", "layer"]
)
def test_anything_else_is_refused_by_name(network):
    with pytest.raises(UsageError, match="cannot be run; give"):
        as_model(network)


def test_a_linen_module_keeps_its_own_adapter():
    assert as_model(MLP((8,), 3)) == Linen(MLP((8,), 3))
