"""FedBE: its two ways back to FedAvg, the distributions that it draws from, and the distillation in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedAvg, FedBE, Optimiser, UsageError, Work
from priory.core import rng
from priory.core.struct import replace
from priory.fed.method import Message
from priory.models.likelihood import Categorical
from priory.models.linen import Linen
from priory.models.model import Head, Params
from priory.models.nets import MLP
from tests.methods.problems import a_round_of, aligned_task, constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, init_server, parameters

PUBLIC = jnp.asarray(np.random.default_rng(4).normal(size=(6, 2)), jnp.float32)


def linear_task():
    """Softmax regression on two features, three classes, with six inputs known to all."""
    model = Linen(MLP((), 3))
    task = replace(tiny_task(), model=model, likelihood=Categorical(3), input_shape=(2,))
    return replace(task, is_head=Head(model.last_layer((2,))), public=PUBLIC)


def networks(num):
    """Different networks on axis 0, weights 1, 2, ..., and their senders."""
    drawn = [jax.tree.map(np.asarray, parameters(linear_task(), rng.root(k))) for k in range(num)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)
    return Message(stacked, np.arange(1, num + 1, dtype=np.float32), np.arange(num))


def averaged(share, payload):
    """The weighted mean of stacked networks."""
    return jax.tree.map(lambda leaf: np.tensordot(share, leaf, 1).astype(np.float32), payload)


target_of = jax.jit(lambda method, *arguments: method._target(*arguments))
distilled = jax.jit(lambda method, *arguments: method._distilled(*arguments))


@jax.jit
def gaussian_draws(method, mean, messages, keys):
    return jax.vmap(method._gaussian(mean, messages))(keys)


@jax.jit
def dirichlet_draws(method, mean, messages, keys):
    return jax.vmap(method._dirichlet(mean, messages))(keys)


def leaves(params):
    return {name: np.asarray(leaf) for name, leaf in next(iter(params.weights.values())).items()}


def logits(kernel, bias):
    return np.asarray(PUBLIC) @ kernel + bias


def softmax(values):
    return np.exp(values) / np.exp(values).sum(axis=-1, keepdims=True)


def assert_close(a, b, tolerance=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance), a, b)


def test_without_distillation_a_round_is_that_of_fedavg():
    task, shards = aligned_task(), tiny_shards()
    servers = []
    for method in (FedBE(distil_epochs=0, spread=0.0), FedAvg()):
        server, messages = a_round_of(method, task, shards)
        servers.append(aggregated(method, task, server, messages, rng.root(0))[0])
    assert_close(*servers)


def test_the_mean_on_a_quadratic_is_weighted_by_examples():
    task, shards = quadratic_task(), constant_shards(1.0, 4.0, counts=(6, 3))
    method = FedBE(distil_epochs=0, optimiser=Optimiser(step_size=0.2), work=Work(steps=100))
    server, messages = a_round_of(method, task, shards)
    mean = aggregated(method, task, server, messages, rng.root(0))[0]
    np.testing.assert_allclose(float(mean.weights["body"] + mean.weights["head"]), (6 * 1.0 + 3 * 4.0) / 9, atol=1e-5)


def test_clients_that_agree_have_nothing_to_distil():
    """The variance is 0 and every teacher is the student: at T = 1 the gradient vanishes and the mean stays."""
    messages = networks(3)
    same = jax.tree.map(lambda leaf: np.stack([leaf[0]] * 3), messages.payload)
    method = FedBE(temperature=1.0)
    server, info = aggregated(
        method,
        linear_task(),
        init_server(method, linear_task(), rng.root(1)),
        replace(messages, payload=same),
        rng.root(0),
    )
    assert_close(server, jax.tree.map(lambda leaf: np.asarray(leaf)[0], messages.payload))
    assert float(info["distil_loss"]) > 0  # the entropy of what they say


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_the_target_is_the_sharpened_mean_of_all_teachers(distribution):
    """With a spread of 0, or one network from which all mixtures are made, the teachers are known."""
    messages = networks(2)
    if distribution == "dirichlet":
        messages = replace(messages, weight=np.array([1.0, 0.0], np.float32))
    method = FedBE(distribution=distribution, samples=3, spread=0.0, temperature=0.5)
    task = linear_task()
    share = np.asarray(messages.weight) / float(messages.weight.sum())
    mean = averaged(share, messages.payload)
    found = target_of(method, task, mean, messages, rng.root(0))
    own = [softmax(logits(**leaves(jax.tree.map(lambda leaf, k=k: leaf[k], messages.payload)))) for k in range(2)]
    there = [p for p, weight in zip(own, messages.weight, strict=True) if weight > 0]
    average = np.mean([softmax(logits(**leaves(mean)))] * 4 + there, axis=0)
    np.testing.assert_allclose(found, average**2 / (average**2).sum(axis=-1, keepdims=True), atol=1e-6)


def test_gaussian_draws_have_the_weighted_moments_of_the_clients():
    messages, method, num = networks(3), FedBE(spread=0.5), 4000
    share = np.arange(1, 4) / 6
    mean = averaged(share, messages.payload)
    drawn = gaussian_draws(method, mean, messages, jax.random.split(rng.root(2), num))
    drawn = np.asarray(jax.tree.leaves(drawn)[1])  # the kernel
    own = np.asarray(jax.tree.leaves(messages.payload.weights)[1], np.float64)
    centre = np.tensordot(share, own, 1)
    sd = 0.5 * np.sqrt(np.tensordot(share, (own - centre) ** 2, 1))
    assert drawn.shape[1:] == (2, 3)
    np.testing.assert_array_less(np.abs(drawn.mean(0) - centre), 5 * sd / np.sqrt(num))  # 5 standard errors
    np.testing.assert_array_less(np.abs(drawn.std(0) - sd), 5 * sd / np.sqrt(2 * num))


def test_dirichlet_draws_are_mixtures_with_the_moments_of_the_distribution():
    """Two clients at 0 and 1: a mixture is γ ~ Beta(α, α), of mean ½ and variance 1/(4(2α + 1))."""
    alpha, num = 2.0, 4000
    messages = networks(2)
    payload = jax.tree.map(lambda leaf: np.stack([np.zeros_like(leaf[0]), np.ones_like(leaf[0])]), messages.payload)
    messages = replace(messages, payload=payload)
    method, first = FedBE(distribution="dirichlet", concentration=alpha), jax.tree.map(lambda leaf: leaf[0], payload)
    drawn = jax.tree.leaves(dirichlet_draws(method, first, messages, jax.random.split(rng.root(2), num)))
    gamma = np.asarray(drawn[0])[:, 0]
    np.testing.assert_allclose(np.asarray(drawn[1])[:, 0, 0], gamma, atol=1e-6)  # one share for all weights
    assert ((gamma >= 0) & (gamma <= 1)).all()
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(gamma.mean() - 0.5) < 5 * np.sqrt(variance / num)
    assert abs(gamma.var() - variance) < 5 * variance * np.sqrt(2 / num)  # lighter tails than a normal


def test_one_step_of_distillation_is_the_gradient_of_the_cross_entropy():
    task, eta = linear_task(), 0.3
    method = FedBE(distil_epochs=1, distil_step_size=eta)
    start = parameters(task, rng.root(0))
    target = np.eye(3)[[0, 1, 2, 0, 1, 2]]
    found, _ = distilled(method, task, start, np.float32(target), rng.root(1))
    before = leaves(start)
    error = (softmax(logits(**before)) - target) / len(PUBLIC)
    after = leaves(found)
    np.testing.assert_allclose(after["bias"], before["bias"] - eta * error.sum(axis=0), atol=1e-6)
    np.testing.assert_allclose(after["kernel"], before["kernel"] - eta * np.asarray(PUBLIC).T @ error, atol=1e-6)


def test_the_student_is_the_mean_of_the_second_half_of_its_iterates():
    task, eta, epochs = linear_task(), 0.5, 6
    method = FedBE(distil_epochs=epochs, distil_step_size=eta, distil_momentum=0.0)
    start = parameters(task, rng.root(0))
    target = np.eye(3)[[0, 1, 2, 0, 1, 2]]
    now, path = leaves(start), []
    for _ in range(epochs):  # one minibatch an epoch
        error = (softmax(logits(**now)) - target) / len(PUBLIC)
        now = {"bias": now["bias"] - eta * error.sum(0), "kernel": now["kernel"] - eta * np.asarray(PUBLIC).T @ error}
        path.append(now)
    found = leaves(distilled(method, task, start, np.float32(target), rng.root(1))[0])
    for name in ("bias", "kernel"):
        np.testing.assert_allclose(found[name], np.mean([one[name] for one in path[3:]], axis=0), atol=1e-5)


def test_distillation_brings_the_server_closer_to_the_ensemble():
    task, messages, method = linear_task(), networks(3), FedBE(distil_step_size=0.1)
    server = init_server(method, task, rng.root(1))
    share = np.arange(1, 4) / 6
    mean = averaged(share, messages.payload)
    key_draw, _ = jax.random.split(rng.root(0))
    target = np.asarray(target_of(method, task, mean, messages, key_draw))
    new, _ = aggregated(method, task, server, messages, rng.root(0))
    losses = [-(target * np.log(softmax(logits(**leaves(params))))).sum(-1).mean() for params in (mean, new)]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("task", "says"),
    [(tiny_task(), "--align own:500"), (replace(quadratic_task(), public=jnp.zeros((3, 1))), "regression")],
    ids=["no inputs", "no classes"],
)
def test_a_federation_that_cannot_be_distilled_is_refused_in_one_sentence(task, says):
    with pytest.raises(UsageError) as caught:
        init_server(FedBE(), task, rng.root(0))
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")
    assert isinstance(init_server(FedBE(distil_epochs=0), task, rng.root(0)), Params)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (FedBE(distribution="uniform"), "distribution='uniform'"),
        (FedBE(samples=0), "samples=0"),
        (FedBE(spread=-1.0), "spread=-1.0"),
        (FedBE(concentration=0.0), "concentration=0.0"),
        (FedBE(temperature=0.0), "temperature=0.0"),
        (FedBE(distil_epochs=-1), "distil-epochs=-1"),
        (FedBE(distil_step_size=0.0), "distil-step-size=0.0"),
        (FedBE(distil_momentum=1.0), "distil-momentum=1.0"),
        (FedBE(distil_batch_size=0), "distil-batch-size=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_hyper_parameter_ends_in_one_sentence(method, says):
    with pytest.raises(UsageError) as caught:
        method.check()
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.slow  # a law, for the other way to draw teachers
def test_mixtures_of_clients_do_not_depend_on_the_order_or_the_absence_of_messages():
    task, messages = linear_task(), networks(3)
    method = FedBE(distribution="dirichlet")
    server = init_server(method, task, rng.root(1))
    turned = jax.tree.map(lambda leaf: leaf[np.array([2, 0, 1])], messages)
    payload = jax.tree.map(lambda leaf: np.concatenate([leaf, np.full_like(leaf[:1], jnp.nan)]), messages.payload)
    padded = Message(payload, np.append(messages.weight, np.float32(0)), np.append(messages.sender, 9))
    servers = [aggregated(method, task, server, one, rng.root(0))[0] for one in (messages, turned, padded)]
    assert_close(servers[1], servers[0])
    assert_close(servers[2], servers[0])
