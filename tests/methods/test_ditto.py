"""Ditto: the personal model between the client's optimum and the global weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import Ditto, FedAvg, Local, Optimiser, Work
from priory.core import rng
from priory.models.model import Params
from tests.methods.problems import constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import parameters, updated


@pytest.mark.parametrize("proximal", ["implicit", "explicit"])
@pytest.mark.parametrize("lam", [0.0, 0.5, 4.0])
def test_the_personal_optimum_is_pulled_to_the_global_weights(lam, proximal):
    centre, start = 3.0, 1.0
    down = Params({"body": jnp.float32(start), "head": jnp.float32(0)})
    method = Ditto(lam=lam, proximal=proximal, optimiser=Optimiser(step_size=0.1), work=Work(steps=300))
    personal, _, _ = updated(
        method, quadratic_task(), down, down, constant_shards(centre).of(jnp.int32(0)), rng.root(0)
    )
    np.testing.assert_allclose(float(personal.weights["body"]), start + (centre - start) / (2 + lam), atol=1e-4)


def test_no_pull_is_local_training_and_what_is_sent_is_fedavg():
    task, data = tiny_task(), tiny_shards().of(jnp.int32(0))
    down, mine = parameters(task, rng.root(0)), parameters(task, rng.root(1))
    work = Work(epochs=1, batch_size=3)
    key_global, key_personal = jax.random.split(rng.root(2))
    personal, sent, _ = updated(Ditto(lam=0.0, work=work), task, down, mine, data, rng.root(2))
    alone, _, _ = updated(Local(work=work), task, (), mine, data, key_personal)
    _, plain, _ = updated(FedAvg(work=work), task, down, (), data, key_global)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), personal, alone)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sent.payload, plain.payload)
