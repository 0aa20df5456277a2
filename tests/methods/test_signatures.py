"""The methods that strain the protocol most go through every verb.

FedBE's server runs the model on public inputs, SCAFFOLD's server and clients keep control variates, and kNN-Per's
posterior keeps the client's own examples.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from priory.core import rng
from priory.core.rng import Key
from priory.core.struct import replace
from priory.fed.method import Method, Predictive
from priory.methods import (
    fedbe,
    knn_per,
    scaffold,
)
from tests.methods.problems import tiny_shards, tiny_task


@pytest.mark.parametrize(
    "method", [fedbe.FedBE(), scaffold.Scaffold(), knn_per.KNNPer()], ids=lambda method: type(method).__name__
)
def test_the_strained_methods_go_through_every_verb(method: Method) -> None:
    task, shards = tiny_task(), tiny_shards()
    task = replace(task, public=jnp.ones((6, 5)))

    def life(key: Key) -> tuple[Any, Any, Predictive]:
        server = method.init_server(task, key)
        down = method.broadcast(server)
        client = method.init_client(task, down, rng.key(key, rng.Stream.ENROL))
        data = shards.of(jnp.int32(0))
        client, message, _ = method.client_update(task, down, client, data, rng.key(key, rng.Stream.CLIENT))
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), message)
        new, _ = method.aggregate(task, server, stack, rng.key(key, rng.Stream.SERVER))
        posterior = method.personalise(task, method.broadcast(new), client, data, rng.key(key, rng.Stream.COHORT))
        return server, new, method.predict(task, posterior, jnp.ones((2, 5)), rng.key(key, rng.Stream.EVALUATION))

    server, new, predictive = jax.eval_shape(life, rng.root(0))
    jax.tree.map(lambda before, after: None, server, new)  # raises unless the structures agree
    assert predictive.outputs.shape[1:] == (2, 3)
