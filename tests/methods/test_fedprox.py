"""FedProx: the closed form of eq. (2) on a quadratic, and its limit."""

import jax
import jax.numpy as jnp
import numpy as np

from priory import FedAvg, FedProx, Optimiser, Work
from priory.core import rng
from priory.models.model import Params
from tests.methods.problems import constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import parameters, updated


def test_local_optimum_on_a_quadratic_lies_between_data_and_global_weights():
    centre, start, mu = 3.0, 1.0, 0.5
    down = Params({"body": jnp.float32(start), "head": jnp.float32(0)})
    method = FedProx(mu=mu, optimiser=Optimiser(step_size=0.2), work=Work(steps=200))
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
