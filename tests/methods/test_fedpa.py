"""FedPA: the recursion against a dense solve, the two limits that are FedAvg, and the samples themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedAvg, FedPA, Optimiser, UsageError, Work
from priory.core import rng
from priory.core.struct import replace
from priory.fed.method import Message
from priory.methods.fedpa import Down, delta_of
from priory.models.model import Params
from tests.methods.problems import constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, broadcast, init_server, parameters, updated

delta = jax.jit(delta_of)
SGD = Optimiser(step_size=0.05, momentum=0.9)


def tree_of(vectors):
    """Vectors of six numbers as trees of a matrix, a vector and a number."""
    return {"a": vectors[..., :4].reshape(*vectors.shape[:-1], 2, 2), "b": vectors[..., 4:5], "c": vectors[..., 5]}


def vector_of(tree):
    return np.concatenate([np.ravel(tree[name]) for name in ("a", "b", "c")])


def dense(centre, samples, rho):
    """Σ̂⁻¹(centre − mean) as it is written, in float64."""
    num, dim = samples.shape
    share = 1 / (1 + (num - 1) * rho)
    covariance = np.cov(samples, rowvar=False) if num > 1 else np.zeros((dim, dim))
    return np.linalg.solve(share * np.eye(dim) + (1 - share) * covariance, centre - samples.mean(axis=0))


@pytest.mark.parametrize("num", [1, 2, 3, 9])
@pytest.mark.parametrize("rho", [0.0, 0.01, 3.0])
def test_the_recursion_solves_the_linear_system(num, rho):
    draw = np.random.default_rng(num)
    centre, samples = draw.normal(size=6), draw.normal(size=(num, 6))
    found = delta(tree_of(np.float32(centre)), tree_of(np.float32(samples)), rho)
    np.testing.assert_allclose(vector_of(found), dense(centre, samples, rho), rtol=2e-5, atol=2e-5)


def test_without_shrinkage_delta_is_the_distance_from_the_mean_of_the_samples():
    draw = np.random.default_rng(0)
    centre, samples = draw.normal(size=6), draw.normal(size=(5, 6))
    found = delta(tree_of(np.float32(centre)), tree_of(np.float32(samples)), 0.0)
    np.testing.assert_allclose(vector_of(found), centre - samples.mean(axis=0), atol=1e-6)


def test_delta_is_bounded_by_the_distance_from_the_mean():
    draw = np.random.default_rng(0)
    samples, rho = 100 * draw.normal(size=(4, 6)), 0.5
    found = delta(tree_of(np.zeros(6, np.float32)), tree_of(np.float32(samples)), rho)
    assert np.linalg.norm(vector_of(found)) <= (1 + 3 * rho) * np.linalg.norm(samples.mean(axis=0))


def sent(method, batch_size, sampling=True):
    task, data = tiny_task(), tiny_shards().of(jnp.int32(0))
    down = parameters(task, rng.root(0))
    if isinstance(method, FedPA):
        down = Down(down, jnp.bool_(sampling))
    method = replace(method, work=Work(epochs=3, batch_size=batch_size), optimiser=SGD)
    return updated(method, task, down, (), data, rng.root(1))[1].payload


def test_one_sample_of_one_iterate_is_fedavg():
    whole = 7  # all examples of the client in one minibatch
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sent(FedPA(burn_in=2), whole), sent(FedAvg(), whole)
    )


def test_clients_that_do_not_sample_yet_are_fedavg():
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        sent(FedPA(burn_in=0), 3, sampling=False),
        sent(FedAvg(), 3),
    )


def test_a_sample_is_the_mean_of_the_iterates_of_its_epoch():
    """On a quadratic the iterates are known: body + head runs to the centre by a factor of 1 − 2η a step."""
    centre, eta, steps, epochs, burn_in = 3.0, 0.1, 2, 4, 1
    method = FedPA(shrinkage=0.0, burn_in=burn_in, optimiser=Optimiser(step_size=eta), work=Work(epochs, None, 2))
    down = Down(Params({"body": jnp.float32(0), "head": jnp.float32(0)}), jnp.bool_(True))
    _, message, info = updated(
        method, quadratic_task(), down, (), constant_shards(centre).of(jnp.int32(0)), rng.root(0)
    )
    path = centre * (1 - (1 - 2 * eta) ** np.arange(1, epochs * steps + 1))
    moved = path[burn_in * steps :].mean() / 2  # without shrinkage all samples count alike
    np.testing.assert_allclose(float(message.payload.weights["body"]), moved, atol=1e-6)
    np.testing.assert_allclose(float(info["drift"]), np.sqrt(2) * moved, atol=1e-6)


def test_the_covariance_of_the_samples_shortens_the_step_along_them():
    """All iterates of the quadratic lie on one line, so Δ is a number: d / (ρ_ℓ + (1 − ρ_ℓ) s²)."""
    centre, eta, epochs, rho = 3.0, 0.1, 3, 0.7
    method = FedPA(shrinkage=rho, burn_in=0, optimiser=Optimiser(step_size=eta), work=Work(epochs, None, 4))
    down = Down(Params({"body": jnp.float32(0), "head": jnp.float32(0)}), jnp.bool_(True))
    _, _, info = updated(method, quadratic_task(), down, (), constant_shards(centre).of(jnp.int32(0)), rng.root(0))
    line = centre * (1 - (1 - 2 * eta) ** np.arange(1, epochs + 1)) / np.sqrt(2)  # along (1, 1)/√2
    share = 1 / (1 + (epochs - 1) * rho)
    np.testing.assert_allclose(float(info["drift"]), line.mean() / (share + (1 - share) * line.var(ddof=1)), rtol=1e-5)


def test_the_server_steps_along_the_mean_delta_with_momentum():
    task, method = quadratic_task(), FedPA(server_step_size=0.5, server_momentum=0.8)
    server = init_server(method, task, rng.root(0))
    payload = Params({"body": jnp.array([1.0, 4.0]), "head": jnp.array([0.0, 0.0])})
    messages = Message(payload, jnp.array([2.0, 1.0]))
    once, _ = aggregated(method, task, server, messages, rng.root(0))
    np.testing.assert_allclose(float(once.weights["body"]), 0.5 * 2.0, atol=1e-6)  # the mean is (2·1 + 1·4)/3
    twice, _ = aggregated(method, task, once, messages, rng.root(0))
    np.testing.assert_allclose(float(twice.weights["body"]), 1.0 + 0.5 * (0.8 * 2.0 + 1.0), atol=1e-6)


def test_sampling_begins_after_the_rounds_of_fedavg():
    task, method = quadratic_task(), FedPA(fedavg_rounds=1)
    server = init_server(method, task, rng.root(0))
    assert not broadcast(method, server).sampling
    messages = Message(Params({"body": np.ones(1, np.float32), "head": np.ones(1, np.float32)}), np.ones(1, np.float32))
    absent = replace(messages, weight=np.zeros(1, np.float32))
    assert not broadcast(method, aggregated(method, task, server, absent, rng.root(0))[0]).sampling
    assert broadcast(method, aggregated(method, task, server, messages, rng.root(0))[0]).sampling


def test_a_client_without_examples_sends_what_it_got():
    task, method = tiny_task(), FedPA()
    down = Down(parameters(task, rng.root(0)), jnp.bool_(True))
    empty = tiny_shards((7, 0)).of(jnp.int32(1))
    _, message, _ = updated(method, task, down, (), empty, rng.root(1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), message.payload, down.params)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (FedPA(shrinkage=-0.1), "shrinkage=-0.1"),
        (FedPA(burn_in=-1), "burn-in=-1"),
        (FedPA(fedavg_rounds=-1), "fedavg-rounds=-1"),
        (FedPA(server_step_size=0.0), "server-step-size=0.0"),
        (FedPA(server_momentum=1.0), "server-momentum=1.0"),
        (FedPA(work=Work(epochs=1)), "epochs=1 leaves none to sample after burn-in=1"),
        (FedPA(work=Work(steps=3)), "steps=3"),
        (FedPA(finetune_epochs=-1), "finetune-epochs=-1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_hyper_parameter_ends_in_one_sentence(method, says):
    with pytest.raises(UsageError) as caught:
        method.check()
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")
