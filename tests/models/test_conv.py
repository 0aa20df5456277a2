import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from priory.models import CNN, Categorical, Linen, Params, as_model, conv

# Window, strides, padding, dilation, groups. Inputs are 9 by 8 pixels with 4 channels.
CASES = {
    "plain": ((3, 3), (1, 1), "SAME", (1, 1), 1),
    "valid": ((3, 2), (1, 1), "VALID", (1, 1), 1),
    "one tap": ((1, 1), (1, 1), "SAME", (1, 1), 1),
    "strided": ((3, 3), (2, 2), "SAME", (1, 1), 1),
    "strided columns": ((3, 3), (1, 2), "SAME", (1, 1), 1),
    "stride beyond the window": ((2, 1), (3, 2), "VALID", (1, 1), 1),
    "dilated": ((3, 2), (1, 1), "SAME", (2, 3), 1),
    "dilated and strided": ((3, 3), (2, 1), "VALID", (2, 1), 1),
    "uneven padding": ((3, 3), (1, 1), ((0, 3), (2, 1)), (1, 1), 1),
    "wide padding": ((2, 2), (1, 1), ((4, 4), (5, 3)), (1, 1), 1),
    "padding that cuts": ((3, 3), (1, 1), ((-1, 2), (1, -2)), (1, 1), 1),
    "two groups": ((3, 3), (1, 1), "SAME", (1, 1), 2),
    "depthwise": ((3, 3), (2, 1), "SAME", (1, 2), 4),
}


def reference(x, kernel, strides, padding, dilation, groups):
    layout = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}[x.ndim - 2]
    return lax.conv_general_dilated(
        x, kernel, strides, padding, rhs_dilation=dilation, dimension_numbers=layout, feature_group_count=groups
    )


def normal(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def assert_values_and_gradients(x, kernel, *settings):
    """What `convolve` computes is what lax computes; one program for both."""

    def value_and_gradients(convolution, x, kernel):
        def run(x, kernel):
            out = convolution(x, kernel, *settings)
            return (jnp.sin(out)).sum(), out  # a loss whose gradient differs from place to place

        return jax.grad(run, (0, 1), has_aux=True)(x, kernel)

    assert_same(*jax.jit(lambda *args: [value_and_gradients(f, *args) for f in (conv.convolve, reference)])(x, kernel))


def assert_same(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5, rtol=5e-5), ours, theirs)


@pytest.mark.parametrize("features", [4, 16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_lax(case, features):
    window, *settings, groups = case
    kernel = normal(1, (*window, 4 // groups, features))
    assert_values_and_gradients(normal(0, (2, 9, 8, 4)), kernel, *settings, groups)


def test_both_arrangements_are_taken_by_the_cases_above():
    axes = (conv._Axis(3, 1, 1, 1, 9),) * 2
    x = np.zeros((2, 9, 9, 4), np.float32)
    assert conv._half_is_narrower(x, np.zeros((3, 3, 4, 4), np.float32), axes)
    assert not conv._half_is_narrower(x, np.zeros((3, 3, 4, 16), np.float32), axes)


@pytest.mark.parametrize("space", [(11,), (4, 5, 6)], ids=["one axis", "three axes"])
def test_other_numbers_of_axes_work_too(space):
    settings = ((1,) * len(space), "SAME", (1,) * len(space), 1)
    assert_values_and_gradients(normal(0, (2, *space, 6)), normal(1, (*(3,) * len(space), 6, 2)) / 3, *settings)


def test_forward_mode_agrees_with_lax():
    x, dx = normal(0, (2, 1, 6, 6, 4))
    kernel, dkernel = normal(1, (2, 3, 3, 4, 2))

    @jax.jit
    def forward(primals, tangents):
        settings = ((1, 1), "SAME", (1, 1), 1)
        return [jax.jvp(lambda x, k, f=f: f(x, k, *settings), primals, tangents) for f in (conv.convolve, reference)]

    assert_same(*forward((x, kernel), (dx, dkernel)))


def test_a_window_larger_than_the_input_gives_no_outputs():
    x, kernel = np.ones((2, 3, 8, 4), np.float32), np.ones((5, 5, 4, 2), np.float32)
    out = jax.jit(lambda x, kernel: conv.convolve(x, kernel, (1, 1), "VALID", (1, 1)))(x, kernel)
    assert out.shape == (2, 0, 4, 2)


@pytest.mark.parametrize("shape", [(2, 6, 8, 3), (2, 7, 5, 3)], ids=["even", "odd"])
def test_halving_is_max_pooling(shape):
    @jax.jit
    def both(x):
        ours = jax.value_and_grad(lambda x: jnp.sin(conv.halve(x)).sum())(x)
        return ours, jax.value_and_grad(lambda x: jnp.sin(nn.max_pool(x, (2, 2), (2, 2))).sum())(x)

    assert_same(*both(normal(0, shape)))


gradient_of_pool = jax.jit(jax.grad(lambda x: conv.halve(x).sum()))


@pytest.mark.parametrize(
    "window",
    [(1, 1, 1, 1), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 1), (1, 1, 1, 0), (0, 0, 2, 0)],
    ids=str,
)
def test_ties_in_a_pool_share_the_gradient(window):
    x = np.float32(window).reshape(1, 2, 2, 1)
    chosen = x == max(window)
    np.testing.assert_allclose(gradient_of_pool(x), chosen / chosen.sum(), rtol=1e-6)


class Everything(nn.Module):
    """Padding modes, a mask, no bias, and a batch without its axis: all that Flax does around a convolution."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), padding="CIRCULAR")(x)
        x = nn.Conv(4, (3, 3), padding="REFLECT", use_bias=False, feature_group_count=2)(x)
        x = nn.Conv(4, 3, padding="CAUSAL")(x)
        x = nn.Conv(2, (3, 3), mask=jnp.eye(3)[:, :, None, None] * jnp.ones((1, 1, 4, 2)), strides=2)(x)
        return x.reshape(x.shape[0], -1)


def test_a_linen_network_computes_what_flax_computes():
    module = Everything()

    @jax.jit
    def both(x, key):
        params = Linen(module).init(key, (6, 6, 3))
        return Linen(module).apply(params, x)[0], module.apply({"params": params.weights}, x)

    ours, theirs = both(normal(0, (2, 6, 6, 3)), jax.random.key(1))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def training_step(model, input_shape):
    def step(params, x, y, key):
        def loss(weights):
            outputs, stats = model.apply(Params(weights, params.stats), x, key=key)
            return -Categorical(3).log_prob(outputs, y).mean(), stats

        return jax.grad(loss, has_aux=True)(params.weights)

    params = jax.eval_shape(lambda key: model.init(key, input_shape), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((4, *input_shape), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    return str(jax.make_jaxpr(step)(params, *batch, jax.random.key(0)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.convolution = nnx.Conv(1, 2, (3, 3), rngs=rngs)
        self.out = nnx.Linear(128, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.convolution(x).reshape(x.shape[0], -1))


@pytest.mark.parametrize("network", [CNN(3, (2, 4), 8), NnxNet], ids=["Linen", "NNX"])
def test_a_training_step_on_a_cpu_holds_no_convolution(network):
    step = training_step(as_model(network), (8, 8, 1))
    assert "dot_general" in step
    assert "conv_general_dilated" not in step
    assert "reduce_window" not in step


def test_an_accelerator_keeps_its_convolution(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "conv_general_dilated" in training_step(Linen(CNN(3, (2, 4), 8)), (8, 8, 1))


class Odd(nn.Module):
    layer: nn.Module

    def __call__(self, x):
        return self.layer(x).reshape(x.shape[0], -1)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv(2, (3, 3), padding=1, input_dilation=2), "layer .* input_dilation"),
        (nn.ConvTranspose(2, (3, 3)), "layer .* ConvTranspose"),
        (nn.ConvLocal(2, (3, 3)), "layer .* ConvLocal"),
    ],
    ids=["input dilation", "transposed", "local"],
)
def test_a_convolution_without_a_fast_form_says_so_and_still_runs(layer, reason):
    model = Linen(Odd(layer))
    with pytest.warns(conv.SlowConvolutionWarning, match=reason):
        params = jax.jit(lambda key: model.init(key, (4, 4, 1)))(jax.random.key(0))

    @jax.jit
    def both(params, x):
        return model.apply(params, x)[0], Odd(layer).apply({"params": params.weights}, x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", conv.SlowConvolutionWarning)
        ours, theirs = both(params, normal(1, (2, 4, 4, 1)))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_users_own_convolution_is_left_alone():
    def zero(lhs, rhs, *args, **kwargs):
        return jnp.zeros((*lhs.shape[:-1], rhs.shape[-1]))

    model = Linen(Odd(nn.Conv(2, (3, 3), conv_general_dilated=zero)))
    x = np.ones((1, 4, 4, 1), np.float32)
    outputs = jax.jit(lambda key: model.apply(model.init(key, (4, 4, 1)), x)[0])(jax.random.key(0))
    assert not np.any(outputs)


def test_an_interceptor_outside_sees_and_may_replace_every_convolution():
    model, seen = Linen(CNN(3, (2, 4), 8)), []
    params = jax.jit(lambda key: model.init(key, (8, 8, 1)))(jax.random.key(0))
    x = np.ones((2, 8, 8, 1), np.float32)

    def outer(next_fun, args, kwargs, context):
        if isinstance(context.module, nn.Conv):
            seen.append(context.module.path)
            if context.module.path == ("Conv_1",):
                return jnp.zeros((*args[0].shape[:-1], 4))
        return next_fun(*args, **kwargs)

    @jax.jit
    def both(params, x):
        with nn.intercept_methods(outer):
            replaced, _ = model.apply(params, x)
        return replaced, model.apply(params, x)[0]

    replaced, outputs = both(params, x)
    assert seen == [("Conv_0",), ("Conv_1",)]
    np.testing.assert_allclose(replaced[0], replaced[1])
    assert not np.allclose(replaced, outputs)
