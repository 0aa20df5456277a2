"""FedRep: head under a fixed body, then body under the new head."""

import jax
import jax.numpy as jnp
import numpy as np

from priory import FedAvg, FedRep, Optimiser, Work
from priory.core import rng, trees
from priory.core.struct import replace
from priory.models.model import Head, Params
from tests.methods.problems import constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import distance, init_client, init_server, personalised, updated


def test_head_and_body_are_fitted_in_turn():
    """On ½(y − body − head)² one pass of one batch moves each by its own gradient step."""
    task, data = quadratic_task(), constant_shards(4.0).of(jnp.int32(0))
    method = FedRep(optimiser=Optimiser(step_size=0.5), work=Work(batch_size=4), head_epochs=1)
    down = Params({"body": jnp.float32(1.0), "head": None})
    head, message, _ = updated(method, task, down, {"body": None, "head": jnp.float32(0)}, data, rng.root(0))
    np.testing.assert_allclose(float(head["head"]), 0.5 * (4 - 1), atol=1e-6)
    np.testing.assert_allclose(float(message.payload.weights["body"]), 1 + 0.5 * (4 - 1 - 1.5), atol=1e-6)


def test_personalising_fits_the_head_only():
    task, data = tiny_task(), tiny_shards().of(jnp.int32(0))
    method = FedRep(work=Work(batch_size=3), head_epochs=2)
    down = init_server(method, task, rng.root(0))
    head = init_client(method, task, down, rng.root(1))
    posterior = personalised(method, task, down, head, data, rng.root(2))
    new_head, body = trees.partition(posterior.weights, task.is_head)
    jax.tree.map(np.testing.assert_array_equal, body, down.weights)
    assert distance(new_head, head) > 0
    jax.tree.map(np.testing.assert_array_equal, posterior.stats, down.stats)


def test_an_empty_head_is_fedavg():
    task = replace(tiny_task(), is_head=Head("nothing"))
    data = tiny_shards().of(jnp.int32(0))
    work = Work(epochs=1, batch_size=3)
    rep, avg = FedRep(work=work, head_epochs=0), FedAvg(work=work)
    down = init_server(rep, task, rng.root(0))
    head = init_client(rep, task, down, rng.root(1))
    key_body = jax.random.split(rng.root(2))[1]
    _, sent, _ = updated(rep, task, down, head, data, rng.root(2))
    _, plain, _ = updated(avg, task, down, (), data, key_body)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sent.payload, plain.payload)
