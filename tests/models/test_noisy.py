"""Networks with Gaussian weights: one distribution whichever way it is drawn, and gradients that agree."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.models import MLP, Linen, Params, WithScale, as_model, noisy
from priory.models.model import parse

IMAGES = np.random.default_rng(7).normal(0.5, 1.0, (3, 4, 4, 2)).astype(np.float32)
ROWS = IMAGES.reshape(3, -1)[:, :5]
WORDS = np.arange(12, dtype=np.float32).reshape(3, 4) % 7


class Convolutional(nn.Module):
    """A convolution, and a dense layer at each position, whose positions are added up before the last."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Conv(2, (3, 3))(x))
        x = nn.Dense(2, name="everywhere")(x)
        return nn.Dense(2, name="last")(jnp.tanh(x.sum((1, 2)) / 4))


class Alone(nn.Module):
    """One layer, its outputs as one vector an example."""

    layer: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.layer(x).reshape(x.shape[0], -1)


class Own(nn.Dense):
    pass


class Embedded(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Embed(7, 5)(x.astype(jnp.int32)).mean(axis=1))
        return Own(2)(x)


class Twice(nn.Module):
    """A layer that is called twice, by place and by name."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(3, name="twice")
        return jnp.concatenate([layer(x), layer(inputs=x)], axis=1)


class Flattened(nn.Module):
    """Positions that look like examples."""

    @nn.compact
    def __call__(self, x):
        batch = x.shape[0]
        return nn.Dense(2)(x.reshape(-1, x.shape[-1])).reshape(batch, -1)


class Mapped(nn.Module):
    """Positions that a transformation hides."""

    @nn.compact
    def __call__(self, x):
        shared = nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False}, in_axes=1, out_axes=1)
        return shared(2)(x.reshape(x.shape[0], -1, 2)).reshape(x.shape[0], -1)


class Scanned(nn.Module):
    """One layer for every step of a loop."""

    @nn.compact
    def __call__(self, x):
        def step(layer, carry, _):
            return jnp.tanh(layer(carry)), None

        loop = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, length=3)
        return loop(nn.Dense(x.shape[-1]), x, None)[0]


class Normalised(nn.Module):
    """A layer that reads other weights than its own."""

    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(2, name="inner"))(x)


class AcrossExamples(nn.Module):
    """A convolution that takes the examples for positions."""

    @nn.compact
    def __call__(self, x):
        return nn.Conv(2, (3, 3))(x).reshape(x.shape[0], -1)


class Regularised(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(16)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(2)(x)


def pair_init(key, input_shape):
    return {"w": jax.random.normal(key, (*input_shape, 2)), "b": jnp.ones(2)}


def pair_apply(weights, x):
    return jnp.tanh(x) @ weights["w"] + weights["b"][None]


BY_WEIGHTS = {
    "embedding, layer norm and a class of the user's own": (Linen(Embedded()), WORDS),
    "called twice": (Linen(Twice()), ROWS),
    "flattened positions": (Linen(Flattened()), IMAGES),
    "mapped positions": (Linen(Mapped()), IMAGES),
    "loop": (Linen(Scanned()), ROWS),
    "normalised weights": (Linen(Normalised()), ROWS),
    "across examples": (Linen(AcrossExamples()), IMAGES[..., 0]),
    "product of the user's own": (Linen(nn.Dense(2, dot_general=jax.lax.dot_general)), ROWS),
    "pair": (as_model((pair_init, pair_apply)), ROWS),
}
MLP_AND_CNN = {"mlp": (Linen(MLP((3,), 2)), ROWS), "cnn": (Linen(Convolutional()), IMAGES)}


def network(model, x, scale=0.5):
    """Parameters and standard deviations from NumPy (nothing to compile)."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x.shape[1:]))
    draw = np.random.default_rng(0)
    weights = jax.tree.map(lambda leaf: draw.normal(0.1, 0.5, leaf.shape).astype(leaf.dtype), shapes.weights)
    sd = jax.tree.map(lambda leaf: (scale * draw.uniform(0.5, 1.0, leaf.shape)).astype(leaf.dtype), shapes.weights)
    stats = jax.tree.map(lambda leaf: draw.uniform(0.5, 1.0, leaf.shape).astype(leaf.dtype), shapes.stats)
    return Params(weights, stats), sd


apply_noisily = jax.jit(noisy.apply, static_argnums=0)


def by(way):
    return lambda *arguments: noisy.apply(*arguments, by=way)


def by_pixels(model, mean, sd, x, key):
    """What a convolution must not do: noise of the right variance for each position, independent of the others."""
    key_pixels, key_rest = jax.random.split(key)

    def perturb(next_fun, args, kwargs, context):
        module, outputs = context.module, next_fun(*args, **kwargs)
        if context.method_name != "__call__" or type(module) is not nn.Conv or module.path == ():
            return outputs
        squares = jax.tree.map(jnp.square, sd[module.name])
        variance = module.clone(parent=None).apply({"params": squares}, args[0] ** 2)
        return outputs + jnp.sqrt(variance) * jax.random.normal(key_pixels, outputs.shape)

    others = {name: jax.tree.map(jnp.zeros_like, sd[name]) if name in ("Conv_0", "layer") else sd[name] for name in sd}
    with nn.intercept_methods(perturb):
        return noisy.apply(model, mean, others, x, key_rest, by="weights")


WAYS = {"layers": by("layers"), "weights": by("weights"), "pixels": by_pixels}


@cache
def gradients(name, way, num=6000):
    """Gradients (num, weights) of a loss of one's own for each example, with respect to mean and sd."""
    model, x = MLP_AND_CNN[name]
    params, sd = network(model, x, scale=0.3)

    def loss(weights, sd, key):
        outputs, _ = WAYS[way](model, Params(weights), sd, x, key)
        return jnp.sum(jnp.square(outputs) + jnp.sin(outputs))

    def one(key):
        found = jax.grad(loss, argnums=(0, 1))(params.weights, sd, key)
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(found)])

    seed = list(WAYS).index(way)  # estimates are compared, so they must not share their draws
    return each(one, jax.random.split(jax.random.key(seed), num))


def each(function, keys):
    """What a function gives for each key; a loop, since it compiles in half the time of a `vmap`."""
    return np.asarray(jax.jit(lambda keys: jax.lax.map(function, keys))(keys), np.float64)


def standard_errors_apart(a, b):
    return np.abs(a.mean(0) - b.mean(0)) / np.sqrt(a.var(0) / len(a) + b.var(0) / len(b))


@pytest.mark.parametrize("name", MLP_AND_CNN)
def test_expected_gradients_by_layers_and_by_weights_agree(name):
    apart = standard_errors_apart(gradients(name, "layers"), gradients(name, "weights"))
    assert apart.max() < 5


def test_expected_gradients_with_independent_noise_for_each_pixel_do_not_agree():
    apart = standard_errors_apart(gradients("cnn", "pixels"), gradients("cnn", "weights"))
    assert apart.max() > 15


@pytest.mark.parametrize("name", MLP_AND_CNN)
def test_gradients_by_layers_have_less_variance(name):
    assert gradients(name, "layers").var(0).sum() < 0.8 * gradients(name, "weights").var(0).sum()


CONVOLUTIONS = {
    "3x3": (nn.Conv(2, (3, 3)), IMAGES),
    "groups": (nn.Conv(4, (3, 3), feature_group_count=2, use_bias=False), IMAGES),
    "circular with strides": (nn.Conv(3, (3, 2), strides=2, padding="CIRCULAR"), IMAGES),
    "causal with dilation": (nn.Conv(3, 2, padding="CAUSAL", kernel_dilation=2), IMAGES[:, 0]),
    "two batch axes": (nn.Conv(2, (3,)), IMAGES),
    "dense on positions": (nn.Dense(3), IMAGES),
}


def layer_outputs(layer, x, way, num=4000):
    """Outputs (num, batch, units) of a layer that is alone in its network, and the parameters of their distribution."""
    model = Linen(Alone(layer))
    params, sd = network(model, x)

    keys = jax.random.split(jax.random.key(1), num)
    return each(lambda key: WAYS[way](model, params, sd, x, key)[0], keys), model, params.weights, sd


def sums_of_positions(layer, x, way):
    """How far the variance of a sum over positions and channels is from its closed form, in standard errors."""
    outputs, model, weights, sd = layer_outputs(layer, x, way)
    units = np.random.default_rng(3).uniform(0.5, 1.5, outputs.shape[-1]).astype(np.float32)
    # The sum is linear in the weights: its variance is Σ (∂sum/∂w)² sd².
    slopes = jax.jit(jax.jacobian(lambda weights: model.apply(Params(weights), x)[0] @ units))(weights)
    terms = jax.tree.map(
        lambda slope, sd: np.sum(np.square(np.float64(slope) * sd[None]), tuple(range(1, slope.ndim))), slopes, sd
    )
    variance = sum(jax.tree.leaves(terms))
    found = (outputs @ units).var(0)
    return (found - variance) / (variance * np.sqrt(2 / len(outputs)))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_sums_over_positions_that_share_weights_vary_as_those_of_drawn_weights(name):
    layer, x = CONVOLUTIONS[name]
    assert noisy._devices(Linen(Alone(layer)), x.shape[1:]) == {"layer": "flipout"}
    assert np.abs(sums_of_positions(layer, x, "layers")).max() < 5


def test_sums_over_positions_with_independent_noise_vary_too_little():
    layer, x = CONVOLUTIONS["3x3"]
    assert np.abs(sums_of_positions(layer, x, "weights")).max() < 5
    assert sums_of_positions(layer, x, "pixels").max() < -20


@pytest.mark.parametrize("name", ["3x3", "dense on positions"])
def test_flipout_turns_noise_between_examples_and_not_the_mean(name):
    layer, x = CONVOLUTIONS[name]
    same = np.repeat(x[:1], 2, axis=0)
    outputs, model, weights, _ = layer_outputs(layer, same, "layers")
    mean = np.asarray(jax.jit(model.apply)(Params(weights), same)[0])
    error = outputs.std(0) / np.sqrt(len(outputs))
    assert (np.abs(outputs.mean(0) - mean) < 5 * error).all()
    noise = outputs - mean[None]
    correlation = (noise[:, 0] * noise[:, 1]).mean(0) / (noise[:, 0].std(0) * noise[:, 1].std(0))
    # A product of two normal numbers that differ by a sign has fourth moments: three times the variance at most.
    assert (np.abs(correlation) < 5 * np.sqrt(3 / len(outputs))).all()


@cache
def dense_outputs(num=20_000):
    model = Linen(nn.Dense(3))
    x = np.concatenate([ROWS, ROWS[:1]])  # the first example once more
    params, sd = network(model, x)
    keys = jax.random.split(jax.random.key(4), num)
    outputs = each(lambda key: noisy.apply(model, params, sd, x, key)[0], keys)
    mean = x @ params.weights["kernel"] + params.weights["bias"]
    return outputs, mean, x**2 @ sd["kernel"] ** 2 + sd["bias"] ** 2


def test_a_dense_layer_has_the_mean_and_variance_of_its_closed_form():
    outputs, mean, variance = dense_outputs()
    assert (np.abs(outputs.mean(0) - mean) < 5 * np.sqrt(variance / len(outputs))).all()
    assert (np.abs(outputs.var(0) - variance) < 5 * variance * np.sqrt(2 / len(outputs))).all()


def test_noise_of_a_dense_layer_is_independent_between_examples_and_units():
    outputs, _, _ = dense_outputs()
    correlation = np.corrcoef(outputs.reshape(len(outputs), -1), rowvar=False)
    apart = correlation - np.eye(len(correlation))
    assert np.abs(apart).max() < 5 / np.sqrt(len(outputs))


@pytest.mark.parametrize("name", BY_WEIGHTS)
def test_a_layer_that_shares_or_hides_its_weights_is_drawn_by_weights(name):
    model, x = BY_WEIGHTS[name]
    params, sd = network(model, x)

    @jax.jit
    def compute(key):
        layers, weights = (noisy.apply(model, params, sd, x, key, by=way)[0] for way in ("layers", "weights"))
        return layers, weights, model.apply(params, x)[0]

    with jax.debug_key_reuse(False):  # the same draw, on purpose
        layers, weights, mean = compute(jax.random.key(0))
    np.testing.assert_allclose(layers, weights, rtol=1e-6, atol=1e-6)
    assert (np.abs(layers - mean).max(-1) > 1e-2).all()


def test_two_calls_of_one_layer_share_their_noise():
    model, x = BY_WEIGHTS["called twice"]
    outputs = np.asarray(apply_noisily(model, *network(model, x), x, jax.random.key(0))[0])
    np.testing.assert_array_equal(outputs[:, :3], outputs[:, 3:])


def test_layers_are_recognised_inside_a_model_with_a_learned_scale():
    model = WithScale(Linen(MLP((3,), 1)))
    assert noisy._devices(model, (5,)) == {"Dense_0": "local", "Dense_1": "local"}
    params, sd = network(model, ROWS)
    outputs = np.asarray(apply_noisily(model, params, sd, ROWS, jax.random.key(0))[0])
    assert np.ptp(outputs[:, 1]) == 0  # the scale is drawn too, once
    assert outputs[0, 1] != params.weights["log_scale"]


@pytest.mark.parametrize("name", MLP_AND_CNN)
def test_without_spread_a_network_is_deterministic_and_its_gradients_finite(name):
    model, x = MLP_AND_CNN[name]
    params, sd = network(model, x, scale=0.0)

    @jax.jit
    def compute(weights, sd):
        def outputs(weights, sd):
            found = noisy.apply(model, Params(weights), sd, x, jax.random.key(0))[0]
            return jnp.sum(found**2), found

        def plain(weights):
            found = model.apply(Params(weights), x)[0]
            return jnp.sum(found**2), found

        noisily = jax.grad(outputs, argnums=(0, 1), has_aux=True)(weights, sd)
        return *noisily, *jax.grad(plain, has_aux=True)(weights)

    (slopes, slopes_sd), found, expected_slopes, expected = compute(params.weights, sd)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), slopes, expected_slopes)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes_sd))


def test_an_empty_input_without_bias_has_finite_gradients():
    model = Linen(nn.Dense(3, use_bias=False))
    params, sd = network(model, ROWS)
    x = ROWS * np.float32([[0], [1], [1]])

    def loss(weights, sd, x):
        outputs = noisy.apply(model, Params(weights), sd, x, jax.random.key(0))[0]
        return jnp.sum(outputs), outputs

    slopes, outputs = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(params.weights, sd, x)
    np.testing.assert_array_equal(outputs[0], 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


@cache
def regularised():
    """Outputs and statistics without noise in the weights, at two keys, and what the network alone gives."""
    model = Linen(Regularised())
    params, sd = network(model, ROWS, scale=0.0)
    found = jax.jit(lambda key: noisy.apply(model, params, sd, ROWS, key))
    alone = jax.jit(lambda key: model.apply(params, ROWS, key=key))
    return [found(jax.random.key(seed)) for seed in (0, 1)], alone(jax.random.key(2)), params


def test_new_statistics_come_back():
    (first, _), (_, expected), params = regularised()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), first[1], expected)
    before, after = (jax.tree.leaves(stats)[0] for stats in (params.stats, first[1]))
    assert not np.allclose(before, after)


def test_dropout_still_acts():
    (first, second), _, _ = regularised()
    assert not np.allclose(first[0], second[0])


@pytest.mark.parametrize("way", ["layers", "weights"])
def test_a_key_decides_the_draw(way):
    model, x = MLP_AND_CNN["mlp"]
    params, sd = network(model, x)
    draw = jax.jit(lambda key: noisy.apply(model, params, sd, x, key, by=way)[0])
    first, again, other = (draw(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()


@pytest.mark.parametrize(("layer", "x"), [(nn.Dense, ROWS), (nn.Conv, IMAGES)], ids=["dense", "conv"])
def test_small_noise_survives_half_precision(layer, x):
    shape = {} if layer is nn.Dense else {"kernel_size": (3, 3)}
    model = Linen(Alone(layer(2, dtype=jnp.float16, **shape)))
    params, sd = network(model, x)
    still = jax.tree.map(np.zeros_like, params)
    # Its square is less than the least positive number of half precision.
    small = jax.tree.map(lambda leaf: np.full_like(leaf, 1e-4), sd)
    outputs = np.asarray(apply_noisily(model, still, small, x, jax.random.key(0))[0])
    assert outputs.dtype == np.float16
    assert 3e-5 < np.std(outputs.astype(np.float32)) < 3e-3


@pytest.mark.slow  # it guards against what XLA's optimisations do to the rounding of a large network
def test_compiled_gradients_are_finite_behind_a_pool():
    # Of this size XLA computed what a pool sees twice, rounded it differently, and no entry was its window's maximum.
    model = parse("cnn3:16,32,64", input_shape=(32, 32, 3), num_outputs=10)
    mean = jax.jit(lambda key: model.init(key, (32, 32, 3)))(jax.random.key(0))
    images = np.random.default_rng(1).standard_normal((50, 32, 32, 3), np.float32)

    @jax.jit
    def slopes(weights, rho, x):
        def loss(weights, sd):
            return jnp.sum(jnp.square(noisy.apply(model, Params(weights, mean.stats), sd, x, jax.random.key(2))[0]))

        return jax.grad(loss, argnums=(0, 1))(weights, jax.tree.map(jax.nn.softplus, rho))

    rho = jax.tree.map(lambda leaf: np.full(leaf.shape, -4.0, np.float32), mean.weights)
    for slope in jax.tree.leaves(slopes(mean.weights, rho, images)):
        assert np.isfinite(slope).all()
