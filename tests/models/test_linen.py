import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.models import MLP, Linen

X = np.random.default_rng(7).standard_normal((6, 4), np.float32) + 2


def initial(model):
    """Parameters, made by one program."""
    return jax.jit(lambda key: model.init(key, (4,)))(jax.random.key(0))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))
        return nn.Dense(2)(x)


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, *, deterministic: bool = True):
        x = nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(16)(x))
        return nn.Dense(2)(x)


class Running(nn.Module):
    @nn.compact
    def __call__(self, x, use_running_average: bool):
        return nn.BatchNorm(use_running_average=use_running_average)(x)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(2)(x)
        return x + jax.random.normal(self.make_rng("noise"), x.shape) if train else x


class Shuffled(nn.Module):
    """Twelve layers named against the order in which they are called."""

    @nn.compact
    def __call__(self, x):
        layers = [nn.Dense(3) for _ in range(12)]
        for layer in reversed(layers):
            x = layer(x)
        return x


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, ())
        return scale * MLP((3,), 2, name="body")(x)


def test_training_returns_new_statistics():
    model = Linen(Normed())
    params = initial(model)
    _, stats = jax.jit(lambda key: model.apply(params, X, key=key))(jax.random.key(1))
    assert jax.tree.structure(stats) == jax.tree.structure(params.stats)
    assert not np.allclose(stats["batch_stats"]["BatchNorm_0"]["mean"], 0.0)


def test_evaluation_leaves_statistics_and_uses_them():
    model = Linen(Normed())
    params = initial(model)
    same = []

    @jax.jit
    def both():
        outputs, stats = model.apply(params, X)
        same.append(stats is params.stats)
        return outputs[:1], model.apply(params, X[:1])[0]

    np.testing.assert_allclose(*both(), rtol=1e-5)  # no row depends on another
    assert same == [True]


def test_statistics_are_not_weights():
    params = initial(Linen(Normed()))
    assert set(params.weights) == {"Dense_0", "BatchNorm_0", "Dense_1"}
    assert set(params.weights["BatchNorm_0"]) == {"scale", "bias"}


def test_use_running_average_is_recognised():
    model = Linen(Running())
    params = initial(model)
    apply = jax.jit(lambda key: model.apply(params, X, key=key)[0])
    np.testing.assert_allclose(np.mean(apply(jax.random.key(1)), axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(apply(None), X, rtol=1e-4)


def test_dropout_differs_by_key():
    model = Linen(Dropped())
    params = initial(model)
    apply = jax.jit(lambda key: model.apply(params, X, key=key)[0])
    first, again, other = (apply(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_dropout_is_off_without_a_key():
    model = Linen(Dropped())
    params = initial(model)
    dense = params.weights["Dense_0"], params.weights["Dense_1"]
    by_hand = (X @ np.asarray(dense[0]["kernel"])) @ np.asarray(dense[1]["kernel"])
    np.testing.assert_allclose(jax.jit(model.apply)(params, X)[0], by_hand, rtol=1e-5)


def test_a_key_serves_every_random_stream():
    model = Linen(Noisy())
    params = initial(model)
    apply = jax.jit(lambda key: model.apply(params, X, key=key)[0])
    assert not np.allclose(apply(jax.random.key(1)), apply(None))


@pytest.mark.parametrize(
    ("module", "last"),
    [
        (MLP((5,), 2), "Dense_1"),
        (MLP((3,) * 11, 2), "Dense_11"),
        (Shuffled(), "Dense_0"),
        (Nested(), "body/Dense_1"),
        (nn.Sequential([nn.Dense(3), nn.relu, nn.Dense(2), jnp.tanh]), "layers_2"),
        (nn.Dense(2), ""),
    ],
    ids=["two layers", "twelve layers", "reversed", "nested", "sequential", "one layer"],
)
def test_the_last_layer_is_the_one_called_last(module, last):
    assert Linen(module).last_layer((4,)) == last


def test_a_module_without_parameters_is_refused():
    with pytest.raises(UsageError, match="no layer with parameters"):
        Linen(nn.Sequential([nn.relu])).last_layer((4,))


def test_equal_descriptions_compile_once():
    traces = []

    def apply(model, params, x):
        traces.append(model)
        return model.apply(params, x)[0]

    compiled = jax.jit(apply, static_argnums=0)
    params = initial(Linen(MLP((5,), 2)))
    compiled(Linen(MLP((5,), 2)), params, X)
    compiled(Linen(MLP((5,), 2)), params, X)
    assert len(traces) == 1
