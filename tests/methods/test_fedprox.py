"""FedProx: the closed form of eq. (2) on a quadratic, and its limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedAvg, FedHBNIW, FedProx, Optimiser, Work
from priory.core import rng
from priory.models.model import Params
from tests.methods import verbs
from tests.methods.problems import constant_shards, plain_task, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import parameters, updated


@pytest.mark.parametrize("proximal", ["implicit", "explicit"])
def test_local_optimum_on_a_quadratic_lies_between_data_and_global_weights(proximal):
    centre, start, mu = 3.0, 1.0, 0.5
    down = Params({"body": jnp.float32(start), "head": jnp.float32(0)})
    method = FedProx(mu=mu, proximal=proximal, optimiser=Optimiser(step_size=0.2), work=Work(steps=200))
    data = constant_shards(centre).of(jnp.int32(0))
    _, message, info = updated(method, quadratic_task(), down, (), data, rng.root(0))
    # Body and head move alike by d: the minimum of ½(centre − start − 2d)² + ½μ·2d².
    moved = (centre - start) / (2 + mu)
    np.testing.assert_allclose(float(message.payload.weights["body"]), start + moved, atol=1e-5)
    np.testing.assert_allclose(float(info["drift"]), np.sqrt(2) * moved, atol=1e-5)


def test_no_pull_is_fedavg():
    task, data = tiny_task(), tiny_shards().of(jnp.int32(0))
    down = parameters(task, rng.root(0))
    work, optimiser = Work(epochs=2, batch_size=3), Optimiser(step_size=0.05, momentum=0.9)
    sent = [
        updated(method, task, down, (), data, rng.root(1))[1].payload
        for method in (FedProx(mu=0.0, optimiser=optimiser, work=work), FedAvg(optimiser=optimiser, work=work))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *sent)


def test_fedhb_sends_the_same_weights_at_the_same_pull():
    """Both use one solver, so that a difference between them in a table is one of their priors."""
    task, data = plain_task(), tiny_shards().of(jnp.int32(0))
    optimiser, work = Optimiser(step_size=0.1, momentum=0.9), Work(epochs=2, batch_size=3)
    fedhb = FedHBNIW(keep=1.0, optimiser=optimiser, work=work)
    down = verbs.init_server(fedhb, task, rng.root(0))
    (mu,) = {float(leaf.ravel()[0]) for leaf in jax.tree.leaves(fedhb._strength(task, down, data))}
    fedprox = FedProx(mu=mu, optimiser=optimiser, work=work)
    _, theirs, _ = updated(fedhb, task, down, (), data, rng.root(1))
    _, ours, _ = updated(fedprox, task, Params(down.mean, down.stats), (), data, rng.root(1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours.payload, theirs.payload)


def test_an_endless_pull_under_momentum_keeps_the_global_weights():
    task, data = quadratic_task(), constant_shards(3.0).of(jnp.int32(0))
    down = Params({"body": jnp.float32(1), "head": jnp.float32(0)})
    method = FedProx(mu=1e6, optimiser=Optimiser(step_size=0.1, momentum=0.9), work=Work(steps=50))
    sent = updated(method, task, down, (), data, rng.root(0))[1].payload
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), sent, down)
