import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.models import CNN, MLP, Factor, Head, Intercept, Linen, Model, Params, Reddi, WithScale, default, parse


def make_linen(num_outputs):
    return MLP((4,), num_outputs)


def make_fixed():
    return MLP((4,), 7)


def takes_too_much(width, depth):
    return MLP((width,) * depth, 3)


def make_equinox(num_outputs, key):
    return eqx.nn.MLP(6, num_outputs, 4, 1, key=key)


class Fieldless(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(x)


READY = MLP((4,), 9)


def num_outputs_of(model, input_shape=(6,)):
    def outputs(key):
        return model.apply(model.init(key, input_shape), jnp.zeros((1, *input_shape)))[0]

    return jax.eval_shape(outputs, jax.random.key(0)).shape[-1]


def test_statistics_default_to_none_of_their_own():
    first, second = Params({}), Params({})
    assert first.stats == {}
    assert first.stats is not second.stats


@pytest.mark.parametrize(
    ("pattern", "path", "inside"),
    [
        ("Dense_1", "Dense_1/kernel", True),
        ("Dense_1", "Dense_1", True),
        ("Dense_1", "Dense_10/kernel", False),
        ("Dense_1", "body/Dense_1/kernel", False),
        ("Dense_[12]", "Dense_2/bias", True),
        (".*/kernel", "body/Dense_1/kernel", True),
        ("log_scale|Dense_1", "log_scale", True),
        ("log_scale|Dense_1", "Dense_1/bias", True),
        ("log_scale|Dense_1", "Dense_11/bias", False),
        ("", "anything/at/all", True),
    ],
)
def test_a_head_matches_whole_leading_components(pattern, path, inside):
    assert Head(pattern)(path) is inside


def test_a_head_is_hashable_and_equal_by_value():
    assert {Head("Dense_1"), Head("Dense_1")} == {Head("Dense_1")}


def test_a_bad_expression_is_refused():
    with pytest.raises(UsageError, match="not a regular expression"):
        Head("Dense_(")


@pytest.mark.parametrize(
    ("spec", "module"),
    [
        ("linear", MLP((), 10)),
        ("mlp", MLP((256,), 10)),
        ("mlp:64", MLP((64,), 10)),
        ("mlp:256,128", MLP((256, 128), 10)),
        ("cnn", CNN(10)),
        ("cnn:8,16", CNN(10, (8, 16))),
        ("reddi", Reddi(10)),
        ("reddi:8,pool,16,32", Reddi(10, (8, "pool", 16), 32)),
        ("intercept", Intercept(10)),
        ("factor:2", Factor(2, 10)),
    ],
)
def test_a_spec_names_a_network(spec, module):
    assert parse(spec, input_shape=(28, 28, 1), num_outputs=10) == Linen(module)


@pytest.mark.parametrize(
    ("name", "num_outputs"),
    [("make_linen", 3), ("make_fixed", 7), ("make_equinox", 3), ("Fieldless", 5), ("READY", 9)],
)
def test_a_factory_is_imported_and_told_the_number_of_outputs_if_it_asks(name, num_outputs):
    assert num_outputs_of(parse(f"{__name__}:{name}", input_shape=(6,), num_outputs=3)) == num_outputs


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("transformer", "'transformer' is unknown; choose linear"),
        ("", "is unknown"),
        ("linear:3", "is unknown"),
        ("intercept:3", "is unknown"),
        ("factor", "is unknown.*factor:RANK"),
        ("factor:0", "one positive whole number"),
        ("factor:2,3", "one positive whole number"),
        ("mlp:0", "positive whole numbers"),
        ("mlp:a", "positive whole numbers"),
        ("mlp:64,", "positive whole numbers"),
        ("cnn:x", "positive whole numbers"),
        ("reddi:8", "width of its dense"),
        ("reddi:8,16,pool", "width of its dense"),
        ("reddi:8,x,16", "width of its dense"),
        ("reddi:8,0,16", "positive whole numbers"),
        ("nowhere.module:factory", "cannot be imported .ModuleNotFoundError"),
        (f"{__name__}:absent", "cannot be imported .AttributeError"),
        (f"{__name__}:takes_too_much", "cannot be built .TypeError"),
    ],
)
def test_a_bad_spec_ends_in_one_sentence(spec, sentence):
    with pytest.raises(UsageError, match=sentence):
        parse(spec, input_shape=(28, 28, 1), num_outputs=10)


@pytest.mark.parametrize("input_shape", [(12,), (3, 28, 1)])
def test_a_cnn_needs_an_image(input_shape):
    with pytest.raises(UsageError, match="needs images of at least 4 by 4"):
        parse("cnn", input_shape=input_shape, num_outputs=10)


@pytest.mark.parametrize(
    ("input_shape", "num_outputs", "module"),
    [
        ((28, 28, 1), 10, CNN(10)),
        ((28, 28), 10, CNN(10)),
        ((8, 8), 10, MLP((64,), 10)),
        ((8, 8, 3), 10, MLP((256,), 10)),
        ((13,), 2, MLP((64,), 2)),
        ((784,), 10, MLP((256,), 10)),
        ((3,), 1, MLP((), 1)),
        ((), 1, MLP((), 1)),
        ((100,), 1, MLP((256,), 1)),
    ],
)
def test_the_default_suits_the_shape(input_shape, num_outputs, module):
    assert default(input_shape, num_outputs) == Linen(module)


def test_reddis_network_is_that_of_the_literature():
    """1 206 590 parameters with 62 outputs (Reddi et al. 2021, table 4), of which the embedding has 1 198 592."""
    weights = jax.eval_shape(
        lambda: parse("reddi", input_shape=(28, 28), num_outputs=62).init(jax.random.key(0), (28, 28))
    )
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(layer)) for name, layer in weights.weights.items()}
    assert sum(sizes.values()) == 1_206_590
    assert sum(sizes.values()) - sizes["Dense_1"] == 1_198_592


def test_reddis_network_drops_units_in_training_alone():
    model, x = Linen(Reddi(3, (2,), 64)), np.random.default_rng(1).standard_normal((4, 8, 8, 1), np.float32)
    params = jax.jit(lambda key: model.init(key, (8, 8, 1)))(jax.random.key(0))
    apply = jax.jit(lambda key: model.apply(params, x, key=key)[0])
    outputs = [apply(key) for key in (None, None, jax.random.key(2), jax.random.key(3))]
    assert np.array_equal(outputs[0], outputs[1])
    assert not np.allclose(outputs[0], outputs[2])
    assert not np.allclose(outputs[2], outputs[3])


@pytest.mark.parametrize("stages", [(4,), (4, 4), (4, "pool", 4), (2, 2, "pool", 2, 2, 2)])
def test_reddis_network_says_how_small_an_image_may_be(stages):
    side = Reddi.smallest(stages)
    spec = f"reddi:{','.join(map(str, stages))},5"
    assert num_outputs_of(parse(spec, input_shape=(side, side, 1), num_outputs=3), (side, side, 1)) == 3
    with pytest.raises(UsageError, match=f"at least {side} by {side}"):
        parse(spec, input_shape=(side - 1, side, 1), num_outputs=3)


def test_the_cnn_is_the_network_of_the_literature():
    weights = jax.eval_shape(lambda key: Linen(CNN(10)).init(key, (28, 28, 1)), jax.random.key(0)).weights
    shapes = {name: layer["kernel"].shape for name, layer in weights.items()}
    assert shapes == {
        "Conv_0": (5, 5, 1, 32),
        "Conv_1": (5, 5, 32, 64),
        "Dense_0": (7 * 7 * 64, 128),
        "Dense_1": (128, 10),
    }


def test_an_image_without_a_channel_axis_gets_one():
    model, x = Linen(CNN(3, (2, 2), 4)), np.ones((2, 8, 8), np.float32)
    outputs = jax.jit(lambda key: model.apply(model.init(key, (8, 8)), x)[0])(jax.random.key(0))
    assert outputs.shape == (2, 3)


@pytest.mark.parametrize("input_shape", [(3,), (1,), (4, 4, 1)])
def test_an_intercept_is_the_same_for_every_input(input_shape):
    model = Linen(Intercept(2))
    params = jax.eval_shape(lambda key: model.init(key, input_shape), jax.random.key(0))
    assert jax.tree.map(jnp.shape, params.weights) == {"intercept": (2,)}
    x = np.random.default_rng(1).standard_normal((5, *input_shape), np.float32)
    outputs, _ = jax.jit(model.apply)(Params({"intercept": np.float32([1.5, -2.0])}), x)
    np.testing.assert_array_equal(outputs, np.tile(np.float32([1.5, -2.0]), (5, 1)))


@pytest.mark.parametrize("model", [Linen(Intercept(1)), WithScale(Linen(Intercept(1)))], ids=["known", "learned"])
def test_an_intercept_is_all_head(model):
    head = Head(model.last_layer((1,)))
    weights = jax.eval_shape(lambda key: model.init(key, (1,)), jax.random.key(0)).weights
    assert weights
    assert all(head(name) for name in weights)


def test_a_factor_model_is_a_product_of_two_matrices():
    model = Linen(Factor(2, 1))
    weights = jax.jit(lambda key: model.init(key, (20,)))(jax.random.key(0)).weights
    assert jax.tree.map(jnp.shape, weights) == {"Dense_0": {"kernel": (20, 2)}, "Dense_1": {"kernel": (2, 1)}}
    x = np.random.default_rng(1).standard_normal((5, 20), np.float32)
    outputs, _ = jax.jit(model.apply)(Params(weights), x)
    first, second = (np.asarray(weights[name]["kernel"]) for name in ("Dense_0", "Dense_1"))
    np.testing.assert_allclose(outputs, x @ (first @ second), atol=1e-5)
    assert model.last_layer((20,)) == "Dense_1"


def test_a_linen_adapter_is_a_model():
    assert isinstance(Linen(MLP((), 1)), Model)
