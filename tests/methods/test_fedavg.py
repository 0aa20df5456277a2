"""FedAvg on a quadratic, where local optimum, mean and fine-tuning are known."""

import jax.numpy as jnp
import numpy as np

from priory import FedAvg, Optimiser, Work
from priory.core import rng
from priory.fed.method import Message
from priory.models.model import Params
from tests.methods.problems import constant_shards, quadratic_task
from tests.methods.verbs import aggregated, distance, personalised, updated

TASK = quadratic_task()


def at(value: float) -> Params:
    return Params({"body": jnp.float32(value), "head": jnp.float32(0)})


def location(params: Params) -> float:
    return float(params.weights["body"] + params.weights["head"])


def test_a_client_ends_at_its_own_optimum():
    method = FedAvg(optimiser=Optimiser(step_size=0.2), work=Work(steps=60))
    _, message, _ = updated(method, TASK, at(1.0), (), constant_shards(3.0).of(jnp.int32(0)), rng.root(0))
    np.testing.assert_allclose(location(message.payload), 3.0, atol=1e-5)


def test_one_step_is_one_gradient_step():
    method = FedAvg(optimiser=Optimiser(step_size=0.25), work=Work(steps=1))
    _, message, _ = updated(method, TASK, at(1.0), (), constant_shards(3.0).of(jnp.int32(0)), rng.root(0))
    np.testing.assert_allclose(float(message.payload.weights["body"]), 1.0 + 0.25 * 2.0, atol=1e-6)


def test_the_server_weighs_clients_by_their_examples():
    shards = constant_shards(0.0, 3.0, counts=(2, 4))
    sent = [
        updated(FedAvg(work=Work(steps=200)), TASK, at(1.0), (), shards.of(jnp.int32(k)), rng.root(k))[1]
        for k in range(2)
    ]
    stacked = Message(
        Params({name: np.stack([m.payload.weights[name] for m in sent]) for name in ("body", "head")}),
        np.stack([m.weight for m in sent]),
    )
    server, _ = aggregated(FedAvg(), TASK, at(9.0), stacked, rng.root(0))
    np.testing.assert_allclose(location(server), (2 * 0.0 + 4 * 3.0) / 6, atol=1e-4)


def test_fine_tuning_uses_its_own_rate():
    data = constant_shards(3.0).of(jnp.int32(0))
    method = FedAvg(
        optimiser=Optimiser(step_size=99.0), work=Work(batch_size=4), finetune_epochs=1, finetune_step_size=0.25
    )
    tuned = personalised(method, TASK, at(1.0), (), data, rng.root(0))
    np.testing.assert_allclose(float(tuned.weights["body"]), 1.5, atol=1e-6)


def test_without_fine_tuning_the_personal_model_is_the_global_one():
    method = FedAvg(finetune_epochs=0)
    tuned = personalised(method, TASK, at(1.0), (), constant_shards(3.0).of(jnp.int32(0)), rng.root(0))
    assert distance(tuned.weights, at(1.0).weights) == 0.0
