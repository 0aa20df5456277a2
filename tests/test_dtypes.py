"""Our own mathematics under strict dtype promotion. Not the whole suite: Optax's Adam itself promotes."""

import jax
import jax.numpy as jnp
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


TREE = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2)}


def test_trees_do_not_promote():
    weight = jnp.array([1.0, 0.0])
    trees.weighted_mean(TREE, weight, otherwise=jax.tree.map(lambda leaf: leaf[0], TREE))
    trees.norm(trees.axpy(0.5, TREE, trees.sub(TREE, TREE)))
    assert trees.select(trees.all_finite(TREE), TREE, TREE).keys() == TREE.keys()


def test_scores_do_not_promote():
    logits, mask = jnp.zeros((2, 4, 3)), jnp.ones(4)
    log_probs = metrics.mixture_log_probs(logits, jnp.full((2, 4), -jnp.log(2.0)))
    first = metrics.tally_classification(log_probs, jnp.zeros(4, jnp.int32), mask)
    assert metrics.add(first, metrics.zero(metrics.Tally)).count == 4
    ones = jnp.ones((2, 4))
    assert metrics.tally_regression(ones, ones, ones * -jnp.log(2.0), jnp.ones(4), mask).count == 4


def test_likelihoods_do_not_promote():
    assert Categorical(3).log_prob(jnp.zeros((4, 3)), jnp.zeros(4, jnp.int32)).dtype == jnp.float32
    assert Gaussian(0.5).log_prob(jnp.zeros((4, 1)), jnp.zeros(4)).dtype == jnp.float32


def test_participation_and_schedules_do_not_promote():
    slots = Participation(100, 5, 5).draw(jax.random.key(0))
    assert deal(slots, jnp.arange(100), 6, 2).ids.shape == (6,)
    for text in ("step-size=step:0.1@0.5,0.75", "mu=cosine:0.1", "mu=linear"):
        assert schedule.parse(text).at(jnp.int32(3), 10).dtype == jnp.float32


def test_channels_and_screening_do_not_promote():
    for channel in (Clip(0.5), TopK(0.5), RandomK(0.5), Quantise(4)):
        sent, _, bits = channel.send(TREE, channel.init(TREE), jax.random.key(1))
        message = Message(sent, jnp.float32(1))
        assert screen.silence(message, screen.usable(message, TREE, screen.Limits())).weight == 1
        assert bits.dtype == jnp.float32
