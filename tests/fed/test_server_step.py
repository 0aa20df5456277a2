import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core import rng
from priory.fed import robust
from priory.fed.method import Message
from priory.fed.privacy import NoisedSum
from priory.fed.server_step import server_step
from priory.fed.visit import RoundContext
from priory.methods.fedavg import FedAvg
from priory.models.model import Params
from tests.methods.problems import aligned_task

TASK = aligned_task()
SERVER = jax.jit(TASK.init)(rng.root(4))


@jax.jit
def context_with(channel):
    return RoundContext(FedAvg(), TASK, channel, SERVER, rng.root(3), jnp.int32(0))


def shifted(*shifts, weights=None):
    """Messages whose weights are those of the server plus a shift each."""
    networks = [Params(jax.tree.map(lambda leaf, s=s: leaf + s, SERVER.weights), SERVER.stats) for s in shifts]
    payload = jax.tree.map(lambda *leaves: np.stack(leaves), *networks)
    return Message(payload, jnp.asarray(weights or [1.0] * len(shifts)), jnp.arange(len(shifts)))


def stepped(received, channel=None, rule=None):
    after, _, discarded = jax.jit(server_step, static_argnames="rule")(
        context_with(channel), SERVER, received, rng.root(5), rule=rule and robust.parse(rule)
    )
    return after, bool(discarded)


def assert_moved_by(after, shift):
    for new, old in zip(jax.tree.leaves(after.weights), jax.tree.leaves(SERVER.weights), strict=True):
        np.testing.assert_allclose(new - old, np.full_like(old, shift), atol=1e-6)


def test_the_server_is_the_weighted_mean_of_the_messages():
    after, discarded = stepped(shifted(0.0, 0.4, weights=[1.0, 3.0]))
    assert_moved_by(after, 0.3)
    assert not discarded


def test_a_rule_replaces_the_mean_by_its_centre():
    after, _ = stepped(shifted(0.1, 0.2, 50.0), rule="median")
    assert_moved_by(after, 0.2)


def test_a_noised_mean_of_differences_is_added_to_the_broadcast():
    difference = Params(jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.25), SERVER.weights), SERVER.stats)
    difference = Params(difference.weights, jax.tree.map(jnp.zeros_like, SERVER.stats))
    after, _ = stepped(difference, channel=NoisedSum(clip=1.0, sd=1.0, expected=4.0))
    assert_moved_by(after, 0.25)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_server_that_is_not_finite_is_replaced_by_the_old_one(bad):
    after, discarded = stepped(shifted(0.1, bad))
    assert_moved_by(after, 0.0)
    assert discarded
