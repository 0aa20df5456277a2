"""FedAdam and FedYogi: the server's step in closed form, without bias correction, and its way back to FedAvg."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedAvg, FedOpt, Optimiser, UsageError, Work
from priory.core import rng
from priory.core.struct import replace
from priory.fed.method import Message
from priory.models.model import Params
from priory.reproduce import read
from priory.reproduce.cells import cells_of
from tests.methods.problems import a_round_of, constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, broadcast, init_server, updated

TASK = quadratic_task()
both = pytest.mark.parametrize("rule", ["adam", "yogi"])


def second(rule, v, squared, beta2):
    """The rule of Algorithm 2, in float64."""
    if rule == "adam":
        return beta2 * v + (1 - beta2) * squared
    return v - (1 - beta2) * squared * np.sign(v - squared)


def told(server, delta):
    """Messages of two clients, of weights 3 and 1, whose steps of `body` have the mean `delta`."""
    body, head = (np.asarray(server.weights[name]) for name in ("body", "head"))
    moved = np.array([delta + 1.0, delta - 3.0], np.float32)
    return Message(Params({"body": body + moved, "head": np.tile(head, 2)}), np.array([3.0, 1.0], np.float32))


@both
def test_the_server_follows_the_printed_recursion_over_many_rounds(rule):
    method = FedOpt(rule, server_step_size=0.3, beta1=0.8, beta2=0.9, tau=0.05)
    server = init_server(method, TASK, rng.root(0))
    w, m, v = 0.0, 0.0, 0.05**2
    for delta in (2.0, -1.0, 0.01, 0.0, 4.0):
        server, _ = aggregated(method, TASK, server, told(server, delta), rng.root(0))
        m = 0.8 * m + 0.2 * delta
        v = second(rule, v, delta**2, 0.9)
        w = w + 0.3 * m / (np.sqrt(v) + 0.05)
        np.testing.assert_allclose(float(server.weights["body"]), w, rtol=1e-5)
        np.testing.assert_allclose(float(server.second["body"]), v, rtol=1e-5)
    assert float(server.weights["head"]) == 0.0, "what nobody moved stays"


@both
def test_the_first_step_has_no_bias_correction(rule):
    """Adam as it is usually written would move by η_s in the first round, whatever β₁ and β₂."""
    method, delta = FedOpt(rule, server_step_size=0.3, beta1=0.5, beta2=0.99), 5.0
    server = init_server(method, TASK, rng.root(0))
    server, _ = aggregated(method, TASK, server, told(server, delta), rng.root(0))
    v = second(rule, 1e-6, delta**2, 0.99)
    np.testing.assert_allclose(float(server.weights["body"]), 0.3 * 0.5 * delta / (np.sqrt(v) + 1e-3), rtol=1e-5)
    np.testing.assert_allclose(float(server.weights["body"]), 0.3 * 0.5 / np.sqrt(0.01), rtol=1e-2)  # 5 η_s


@both
def test_without_memory_and_with_a_fixed_second_moment_it_is_fedavg(rule):
    """β₁ = 0 and β₂ = 1 leave v = τ², and η_s = 2τ then takes the whole step."""
    task, shards = tiny_task(), tiny_shards()
    local = {"optimiser": Optimiser(step_size=0.05, momentum=0.9), "work": Work(epochs=2, batch_size=3)}
    adaptive, plain = FedOpt(rule, server_step_size=0.02, beta1=0.0, beta2=1.0, tau=0.01, **local), FedAvg(**local)
    adaptive.check()
    server, messages = a_round_of(adaptive, task, shards)
    found = broadcast(adaptive, aggregated(adaptive, task, server, messages, rng.root(0))[0])
    before, same = a_round_of(plain, task, shards)
    expected = aggregated(plain, task, before, same, rng.root(0))[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected)


@pytest.mark.parametrize("table", ["fedvi-table-1", "fedvi-table-2", "fedvi-rotated"])
def test_the_rows_of_fedavg_beside_fedvi_take_its_server_steps(table, tmp_path):
    """FedVI's server is SGD with momentum; β₂ = 1 and τ = 1 leave η_s m / 2, with m the mean of (1 − β₁) Δ."""
    cells = {cell.row.key: cell.method for cell in cells_of(read(table), tmp_path)}
    fedvi, [fedavg] = cells["fedvi"], {cells[key] for key in cells if key.startswith("fedavgm")}
    server = init_server(fedavg, TASK, rng.root(0))
    w = momentum = 0.0
    for delta in (2.0, -1.0, 0.01, 0.0, 4.0):
        server, _ = aggregated(fedavg, TASK, server, told(server, delta), rng.root(0))
        momentum = fedvi.server_momentum * momentum + delta
        w += fedvi.server_step_size * momentum
        np.testing.assert_allclose(float(server.weights["body"]), w, rtol=1e-5)


@both
def test_clients_that_did_not_move_leave_the_weights(rule):
    method = FedOpt(rule)
    server = init_server(method, TASK, rng.root(0))
    new, _ = aggregated(method, TASK, server, told(server, 0.0), rng.root(0))
    assert jax.tree.map(float, new.weights) == jax.tree.map(float, server.weights)
    assert jax.tree.map(float, new.first) == jax.tree.map(float, server.first)


@both
def test_a_round_without_messages_leaves_weights_and_moments(rule):
    method = FedOpt(rule)
    server = init_server(method, TASK, rng.root(0))
    server, _ = aggregated(method, TASK, server, told(server, 2.0), rng.root(0))  # m ≠ 0: a step would go on
    absent = replace(told(server, 1.0), weight=np.zeros(2, np.float32))
    new, _ = aggregated(method, TASK, server, absent, rng.root(0))
    jax.tree.map(np.testing.assert_array_equal, new, server)


def test_yogi_forgets_a_large_step_more_slowly_than_adam():
    seconds = {}
    for rule in ("adam", "yogi"):
        method = FedOpt(rule, beta2=0.5)
        server = init_server(method, TASK, rng.root(0))
        for delta in (10.0, 0.1, 0.1, 0.1):
            server, _ = aggregated(method, TASK, server, told(server, delta), rng.root(0))
        seconds[rule] = float(server.second["body"])
    np.testing.assert_allclose(seconds["adam"], 50 * 0.5**3, rtol=1e-2)
    np.testing.assert_allclose(seconds["yogi"], 50, rtol=1e-2)


@both
def test_the_server_finds_the_optimum_of_two_quadratics(rule):
    """Clients with 6 and 3 examples pull to 1 and 4: the weighted optimum is 2."""
    method = FedOpt(rule, server_step_size=0.05, optimiser=Optimiser(step_size=0.1), work=Work(steps=1))
    shards = constant_shards(1.0, 4.0, counts=(6, 3))
    data = [shards.of(jnp.int32(k)) for k in range(2)]

    def a_round(_, server):
        down = broadcast(method, server)
        sent = [updated(method, TASK, down, (), one, rng.root(1))[1] for one in data]
        messages = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sent)
        return aggregated(method, TASK, server, messages, rng.root(0))[0]

    server = jax.lax.fori_loop(0, 500, a_round, init_server(method, TASK, rng.root(0)))
    np.testing.assert_allclose(float(server.weights["body"] + server.weights["head"]), 2.0, atol=1e-2)


@both
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"server_step_size": 0.0}, "server-step-size=0.0"),
        ({"beta1": 1.0}, "beta1=1.0"),
        ({"beta2": 1.5}, "beta2=1.5"),
        ({"tau": 0.0}, "tau=0.0"),
        ({"finetune_epochs": -1}, "finetune-epochs=-1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_hyper_parameter_ends_in_one_sentence(rule, wrong, says):
    with pytest.raises(UsageError) as caught:
        FedOpt(rule, **wrong).check()
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")
