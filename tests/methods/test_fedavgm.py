"""FedAvgM, the method of `docs/adding-a-method.md`: its momentum by hand, and its way back to FedAvg."""

import jax
import numpy as np
import pytest

from priory import FedAvg, Optimiser, UsageError, Work, methods
from priory.core import rng
from priory.fed.method import Message
from priory.models.model import Params
from tests.methods.problems import FEDAVGM, a_round_of, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, broadcast, init_server

TASK, ROOT = quadratic_task(), rng.root(0)
FedAvgM = methods.load(FEDAVGM)


def sent(*bodies, counts):
    """The weights of clients with so many examples."""
    weights = {"body": np.array(bodies, np.float32), "head": np.zeros(len(bodies), np.float32)}
    return Message(Params(weights), np.array(counts, np.float32))


def test_two_rounds_of_momentum_by_hand():
    """w = 0; mean 2: Δ = −2, v = −2, w = 2. Then mean 3: Δ = −1, v = 0.5 · (−2) − 1 = −2, w = 4."""
    method = FedAvgM(beta=0.5)
    server = init_server(method, TASK, rng.root(0))
    server, _ = aggregated(method, TASK, server, sent(1.0, 5.0, counts=(3, 1)), rng.root(0))
    np.testing.assert_allclose([server.weights["body"], server.velocity["body"]], [2.0, -2.0], rtol=1e-6)
    server, _ = aggregated(method, TASK, server, sent(2.0, 6.0, counts=(3, 1)), rng.root(0))
    np.testing.assert_allclose([server.weights["body"], server.velocity["body"]], [4.0, -2.0], rtol=1e-6)
    assert float(server.weights["head"]) == 0.0, "what nobody moved stays"


def test_without_momentum_it_is_fedavg():
    task, shards = tiny_task(), tiny_shards()
    local = {"optimiser": Optimiser(step_size=0.05), "work": Work(epochs=2, batch_size=3)}
    with_momentum, plain = FedAvgM(beta=0.0, **local), FedAvg(**local)
    found = broadcast(with_momentum, aggregated(with_momentum, task, *a_round_of(with_momentum, task, shards), ROOT)[0])
    expected = aggregated(plain, task, *a_round_of(plain, task, shards), ROOT)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected)


@pytest.mark.parametrize("beta", [-0.1, 1.0, float("nan")])
def test_a_beta_outside_its_range_ends_in_one_sentence(beta):
    with pytest.raises(UsageError, match=rf"beta={beta} lies outside \[0, 1\)"):
        FedAvgM(beta=beta).check()
