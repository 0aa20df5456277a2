"""FedBABU: the head stays as it was drawn until a client is personalised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedBABU, Work
from priory.core import rng, trees
from tests.methods.problems import a_round_of, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, distance, init_server, personalised

TASK, SHARDS = tiny_task(), tiny_shards()
METHOD = FedBABU(work=Work(epochs=1, batch_size=3), finetune_epochs=1)


def test_the_head_neither_travels_up_nor_changes_on_the_server():
    server, messages = a_round_of(METHOD, TASK, SHARDS)
    head, body = trees.partition(server.weights, TASK.is_head)
    assert jax.tree.structure(messages.payload.weights) == jax.tree.structure(body)
    new, _ = aggregated(METHOD, TASK, server, messages, rng.root(0))
    new_head, new_body = trees.partition(new.weights, TASK.is_head)
    jax.tree.map(np.testing.assert_array_equal, new_head, head)
    assert distance(new_body, body) > 0


@pytest.mark.parametrize(("part", "moves"), [("head", False), ("all", True)])
def test_fine_tuning_the_head_leaves_the_body(part, moves):
    server = init_server(METHOD, TASK, rng.root(0))
    method = FedBABU(work=METHOD.work, finetune_epochs=1, finetune_part=part)
    tuned = personalised(method, TASK, server, (), SHARDS.of(jnp.int32(0)), rng.root(1))
    before, after = (trees.partition(params.weights, TASK.is_head) for params in (server, tuned))
    assert distance(after[0], before[0]) > 0
    assert (distance(after[1], before[1]) > 0) == moves
