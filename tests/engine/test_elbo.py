"""The bound on log p(D) that a run ends with: below the truth, the sum of its parts, however it is computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from scipy.stats import invgamma, multivariate_normal

import priory
from priory.core import rng
from priory.core.rng import Stream
from priory.engine import devices
from priory.engine.clients import Resident, Stored
from priory.engine.cohort import Participation
from priory.evaluate import ClientSlot, EvaluationContext, current_state
from priory.models.model import Params
from tests.methods.problems import Location
from tests.older import edit_manifest
from tests.states import prepared_as

STATELESS = priory.FedHBNIW(epsilon=0.05)
STATEFUL = priory.FedHBNIW(epsilon=0.05, stateful=True)
BOTH = pytest.mark.parametrize("method", [STATELESS, STATEFUL], ids=["stateless", "stateful"])


@pytest.fixture(scope="module")
def held_out(arrays):
    """Four clients that take part and two newcomers, who do not count."""
    return priory.data.from_arrays(**arrays, test=0.2, seed=0, newcomers=0.3)


@pytest.fixture(scope="module")
def runs(begin, train, held_out):
    """A run after two rounds of two clients, so that some of the four never joined; a stateless one has no round."""
    return {STATELESS: begin(STATELESS, held_out, cohort=2), STATEFUL: train(STATEFUL, held_out, cohort=2, rounds=2)}


@jax.jit
def verbs_of_clients(method, task, down, records, shards, root, t):
    def of_one(member):
        place, joined, client = member
        key_update, key_evidence = jax.random.split(rng.key(root, Stream.EVIDENCE, t, place))
        context = EvaluationContext(method, method, task, down, root, t)
        client = current_state(context, ClientSlot(place, joined, client))
        data = shards.of(place)
        _, message, _ = method.client_update(task, down, client, data, key_update)
        return method.client_evidence(task, down, message.payload, data, key_evidence)

    return jax.lax.map(of_one, records), method.server_evidence(task, down)


@jax.jit
def evidence_at_m0(method, task, down, shards, root, t):
    def of_one(place):
        _, key = jax.random.split(rng.key(root, Stream.EVIDENCE, t, place))
        return method.client_evidence(task, down, Params(down.mean, down.stats), shards.of(place), key)

    return jax.lax.map(of_one, jnp.arange(4))


@pytest.mark.parametrize("prior_mean", ["zero", pytest.param("learned", marks=pytest.mark.slow)])
def test_the_bound_of_a_normal_inverse_wishart_lies_within_a_nat_and_a_half_below_the_evidence(train, prior_mean):
    """One example a client makes l0 = N + 1 and n0 = N + 3 the optimal ones, and ε = 0.5 is near the optimal width."""
    options = {"epsilon": 0.5, "prior_scale": 1.0, "precision": "expected", "update": "body"}
    run = six_means(train, priory.FedHBNIW(prior_mean=prior_mean, **options, **SOLVER))
    centre = 0.0 if prior_mean == "zero" else float(run.server.mean["body"])
    grid = np.linspace(-12, 12, 1201)  # of log σ², where σ² ~ IG(3/2, 1/2), μ ~ N(centre, σ²), θ_k ~ N(μ, σ²)
    log_likelihood = [log_normal(centre, np.exp(t) * (ALIKE + APART) + APART) for t in grid]
    density = np.exp(log_likelihood + invgamma.logpdf(np.exp(grid), 1.5, scale=0.5) + grid)
    assert_below(run, np.log(np.trapezoid(density, grid)))


def test_the_bound_of_one_prototype_lies_within_a_nat_and_a_half_below_the_evidence(train):
    """With r ~ N(0, 1) and θ_k ~ N(r, 1) the evidence is a normal density."""
    options = {"variance": 1.0, "epsilon": 0.5, "prior_mean": "zero", "gate": False, "update": "body"}
    method = priory.FedHBMixture(num_prototypes=1, **options, **SOLVER)
    assert_below(six_means(train, method), log_normal(0.0, ALIKE + 2 * APART))


TARGETS = np.array([-1.6, -0.4, 0.3, 0.9, 1.4, 2.2])
ALIKE, APART = np.ones((6, 6)), np.eye(6)
SOLVER = {"optimiser": priory.Optimiser(step_size=0.3), "work": priory.Work(epochs=20)}


def six_means(train, method):
    """A run of six clients with one example y_k ~ N(θ_k, 1) each; of two weights whose sum is θ_k, one stays at 0."""
    data = priory.data.from_arrays(np.zeros((6, 1)), TARGETS, np.arange(6), task="regression", test=0.0)
    return train(method, data, rounds=30, cohort=6, model=Location(), scale=1.0)


def log_normal(mean, covariance):
    return multivariate_normal.logpdf(TARGETS, np.full(6, mean), covariance)


def assert_below(run, evidence):
    """Raises unless the bound, a mean over draws, lies 0 to 1.5 nats below the evidence by four standard errors."""
    mesh, totals = run.evaluator.ready.plan.mesh, []
    for seed in range(200):
        inputs = dataclasses.replace(run.evaluator.ready.inputs, root=devices.root_key(seed, mesh))
        totals.append(prepared_as(run, inputs=inputs).elbo().total)
    error = np.std(totals, ddof=1) / np.sqrt(len(totals))
    assert 0 < error < 0.12
    assert 4 * error < evidence - np.mean(totals) < 1.5 - 4 * error


@BOTH
def test_the_bound_is_the_sum_of_the_verbs(runs, method):
    run = runs[method]
    down, bound = method.broadcast(run.server), run.elbo()
    slots = [run.evaluator.slot(place) for place in range(4)]
    records = [(slot.id, slot.joined, slot.state) for slot in slots]
    assert sum(joined for _, joined, _ in records) < 4  # the bound is over those too who never joined
    assert any(joined for _, joined, _ in records) == (method is STATEFUL)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *records)
    ready = run.evaluator.ready
    verbs = verbs_of_clients(method, run.task, down, stacked, ready.train, ready.root, run.completed)
    found, server = jax.tree.map(np.asarray, verbs)
    divergence = -float(server)
    np.testing.assert_allclose(bound.per_client, found, rtol=1e-5)
    assert bound.divergence == pytest.approx(divergence, rel=1e-5)
    assert bound.total == pytest.approx(np.sum(found, dtype=np.float64) - divergence, rel=1e-5)


def test_a_client_updates_as_the_schedules_left_the_method(runs):
    """With a step size of 0 a stateless client's posterior sits at m0."""
    run, down = runs[STATELESS], STATELESS.broadcast(runs[STATELESS].server)
    schedules = dataclasses.replace(run.settings, schedule=("step-size=step:0@0.5",)).schedules(STATELESS)
    plan = dataclasses.replace(run.evaluator.ready.plan, schedules=schedules, rounds=2)
    settled = prepared_as(run, 2, plan=plan).elbo()
    found = evidence_at_m0(STATELESS, run.task, down, run.evaluator.ready.train, run.evaluator.ready.root, 2)
    np.testing.assert_allclose(settled.per_client, found, rtol=1e-5)
    assert settled.total != run.elbo().total


@BOTH
def test_a_loaded_run_has_the_bound_of_the_run_in_memory(runs, method, held_out, tmp_path):
    run = runs[method]
    run.save(tmp_path / "run")
    again = priory.load(tmp_path / "run", federation=held_out)
    assert again.elbo().total == run.elbo().total


def test_clients_in_the_store_have_the_bound_of_resident_ones(runs, held_out, tmp_path):
    runs[STATEFUL].save(tmp_path / "run")
    manifest = tmp_path / "run" / "manifest.toml"
    edit_manifest(manifest, f"resident_bytes = {runs[STATEFUL].settings.resident_bytes}", "resident_bytes = 0")
    stored = priory.load(tmp_path / "run", federation=held_out)
    assert isinstance(stored.evaluator.client_states, Stored)
    assert isinstance(runs[STATEFUL].evaluator.client_states, Resident)
    np.testing.assert_allclose(stored.elbo().per_client, runs[STATEFUL].elbo().per_client, rtol=1e-5)


def test_the_bound_does_not_depend_on_the_number_of_pieces(runs, monkeypatch):
    whole = runs[STATEFUL].elbo()
    monkeypatch.setattr("priory.engine.prepared.EVALUATION_BYTES", 1)
    assert len(runs[STATEFUL].evaluator.pieces(np.arange(4))) == 2
    np.testing.assert_array_equal(runs[STATEFUL].elbo().per_client, whole.per_client)


def test_the_bound_does_not_depend_on_the_number_of_devices(runs, held_out, tmp_path, monkeypatch):
    runs[STATEFUL].save(tmp_path / "run")
    monkeypatch.setattr(devices, "mesh_of_all", lambda: Mesh(np.array(jax.devices()[:1]), (devices.AXIS,)))
    alone = priory.load(tmp_path / "run", federation=held_out)
    assert (alone.evaluator.ready.plan.hands, runs[STATEFUL].evaluator.ready.plan.hands) == (1, 2)
    np.testing.assert_allclose(alone.elbo().per_client, runs[STATEFUL].elbo().per_client, rtol=1e-5)


@pytest.mark.slow  # test_simulate.py has the same for training
def test_the_bound_does_not_depend_on_how_many_clients_run_at_once(runs):
    plan = runs[STATEFUL].evaluator.ready.plan
    together = dataclasses.replace(plan, client_batch=2, participation=Participation(4, 4, 4))
    assert (plan.chunk, together.chunk) == (1, 2)
    found = prepared_as(runs[STATEFUL], plan=together).elbo()
    np.testing.assert_allclose(found.per_client, runs[STATEFUL].elbo().per_client, rtol=1e-5)


def test_newcomers_do_not_count(runs, held_out):
    bound = runs[STATELESS].elbo()
    assert (held_out.num_newcomers, bound.per_client.shape) == (2, (4,))
    assert bound.total == pytest.approx(bound.per_client.sum() - bound.divergence, rel=1e-9)


def test_asking_for_the_bound_changes_nothing_in_the_run(runs, state):
    before, first = state(runs[STATEFUL]), runs[STATEFUL].elbo()
    assert runs[STATEFUL].elbo().total == first.total
    for name, leaf in state(runs[STATEFUL]).items():
        np.testing.assert_array_equal(leaf, before[name])


def test_a_method_without_evidence_has_no_bound(runs):
    ready = runs[STATELESS].evaluator.ready
    run = prepared_as(runs[STATELESS], inputs=dataclasses.replace(ready.inputs, method=priory.Ditto()))
    with pytest.raises(priory.UsageError, match=r"ditto has no bound on log p\(D\), since .*; choose a method with"):
        run.elbo()


def test_a_posterior_of_zero_width_has_no_bound(begin, held_out):
    run = begin(priory.FedHBNIW(epsilon=0.0), held_out, cohort=2)
    with pytest.raises(priory.UsageError, match=r"fedhb-niw is -inf, with 4 of 4 clients not finite; .* width above 0"):
        run.elbo()
