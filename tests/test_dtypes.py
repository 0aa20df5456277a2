"""Our own mathematics under strict dtype promotion. Not the whole suite: Optax's Adam itself promotes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import metrics
from priory.core import trees
from priory.engine.cohort import Participation, deal
from priory.fed import schedule, screen
from priory.fed.channel import Clip, Quantise, RandomK, TopK
from priory.fed.method import Message
from priory.models.likelihood import Categorical, Gaussian


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def whole_numbers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# Promotion is refused while a program is traced, so most of them need not run.


def test_trees_do_not_promote():
    def compute(tree, weight):
        mean = trees.weighted_mean(tree, weight, otherwise=jax.tree.map(lambda leaf: leaf[0], tree))
        size = trees.norm(trees.axpy(0.5, tree, trees.sub(tree, tree)))
        return mean, size, trees.select(trees.all_finite(tree), tree, tree)

    found = jax.eval_shape(compute, TREE, floats(2))
    assert found[2].keys() == TREE.keys()
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}


def test_scores_do_not_promote():
    def compute(logits, ones, y, labels, mask):
        log_probs = metrics.mixture_log_probs(logits, jnp.full((2, 4), -jnp.log(2.0)))
        first = metrics.tally_classification(log_probs, labels, mask)
        second = metrics.tally_regression(ones, ones, ones * -jnp.log(2.0), y, mask)
        return metrics.add(first, metrics.zero(metrics.Tally)).count, second.count

    ones = np.ones((2, 4), np.float32)
    arguments = np.zeros((2, 4, 3), np.float32), ones, ones[0], np.zeros(4, np.int32), ones[0]
    assert [float(count) for count in jax.jit(compute)(*arguments)] == [4, 4]


def test_likelihoods_do_not_promote():
    categorical = jax.eval_shape(Categorical(3).log_prob, floats(4, 3), whole_numbers(4))
    assert categorical.dtype == jax.eval_shape(Gaussian(0.5).log_prob, floats(4, 1), floats(4)).dtype == jnp.float32


def test_participation_and_schedules_do_not_promote():
    def dealt(key):
        return deal(Participation(100, 5, 5).draw(key), jnp.arange(100), 6, 2).ids

    assert jax.eval_shape(dealt, jax.random.key(0)).shape == (6,)
    for text in ("step-size=step:0.1@0.5,0.75", "mu=cosine:0.1", "mu=linear"):
        assert schedule.parse(text).at(jnp.int32(3), 10).dtype == jnp.float32


def test_channels_and_screening_do_not_promote():
    def compute(channel, tree, key):
        sent, _, bits = channel.send(tree, channel.init(tree), key)
        message = Message(sent, jnp.float32(1))
        return screen.silence(message, screen.usable(message, tree, screen.Limits())).weight, bits

    for channel in (Clip(0.5), TopK(0.5), RandomK(0.5), Quantise(4)):
        weight, bits = jax.jit(compute)(channel, TREE, jax.random.key(1))
        assert weight == 1
        assert bits.dtype == jnp.float32
