"""sFedBayes: pFedBayes where λ = 1, averages of probabilities, and what is not sent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

from priory.bayes import spike_slab
from priory.bayes.spike_slab import Free
from priory.core import rng, trees
from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.deploy.wire import pack, unpack
from priory.fed.channel import transmit
from priory.fed.local import Optimiser, Work
from priory.fed.method import Message, Task
from priory.methods._blocks.coupled_vi import VariationalParams, init_client_state
from priory.methods.pfedbayes import PFedBayes
from priory.methods.sfedbayes import SFedBayes, Update
from priory.models.likelihood import Categorical
from priory.models.model import Head, Params, parse
from tests.methods import verbs
from tests.methods.problems import Location, constant_shards, quadratic_task, shards_from, tiny_shards
from tests.methods.verbs import aggregated, broadcast, distance, init_client, init_server, personalised, predicted

WORK = Work(steps=5, batch_size=4)
OPTIMISER = Optimiser("adam", 0.01)
METHOD = SFedBayes(optimiser=OPTIMISER, work=WORK)
MLP = Task(parse("mlp:4", input_shape=(5,), num_outputs=3), Categorical(3), (5,), 3, 15, Head("Dense_1"))
DATA = tiny_shards().of(jnp.int32(0))


def assert_close(a, b, rtol=1e-6, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def spread_server(method: SFedBayes) -> VariationalParams:
    """A server whose weights have inclusions all over (0, 1)."""
    server = init_server(method, MLP, rng.root(0))
    draw = np.random.default_rng(0)
    logit = jax.tree.map(lambda leaf: 2 * draw.normal(size=leaf.shape).astype(np.float32), server.weights.logit)
    return replace(server, weights=replace(server.weights, logit=logit))


def updated(method: Any, down: Any, client: Any, data: Any, key: Any) -> Any:
    return verbs.updated(method, MLP, down, client, data, key)


def sent_by(method: SFedBayes, server: VariationalParams) -> Update:
    return jax.tree.map(jnp.asarray, updated(method, server, (), DATA, rng.root(2))[1].payload)


@pytest.mark.parametrize(
    ("draw", "samples", "stateful"),
    [
        ("weights", 1, True),
        pytest.param("weights", 2, False, marks=pytest.mark.slow),
        pytest.param("layers", 1, False, marks=pytest.mark.slow),
    ],
)
def test_with_lambda_one_it_is_pfedbayes(draw, samples, stateful):
    """λ = 1 − 1e-6, so to six digits: the loss, the posterior that is kept, and what is sent."""
    common = {"stateful": stateful, "draw": draw, "samples_per_step": samples, "optimiser": OPTIMISER, "work": WORK}
    results = []
    for method in (PFedBayes(**common), SFedBayes(inclusion=1 - 1e-6, **common)):
        down = broadcast(method, init_server(method, MLP, rng.root(0)))
        client, _, _ = updated(method, down, init_client(method, MLP, down, rng.root(1)), DATA, rng.root(2))
        results.append((down, *updated(method, down, client, DATA, rng.root(3))))
    (down, kept_p, message_p, info_p), (_, kept_s, message_s, info_s) = results
    sent_p, sent_s = message_p.payload.weights, message_s.payload
    assert_close((sent_s.mean, sent_s.rho), (sent_p.mean, sent_p.rho), rtol=1e-5, atol=1e-5)
    assert distance(sent_p.mean, down.weights.mean) > 0.1, "it moved"
    np.testing.assert_allclose(info_s["loss"], info_p["loss"], rtol=1e-5)
    np.testing.assert_allclose(info_s["divergence"], info_p["divergence"], rtol=1e-4)
    if stateful:
        assert_close(kept_s.q.weights.mean, kept_p.q.weights.mean, rtol=1e-5, atol=1e-5)
        assert_close(kept_s.q.weights.rho, kept_p.q.weights.rho, rtol=1e-5, atol=1e-5)


def test_with_lambda_one_predictions_are_those_of_pfedbayes():
    dense, sparse = PFedBayes(samples=4), SFedBayes(inclusion=1 - 1e-6, samples=4)
    x = DATA.padded().x
    outputs = [predicted(m, MLP, init_server(m, MLP, rng.root(0)), x, rng.root(4)).outputs for m in (dense, sparse)]
    assert_close(*outputs)


@pytest.mark.slow  # test_noisy.py has it for one layer
def test_drawing_outputs_of_layers_leaves_expected_gradients_as_they_are():
    """One sgd step from the prior, where only the likelihood has a slope: 2000 of each, means within 5 SE."""
    num = 2000
    single = shards_from(np.linspace(-1, 1, 5, dtype=np.float32)[None], np.array([1]), (1,)).of(jnp.int32(0))
    server = spread_server(METHOD)
    server = replace(server, weights=replace(server.weights, rho=trees.scale(0.4, server.weights.rho)))

    @jax.jit
    def steps(method, keys):
        start = init_client_state(server, method.optimiser)

        def one(key):
            q = method.client_update(MLP, server, start, single, key)[0].q.weights
            return trees.sub(q, server.weights)

        return jax.lax.map(one, keys)

    method = SFedBayes(stateful=True, optimiser=Optimiser("sgd", 1.0), work=Work(steps=1, batch_size=7))
    layers = steps(method, jax.random.split(jax.random.key(3), num))
    weights = steps(replace(method, draw="weights"), jax.random.split(jax.random.key(4), num))

    def agree(a, b):
        error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / num)
        assert np.all(np.abs(a.mean(axis=0) - b.mean(axis=0)) <= 5 * error + 1e-7)

    jax.tree.map(lambda a, b: agree(np.asarray(a), np.asarray(b)), layers, weights)
    assert max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(layers.logit)) > 1e-3, "gates have a slope"


def updates(*inclusions: float) -> Message:
    """A message for each inclusion, with means 0, 1, 2, …"""
    num = len(inclusions)
    mean = {"w": np.arange(num, dtype=np.float32)[:, None]}
    return Message(Update(mean, mean, {"w": np.array(inclusions, np.float32)[:, None]}, {}), np.ones(num, np.float32))


def server_at(mean: float, inclusion: float) -> VariationalParams:
    logit = spike_slab.logit_of(jnp.float32(inclusion))[None]
    return VariationalParams(Free({"w": jnp.array([mean])}, {"w": jnp.array([mean])}, {"w": logit}), {})


def test_the_server_averages_lambda_as_a_probability():
    new, _ = aggregated(METHOD, MLP, server_at(9.0, 0.5), updates(0.2, 0.6, 0.1), rng.root(0))
    np.testing.assert_allclose(expit(new.weights.logit["w"]), [0.3], rtol=1e-6)
    np.testing.assert_allclose(new.weights.mean["w"], [1.0])


def test_beta_moves_mean_rho_and_lambda_part_of_the_way():
    new, _ = aggregated(replace(METHOD, beta=0.25), MLP, server_at(8.0, 0.8), updates(0.4), rng.root(0))
    np.testing.assert_allclose(expit(new.weights.logit["w"]), [0.7], rtol=1e-6)
    np.testing.assert_allclose(new.weights.mean["w"], [6.0])
    np.testing.assert_allclose(new.weights.rho["w"], [6.0])


@pytest.mark.parametrize(("sent", "inclusion"), [(0.0, 1e-6), (1.0, 1 - 1e-6)])
def test_a_certain_weight_is_left_a_doubt_on_the_server(sent, inclusion):
    new, _ = aggregated(METHOD, MLP, server_at(0.0, 0.5), updates(sent, sent), rng.root(0))
    np.testing.assert_allclose(expit(new.weights.logit["w"]), [inclusion], rtol=1e-3)


@pytest.mark.parametrize(
    "tol", [0.5, pytest.param(0.1, marks=pytest.mark.slow), pytest.param(0.9, marks=pytest.mark.slow)]
)
def test_a_weight_that_is_not_sent_counts_as_zero_inclusion_where_it_stood(tol):
    server = spread_server(METHOD)
    whole, cut = sent_by(METHOD, server), sent_by(replace(METHOD, tol=tol), server)
    down = server.weights

    def agree(inclusion, there, before, now, expected_inclusion):
        sent = np.asarray(inclusion) >= tol
        np.testing.assert_allclose(now, np.where(sent, there, before), rtol=1e-6)
        np.testing.assert_allclose(expected_inclusion, np.where(sent, inclusion, 0), rtol=1e-6)

    jax.tree.map(agree, whole.inclusion, whole.mean, down.mean, cut.mean, cut.inclusion)
    jax.tree.map(agree, whole.inclusion, whole.rho, down.rho, cut.rho, cut.inclusion)
    assert_close(cut.stats, whole.stats, rtol=0)


@pytest.mark.parametrize("tol", [0.0, 0.1, 0.5, 0.9])
def test_bytes_on_the_wire_are_those_that_the_simulator_counts(tol):
    method = replace(METHOD, tol=tol)
    server = spread_server(method)
    payload = replace(sent_by(method, server), stats={"batch_stats": jnp.arange(3.0)})
    _, _, bits = transmit(None, method, MLP, server, Message(payload, jnp.float32(1)), (), rng.root(3))
    packed = pack(method.thin(payload))
    assert sum(array.nbytes for array in packed.values()) == bits / 8
    kept = sum(int(np.sum(leaf >= tol)) for leaf in jax.tree.leaves(payload.inclusion))
    bitmap = sum(-(-leaf.size // 8) for leaf in jax.tree.leaves(payload.inclusion)) if tol else 0
    assert bits / 8 == bitmap + 4 * 3 * kept + 4 * 3
    arrived = method.fill(MLP, server, unpack(packed, jax.eval_shape(method.thin, payload)))
    assert jax.tree.structure(arrived) == jax.tree.structure(payload)
    jax.tree.map(np.testing.assert_array_equal, arrived, payload)


def test_three_numbers_a_weight_travel_each_way():
    server = init_server(METHOD, MLP, rng.root(0))
    size = trees.size(server.weights.mean)
    assert trees.num_bytes(broadcast(METHOD, server)) == 4 * 3 * size
    message = Message(sent_by(METHOD, server), jnp.float32(1))
    assert transmit(None, METHOD, MLP, server, message, (), rng.root(0))[2] == 32 * 3 * size


@pytest.mark.parametrize("stateful", [False, True])
def test_a_client_without_examples_keeps_the_prior_and_sends_nothing(stateful):
    method = replace(METHOD, stateful=stateful)
    nobody = replace(DATA, lengths=np.zeros_like(DATA.lengths))
    server = spread_server(method)
    client = init_client(method, MLP, server, rng.root(1))
    client, message, info = updated(method, server, client, nobody, rng.root(2))
    assert message.weight == 0
    assert info["divergence"] == 0
    posterior = personalised(method, MLP, server, client, nobody, rng.root(3))
    jax.tree.map(np.testing.assert_array_equal, posterior, server)


def test_density_is_the_mean_inclusion_of_the_posterior():
    method = replace(METHOD, stateful=True)
    server = spread_server(method)
    client, _, info = updated(method, server, init_client(method, MLP, server, rng.root(1)), DATA, rng.root(2))
    logits = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(client.q.weights.logit)])
    np.testing.assert_allclose(info["density"], np.mean(1 / (1 + np.exp(-logits))), rtol=1e-5)


class Mute(Location):
    """A network that ignores its weights: data say nothing about them."""

    def apply(self, params: Params, x: jax.Array, *, key: jax.Array | None = None) -> tuple[jax.Array, Any]:
        del key
        return jnp.zeros((x.shape[0], 1)), params.stats

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mute)

    def __hash__(self) -> int:
        return hash(Mute)


def located(mean: float, inclusion: float) -> VariationalParams:
    weights = {"body": jnp.float32(mean), "head": jnp.float32(mean)}
    return VariationalParams(spike_slab.around(weights, -2.5, inclusion), {})


def densities(task: Task, start: float, prior: float) -> list[float]:
    """Density of a client's posterior after each of three rounds under a prior that stays."""
    method = SFedBayes(stateful=True, zeta=1.0, optimiser=Optimiser("adam", 0.05), work=Work(steps=20, batch_size=4))
    client, down, seen = init_client_state(located(1.5, start), method.optimiser), located(1.5, prior), []
    for t in range(3):
        data = constant_shards(3.0).of(jnp.int32(0))
        client, _, info = verbs.updated(method, task, down, client, data, rng.root(t))
        seen.append(float(info["density"]))
    return seen


def test_density_falls_where_data_say_nothing_and_the_prior_is_sparse():
    seen = densities(replace(quadratic_task(), model=Mute()), start=0.9, prior=0.1)
    assert 0.9 > seen[0] > seen[1] > seen[2] > 0.1
    assert seen[2] < 0.5


def test_weights_that_data_need_stay_although_the_prior_is_sparse():
    """Both weights of 1.5 must be there to reach 3."""
    mute = densities(replace(quadratic_task(), model=Mute()), start=0.9, prior=0.5)
    needed = densities(quadratic_task(), start=0.9, prior=0.5)
    assert needed[2] > mute[2] + 0.1


def test_a_plug_in_predicts_with_the_mean_or_the_median_model():
    mean = {"body": jnp.float32(2), "head": jnp.float32(4)}
    logit = {"body": spike_slab.logit_of(jnp.float32(0.75)), "head": spike_slab.logit_of(jnp.float32(0.25))}
    posterior, x = VariationalParams(Free(mean, trees.zeros(mean), logit), {}), jnp.ones((3, 1))
    for prediction, expected in (("mean", 0.75 * 2 + 0.25 * 4), ("median", 2.0)):
        predictive = predicted(SFedBayes(prediction=prediction), quadratic_task(), posterior, x, rng.root(0))
        np.testing.assert_allclose(predictive.outputs, np.full((1, 3, 1), expected), rtol=1e-6)


def test_samples_predict_with_equal_weights():
    predictive = predicted(
        replace(METHOD, samples=7), MLP, init_server(METHOD, MLP, rng.root(1)), jnp.ones((2, 5)), rng.root(0)
    )
    assert predictive.outputs.shape == (7, 2, 3)
    assert len(np.unique(np.asarray(predictive.outputs)[:, 0, 0])) == 7
    np.testing.assert_allclose(predictive.log_weights, np.full((7, 2), -np.log(7)), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"zeta": -1.0}, "zeta=-1.0 is out of range; choose 0 or more"),
        ({"rho": float("nan")}, "rho=nan is not a finite number"),
        ({"inclusion": 0.0}, r"inclusion=0.0 lies outside \(0, 1\); choose a probability"),
        ({"inclusion": 1.0}, r"inclusion=1.0 lies outside \(0, 1\)"),
        ({"inclusion": 1.01}, r"inclusion=1.01 lies outside \(0, 1\)"),
        ({"inclusion": float("nan")}, r"inclusion=nan lies outside \(0, 1\)"),
        ({"temperature": 0.0}, "temperature=0.0 is not a positive number"),
        ({"tol": 1.0}, r"tol=1.0 lies outside \[0, 1\)"),
        ({"tol": -0.1}, r"tol=-0.1 lies outside \[0, 1\)"),
        ({"beta": -1.0}, "beta=-1.0 is out of range"),
        ({"samples_per_step": 0}, "samples-per-step=0 is out of range; choose 1 or more"),
        ({"samples": 0}, "samples=0 is out of range; choose 1 or more"),
        ({"prior_rate": 0.0}, "prior-rate=0.0 is not a positive number"),
        ({"prediction": "mode"}, "prediction='mode' is not known; choose from sample, mean, median"),
        ({"optimiser": Optimiser("adam", 0.001, weight_decay=0.1)}, "weight-decay=0.1 would shrink"),
    ],
)
def test_what_cannot_be_meant_is_refused(change, sentence):
    with pytest.raises(UsageError, match=sentence):
        SFedBayes(**change).check()


def test_a_plug_in_needs_no_samples():
    SFedBayes(prediction="median", samples=0).check()
