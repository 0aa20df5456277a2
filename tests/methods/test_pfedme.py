"""pFedMe: personal weights as a proximal point, and global weights that follow them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import Optimiser, PFedMe, UsageError, Work
from priory.core import rng
from priory.fed.method import Message
from priory.models.model import Params
from tests.methods.problems import constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, distance, parameters, personalised, updated

CENTRE, START = 3.0, 1.0


def at(body: float) -> Params:
    return Params({"body": jnp.float32(body), "head": jnp.float32(0)})


def solved(lam: float, steps: int, eta: float = 0.1) -> PFedMe:
    """Subproblems solved to the end: their curvature is 2 + λ along (1, 1), and the pull needs no small step."""
    return PFedMe(lam=lam, eta=eta, inner_steps=300, optimiser=Optimiser(step_size=0.1), work=Work(steps=steps))


@pytest.mark.parametrize("lam", [0.5, 4.0, 100.0])
def test_the_personal_weights_are_the_proximal_point_of_the_global_ones(lam):
    data = constant_shards(CENTRE).of(jnp.int32(0))
    theta = personalised(solved(lam, steps=1), quadratic_task(), at(START), (), data, rng.root(0))
    # Body and head move alike by d: the minimum of ½(centre − start − 2d)² + ½λ·2d².
    np.testing.assert_allclose(theta.weights["body"], START + (CENTRE - START) / (2 + lam), atol=1e-5)


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_global_weights_descend_the_moreau_envelope(rounds):
    lam, eta = 4.0, 0.1
    data = constant_shards(CENTRE).of(jnp.int32(0))
    method = solved(lam, steps=rounds, eta=eta)
    _, message, _ = updated(method, quadratic_task(), at(START), (), data, rng.root(0))
    # w − θ = −gap/(2 + λ), so that a step on w shrinks the gap by 2ηλ/(2 + λ) of itself.
    gap = (CENTRE - START) * (1 - 2 * eta * lam / (2 + lam)) ** rounds
    np.testing.assert_allclose(message.payload.weights["body"], START + (CENTRE - START - gap) / 2, atol=1e-5)


def test_a_subproblem_starts_where_the_last_one_ended():
    """Without a pull on w (η = 0) R subproblems of K steps are one of R·K."""
    task, data = quadratic_task(), constant_shards(CENTRE).of(jnp.int32(0))
    optimiser = Optimiser(step_size=0.1, momentum=0.5)
    apart = PFedMe(eta=0.0, inner_steps=2, optimiser=optimiser, work=Work(steps=3))
    at_once = PFedMe(eta=0.0, inner_steps=6, optimiser=optimiser, work=Work(steps=1))
    thetas = [personalised(one, task, at(START), (), data, rng.root(0)).weights["body"] for one in (apart, at_once)]
    np.testing.assert_allclose(*thetas, atol=1e-6)


def test_no_pull_leaves_the_global_weights():
    task, data = tiny_task(), tiny_shards().of(jnp.int32(0))
    down = parameters(task, rng.root(0))
    method = PFedMe(lam=0.0, work=Work(epochs=2, batch_size=3))
    _, message, info = updated(method, task, down, (), data, rng.root(1))
    jax.tree.map(np.testing.assert_array_equal, message.payload.weights, down.weights)
    assert float(info["drift"]) > 0, "the personal weights are free to go"


def test_the_personal_model_is_that_of_a_round_from_the_broadcast():
    task, data = tiny_task(), tiny_shards().of(jnp.int32(0))
    down = parameters(task, rng.root(0))
    method = PFedMe(eta=1 / 15, work=Work(steps=1, batch_size=3))  # η·λ = 1: what is sent is θ itself
    _, message, _ = updated(method, task, down, (), data, rng.root(1))
    theta = personalised(method, task, down, (), data, rng.root(1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), theta, message.payload)
    assert distance(theta.weights, down.weights) > 1e-3


def test_the_server_goes_beta_of_the_way_to_the_mean():
    stack = Message(Params({"body": jnp.array([2.0, 6.0]), "head": np.zeros(2, np.float32)}), np.ones(2, np.float32))
    server, _ = aggregated(PFedMe(beta=0.5), quadratic_task(), at(1.0), stack, rng.root(0))
    np.testing.assert_allclose(server.weights["body"], 0.5 * 1.0 + 0.5 * 4.0)


def test_a_client_without_examples_is_absent_and_predicts_with_the_global_weights():
    task, data = quadratic_task(), constant_shards(CENTRE, 0.0, counts=(4, 0)).of(jnp.int32(1))
    _, message, _ = updated(PFedMe(), task, at(START), (), data, rng.root(0))
    assert float(message.weight) == 0
    theta = personalised(PFedMe(), task, at(START), (), data, rng.root(0))
    np.testing.assert_allclose(theta.weights["body"], START)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (PFedMe(lam=-1.0), "lam=-1.0"),
        (PFedMe(eta=float("nan")), "eta=nan"),
        (PFedMe(beta=-0.5), "beta=-0.5"),
        (PFedMe(inner_steps=0), "inner-steps=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_hyper_parameter_ends_in_one_sentence(method, says):
    with pytest.raises(UsageError, match=says):
        method.check()
