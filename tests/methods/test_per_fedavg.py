"""Per-FedAvg: steps on the loss after adaptation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedAvg, Optimiser, PerFedAvg, UsageError, Work
from priory.core import rng
from priory.models.model import Params
from tests.methods.problems import constant_shards, plain_task, quadratic_task, tiny_shards
from tests.methods.verbs import parameters, personalised, updated

CENTRE, START = 3.0, 1.0
DOWN = Params({"body": jnp.float32(START), "head": jnp.float32(0)})


@pytest.mark.parametrize(("order", "power"), [("first", 1), ("second", 2)])
def test_a_step_on_a_quadratic_is_shortened_by_the_adaptation(order, power):
    """The curvature along (1, 1) is 2: adapting leaves 1 − 2α of the gap, and the Hessian's factor is the same."""
    alpha, beta = 0.1, 0.2
    method = PerFedAvg(alpha=alpha, order=order, optimiser=Optimiser(step_size=beta), work=Work(batch_size=4))
    data = constant_shards(CENTRE).of(jnp.int32(0))
    _, message, info = updated(method, quadratic_task(), DOWN, (), data, rng.root(0))
    moved = beta * (1 - 2 * alpha) ** power * (CENTRE - START)
    np.testing.assert_allclose(message.payload.weights["body"], START + moved, atol=1e-6)
    after = ((CENTRE - START) * (1 - 2 * alpha)) ** 2 / 2 + np.log(2 * np.pi) / 2
    np.testing.assert_allclose(info["loss"], after, atol=1e-5)


def test_second_order_steps_are_the_gradient_of_the_loss_after_adaptation():
    """On a network, by differences of that loss; one example, so that every minibatch is the same."""
    task, data = plain_task(), tiny_shards(counts=(1,)).of(jnp.int32(0))
    down, alpha, work = parameters(task, rng.root(0)), 0.5, Work(batch_size=1)
    method = PerFedAvg(alpha=alpha, order="second", optimiser=Optimiser(step_size=1.0), work=work)
    _, message, _ = updated(method, task, down, (), data, rng.root(1))
    step = jax.tree.map(np.subtract, message.payload.weights, down.weights)

    def loss(weights):
        return task.nll(Params(weights), data.padded())[0]

    @jax.jit
    def after(size):
        weights = jax.tree.map(lambda w, s: w + size * s, down.weights, step)
        return loss(jax.tree.map(lambda w, g: w - alpha * g, weights, jax.grad(loss)(weights)))

    slope = (after(1e-2) - after(-1e-2)) / 2e-2
    squared = sum(float(np.sum(leaf**2)) for leaf in jax.tree.leaves(step))
    np.testing.assert_allclose(-slope, squared, rtol=2e-3)


@pytest.mark.parametrize("order", ["first", "second"])
def test_no_adaptation_is_fedavg(order):
    task, data = plain_task(), tiny_shards().of(jnp.int32(0))
    down = parameters(task, rng.root(0))
    work, optimiser = Work(epochs=2, batch_size=3), Optimiser(step_size=0.05, momentum=0.9)
    methods = (PerFedAvg(alpha=0.0, order=order, optimiser=optimiser, work=work), FedAvg(optimiser, work))
    sent = [updated(method, task, down, (), data, rng.root(1))[1].payload for method in methods]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *sent)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_personal_model_is_the_global_one_after_plain_steps_of_size_alpha(steps):
    alpha, data = 0.1, constant_shards(CENTRE).of(jnp.int32(0))
    method = PerFedAvg(alpha=alpha, adapt_steps=steps, optimiser=Optimiser(step_size=0.5, momentum=0.9))
    personal = personalised(method, quadratic_task(), DOWN, (), data, rng.root(0))
    gap = (CENTRE - START) * (1 - 2 * alpha) ** steps
    np.testing.assert_allclose(personal.weights["body"], START + (CENTRE - START - gap) / 2, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (PerFedAvg(alpha=-0.1), "alpha=-0.1"),
        (PerFedAvg(order="third"), "order='third'"),  # type: ignore[arg-type]
        (PerFedAvg(adapt_steps=0), "adapt-steps=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_hyper_parameter_ends_in_one_sentence(method, says):
    with pytest.raises(UsageError, match=says):
        method.check()
