import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from priory.core.errors import UsageError
from priory.models import MLP, Categorical, Gaussian, Head, Linen, WithScale, as_model

Y = np.float32([0.3, -1.2, 4.0])
MEAN = np.float32([0.0, -1.0, 1.0])


def normal(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def log_prob(likelihood, *args, **kwargs):
    """The log probability, as one program."""
    return np.asarray(jax.jit(likelihood.log_prob)(*args, **kwargs))


def test_categorical_log_probability_is_minus_the_cross_entropy():
    logits, labels = normal(0, (7, 5)) * 20, np.arange(7, dtype=np.int32) % 5
    expected = -jax.jit(optax.losses.softmax_cross_entropy_with_integer_labels)(logits, labels)
    np.testing.assert_allclose(log_prob(Categorical(5), logits, labels), expected, rtol=1e-5, atol=1e-6)


def test_categorical_probabilities_are_those_of_the_log_probability():
    logits = normal(0, (3, 5))
    probabilities = np.asarray(jax.jit(Categorical(5).probabilities)(logits))
    np.testing.assert_allclose(probabilities.sum(-1), 1.0, rtol=1e-6)
    expected = log_prob(Categorical(5), logits, np.full(3, 2, np.int32))
    np.testing.assert_allclose(np.log(probabilities[:, 2]), expected, rtol=1e-5)


def test_targets_are_broadcast_over_samples():
    logits, labels = normal(0, (4, 3, 5)), np.int32([0, 4, 2])
    every = log_prob(Categorical(5), logits, labels)
    np.testing.assert_allclose(every[1], log_prob(Categorical(5), logits[1], labels), rtol=1e-6)
    assert log_prob(Gaussian(1.0), logits[..., :1], Y).shape == (4, 3)


def test_a_fixed_scale_is_a_normal_density():
    expected = scipy.stats.norm.logpdf(Y, MEAN, 2.5)
    np.testing.assert_allclose(log_prob(Gaussian(2.5), MEAN[:, None], Y), expected, rtol=1e-5)


def test_a_learned_scale_is_the_exponential_of_the_second_output():
    log_scale = np.float32([-1.0, 0.0, 2.0])
    outputs = np.stack([MEAN, log_scale], axis=-1)
    expected = scipy.stats.norm.logpdf(Y, MEAN, np.exp(log_scale))
    np.testing.assert_allclose(log_prob(Gaussian("learned"), outputs, Y), expected, rtol=1e-5)


def test_a_column_gives_every_row_its_standard_error():
    errors = np.float32([0.5, 1.0, 3.0])
    expected = scipy.stats.norm.logpdf(Y, MEAN, errors)
    np.testing.assert_allclose(log_prob(Gaussian("column"), MEAN[:, None], Y, scale=errors), expected, rtol=1e-5)


def test_the_network_has_one_output_for_every_gaussian():
    assert {Gaussian(scale).num_outputs for scale in (0.1, "learned", "column")} == {1}


def test_a_missing_column_is_refused():
    with pytest.raises(UsageError, match="standard error of each row"):
        Gaussian("column").log_prob(MEAN[:, None], Y)


def test_a_missing_log_scale_is_refused():
    with pytest.raises(UsageError, match="WithScale"):
        Gaussian("learned").log_prob(MEAN[:, None], Y)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), "known"])
def test_a_bad_scale_is_refused(scale):
    with pytest.raises(UsageError, match="is no scale"):
        Gaussian(scale)


def test_likelihoods_are_equal_by_value():
    assert len({Gaussian(1.0), Gaussian(1.0), Gaussian("learned"), Categorical(3), Categorical(3)}) == 3


def test_with_scale_appends_one_shared_log_scale():
    model = WithScale(Linen(MLP((), 1)))
    params = jax.jit(lambda key: model.init(key, (2,)))(jax.random.key(0))
    params.weights["log_scale"] = np.float32(0.7)
    x = normal(1, (4, 2))
    outputs = np.asarray(jax.jit(model.apply)(params, x)[0])
    np.testing.assert_allclose(outputs[:, 0], (x @ np.asarray(params.weights["Dense_0"]["kernel"]))[:, 0], rtol=1e-5)
    np.testing.assert_allclose(outputs[:, 1], 0.7)


def test_the_log_scale_starts_at_zero_and_has_a_gradient():
    model = WithScale(Linen(MLP((), 1)))
    params = jax.jit(lambda key: model.init(key, (2,)))(jax.random.key(0))
    x, y = np.ones((3, 2), np.float32), np.full(3, 10.0, np.float32)

    def total(weights):
        return Gaussian("learned").log_prob(model.apply(type(params)(weights), x)[0], y).sum()

    assert params.weights["log_scale"] == 0.0
    assert jax.jit(jax.grad(total))(params.weights)["log_scale"] > 0  # far targets ask for a wider distribution


def test_the_log_scale_belongs_to_the_head():
    head = Head(WithScale(Linen(MLP((3,), 1))).last_layer((2,)))
    assert head("log_scale")
    assert head("Dense_1/kernel")
    assert not head("Dense_0/kernel")


def test_weights_without_layers_are_wrapped():
    bare = as_model((lambda key, shape: jnp.ones((*shape, 1)), lambda w, x: x @ w))
    model = WithScale(bare)
    params = model.init(jax.random.key(0), (2,))
    np.testing.assert_allclose(model.apply(params, jnp.ones((3, 2)))[0], jnp.tile(jnp.array([[2.0, 0.0]]), (3, 1)))
    assert model.last_layer((2,)) == ""


def test_a_layer_that_takes_the_name_of_the_scale_is_refused():
    taken = as_model((lambda key, shape: {"log_scale": jnp.ones((*shape, 1))}, lambda w, x: x @ w["log_scale"]))
    with pytest.raises(UsageError, match="log_scale"):
        WithScale(taken).init(jax.random.key(0), (2,))
