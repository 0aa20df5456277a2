"""FedHB-NIW: its clients, what it reduces to, what it keeps, sends and draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import priory
from priory import FedAvg, FedHBNIW, FedProx, Optimiser, Work
from priory.core import rng, trees
from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.fed.method import Message, Task
from priory.methods.fedhb_niw import Prior
from priory.models import MLP, Head, Linen, Params
from priory.models.likelihood import Categorical
from tests.methods.niw_problem import (
    COUNTS,
    DOWN,
    FIRST,
    M0,
    REGRESSION,
    SD,
    V0,
    X,
    Y,
    constants,
    each_dim,
    flat,
    next_server,
    pinned,
    precision_of,
    prior_at,
    regression_data,
    sent,
    weights_of,
)
from tests.methods.problems import constant_shards, quadratic_task, shards_from, tiny_shards, tiny_task
from tests.methods.verbs import (
    aggregated,
    drawn,
    init_client,
    init_server,
    parameters,
    personalised,
    population,
    predicted,
    updated,
)

# --- the client ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("dim", "precision"), [("joint", "expected"), ("factorised", "mode")])
def test_a_client_of_a_linear_gaussian_model_reaches_its_posterior_mode(dim, precision, momentum):
    pull, x, y = np.diag(precision_of(dim, precision)), X[:8], Y[:8]
    expected = np.linalg.solve(x.T @ x / SD**2 + pull, x.T @ y / SD**2 + pull @ M0)
    found = sent(settled(momentum, dim=dim, precision=precision))
    np.testing.assert_allclose(flat(found.weights), expected, atol=2e-5)


def settled(momentum, step_size=0.1, **options):
    """A method that takes 3000 steps on all of a client's eight examples."""
    optimiser = Optimiser(step_size=step_size * (1 - momentum), momentum=momentum)
    return pinned(optimiser=optimiser, work=Work(epochs=3000, batch_size=8), **options)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_client_under_a_huge_penalty_stays_at_its_own_optimum(momentum):
    method, n0 = settled(momentum), sum(COUNTS) + 3
    rate = method.optimiser.step_size
    scale = np.full(6, (n0 + 2) * rate / (1e6 * 8), np.float32)  # step size x strength = 10⁶
    down = prior_at(weights_of(np.float32(M0)), weights_of(scale))
    pull, x, y = np.diag((n0 + 2) / scale.astype(float)), X[:8], Y[:8]
    assert rate * pull[0, 0] / 8 == pytest.approx(1e6, rel=1e-5)
    expected = np.linalg.solve(x.T @ x / SD**2 + pull, x.T @ y / SD**2 + pull @ M0)
    np.testing.assert_allclose(flat(sent(method, down=down).weights), expected, rtol=1e-6)


ONE_STEP = pinned(stateful=True, optimiser=Optimiser(step_size=0.2), work=Work(batch_size=8))


def test_a_step_is_the_exact_minimum_of_the_linearised_objective():
    start = np.array([1.0, 0.0, -1.0, 2.0, 0.5, 0.0])
    found = flat(sent(ONE_STEP, client=weights_of(np.float32(start))).weights)
    gradient = X[:8].T @ (X[:8] @ start - Y[:8]) / SD**2 / 8
    strength = precision_of("factorised", "mode") / 8
    derivative = gradient + (found - start) / 0.2 + strength * (found - M0)
    np.testing.assert_allclose(derivative, 0, atol=2e-5)


@each_dim
def test_dropout_weakens_the_penalty_on_columns_and_not_on_biases(dim):
    # Inputs of zero: the likelihood is indifferent, and a step is the pull alone.
    silent = shards_from(np.zeros((8, 6), np.float32), np.zeros(8, np.float32), (8,)).of(jnp.int32(0))
    start, method = np.full(6, 2.0), replace(ONE_STEP, dim=dim, keep=0.75, kl_scale=0.5)
    found = flat(sent(method, data=silent, client=weights_of(np.float32(start))).weights)
    strength = 0.5 * precision_of(dim, "mode", keep=0.75) / 8
    np.testing.assert_allclose(found, M0 + (start - M0) / (1 + 0.2 * strength), rtol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_minibatches_of_an_epoch_average_to_the_full_gradient(batch_size):
    method, at = pinned(), np.array([1.0, 0.0, -1.0, 2.0, 0.5, 0.0])
    weights, nothing = weights_of(np.float32(at)), DOWN.frozen

    @jax.jit
    def gradient(i, key):
        strength = method._strength(REGRESSION, DOWN, FIRST)
        batch = FIRST.take(FIRST.order(rng.root(3)), i, batch_size)
        slope = jax.grad(lambda w: method._nll(REGRESSION, Params(w), nothing, batch, key)[0])(weights)
        return jax.tree.map(lambda g, s, w, c: g + s * (w - c), slope, strength, weights, DOWN.mean)

    found = np.mean([flat(gradient(i, rng.root(i))) for i in range(8 // batch_size)], axis=0)
    full = X[:8].T @ (X[:8] @ at - Y[:8]) / SD**2 + precision_of("factorised", "mode") * (at - M0)  # eq. (35)
    np.testing.assert_allclose(found, full / 8, rtol=1e-4)


# --- reductions ------------------------------------------------------------------------------------------------------


@each_dim
def test_without_dropout_and_with_equal_scales_the_client_is_fedprox(dim):
    alpha, (d, n0, _) = 30.0, constants(dim, sum(COUNTS))
    down = prior_at(DOWN.mean, weights_of(np.full(6, alpha, np.float32)))
    # Adam sees the gradient of the penalty, and its path tells every gradient on the way.
    options = {"optimiser": Optimiser("adam", 0.05), "work": Work(epochs=5, batch_size=3)}
    mu = (n0 + d + 1) / (alpha * 8)
    niw = flat(sent(pinned(dim=dim, **options), down=down).weights)
    prox, other = (flat(sent(FedProx(mu=m, **options), down=Params(DOWN.mean))) for m in (mu, 1.02 * mu))
    np.testing.assert_allclose(niw, prox, atol=1e-5)
    assert np.max(np.abs(niw - other)) > 1e-4


@each_dim
def test_on_a_quadratic_both_end_in_the_same_place(dim):
    task, alpha = quadratic_task(num_clients=2, num_examples=8), 10.0
    d, n0, _ = constants(dim, 8, num_weights=2)
    mu, start = (n0 + d + 1) / (alpha * 4), {"body": np.float32(1), "head": np.float32(0)}
    down = prior_at(start, jax.tree.map(lambda _: np.float32(alpha), start))
    data, options = (
        constant_shards(3.0).of(jnp.int32(0)),
        {"optimiser": Optimiser(step_size=0.2), "work": Work(steps=200)},
    )
    niw = flat(sent(pinned(dim=dim, **options), task, down, data=data).weights)
    prox = flat(sent(FedProx(mu=mu, **options), task, Params(start), data=data))
    moved = (3.0 - 1.0) / (2 + mu)  # minimises ½(3 − 1 − 2δ)² + ½μ·2δ²
    np.testing.assert_allclose(niw, [1 + moved, moved], atol=1e-5)
    np.testing.assert_allclose(prox, niw, atol=1e-5)


def test_without_penalty_and_dropout_a_round_is_that_of_fedavg():
    _, _, shards = regression_data((5, 5, 5, 5))
    options = {"optimiser": Optimiser(step_size=0.05, momentum=0.9), "work": Work(epochs=2, batch_size=2)}
    niw, average = pinned(kl_scale=0.0, **options), FedAvg(**options)

    def stacked(method, down):
        data = [shards.of(jnp.int32(k)) for k in range(4)]
        results = [updated(method, REGRESSION, down, (), data[k], rng.root(k))[1] for k in range(4)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *results)

    messages, plain = stacked(niw, DOWN), Params(DOWN.mean)
    expected = flat(next_server(average, REGRESSION, plain, stacked(average, plain)))
    for prior_mean, factor in (("zero", 4 / 5), ("plain", 1.0), ("learned", 1.0)):
        found = next_server(replace(niw, prior_mean=prior_mean), REGRESSION, DOWN, messages)
        np.testing.assert_allclose(flat(found.mean), factor * expected, atol=1e-6)


server_evidence = jax.jit(FedHBNIW.server_evidence)


@pytest.mark.parametrize("precision", ["mode", "expected"])
def test_one_weight_makes_joint_and_factorised_the_same(precision):
    # Under a frozen head one weight is left.
    task, shards = quadratic_task(num_clients=2, num_examples=8), constant_shards(3.0, -1.0)

    def after_a_round(dim):
        method = pinned(dim=dim, precision=precision, update="body", prior_mean="zero", work=Work(epochs=3))
        server = replace(init_server(method, task, rng.root(0)), mean={"body": np.float32(0.7), "head": None})
        results = [updated(method, task, server, (), shards.of(jnp.int32(k)), rng.root(k))[1] for k in range(2)]
        messages = jax.tree.map(lambda *leaves: np.stack(leaves), *results)
        after, _ = aggregated(method, task, server, messages, rng.root(0))
        spread = population(replace(method, global_samples=1), task, after, None, rng.root(0)).spread
        evidence = server_evidence(method, task, after)
        return np.concatenate([flat(messages.payload), flat(after), flat(spread), [spread.dof, float(evidence)]])

    np.testing.assert_array_equal(after_a_round("joint"), after_a_round("factorised"))


# --- what is kept, sent and drawn ------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", [False, True])
def test_a_client_that_learns_nothing_sends_its_reference(linear):
    method = pinned(linear=linear, work=Work(epochs=0))
    payload = sent(method)
    reference = jax.jit(FedHBNIW.reference)(method, REGRESSION, DOWN, payload)
    jax.tree.map(np.testing.assert_array_equal, payload, reference)


def test_clients_with_memory_go_on_from_their_own_weights_and_others_from_the_servers():
    own = weights_of(np.full(6, 7.0, np.float32))
    for stateful, client, start in ((True, own, own), (False, (), DOWN.mean)):
        method = pinned(stateful=stateful, work=Work(epochs=0))
        kept, message, _ = updated(method, REGRESSION, DOWN, client, FIRST, rng.root(0))
        np.testing.assert_array_equal(flat(message.payload.weights), flat(start))
        assert message.weight == 1
        jax.tree.map(np.testing.assert_array_equal, kept, own if stateful else ())
        enrolled = init_client(method, REGRESSION, DOWN, rng.root(0))
        jax.tree.map(np.testing.assert_array_equal, enrolled, DOWN.mean if stateful else ())


def test_a_client_with_memory_keeps_what_it_sends():
    kept, message, _ = updated(ONE_STEP, REGRESSION, DOWN, DOWN.mean, FIRST, rng.root(0))
    np.testing.assert_array_equal(flat(kept), flat(message.payload.weights))
    assert np.all(flat(kept) != flat(DOWN.mean))


@pytest.mark.parametrize("dim", ["joint", "factorised"])
def test_the_first_server_is_that_of_clients_who_all_agree(dim):
    server = init_server(pinned(prior_scale=0.5, dim=dim), REGRESSION, rng.root(0))
    d, n0, _ = constants(dim, sum(COUNTS))
    np.testing.assert_allclose(flat(server.scale), n0 / (REGRESSION.num_clients + d + 2) * 0.25, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "down", "up"),
    [
        ({}, 2 * 39, 39),
        ({"linear": True}, 2 * 39, 2 * 39),
        ({"update": "body"}, 2 * 24 + 15, 24),
        ({"update": "body", "linear": True}, 2 * 24 + 15, 2 * 24),
    ],
)
@each_dim
def test_messages_are_as_large_as_table_6_says(dim, options, down, up):
    model = Linen(MLP((4,), 3))  # 5·4 + 4 weights in the body, 4·3 + 3 in the head
    task = Task(model, Categorical(3), (5,), 3, 15, Head(model.last_layer((5,))))
    method = pinned(dim=dim, **options)
    data = tiny_shards().of(jnp.int32(0))
    server = jax.eval_shape(lambda: init_server(method, task, rng.root(0)))
    broadcast = jax.eval_shape(method.broadcast, server)
    payload = jax.eval_shape(lambda sent: updated(method, task, sent, (), data, rng.root(0)), broadcast)[1].payload
    assert trees.num_bytes(broadcast) == 4 * down
    assert trees.num_bytes(payload) == 4 * up


HEADED = quadratic_task(num_clients=2, num_examples=8)
PINNED = Prior({"body": np.float32(1), "head": None}, {"body": np.float32(1e-9), "head": None}, {}, {})
PINNED = replace(PINNED, frozen={"body": None, "head": np.float32(0.25)})


def test_training_the_body_leaves_the_head_as_the_server_drew_it():
    method = pinned(update="body", work=Work(epochs=3))
    server = init_server(method, tiny_task(), rng.root(0))
    head, body = trees.partition(parameters(tiny_task(), rng.root(0)).weights, tiny_task().is_head)
    jax.tree.map(np.testing.assert_array_equal, server.frozen, head)
    jax.tree.map(np.testing.assert_array_equal, server.mean, body)
    loose = replace(PINNED, scale={"body": np.float32(1e9), "head": None})
    payload = sent(method, HEADED, loose, data=constant_shards(3.0).of(jnp.int32(0)))
    assert payload.weights["head"] is None
    assert payload.weights["body"] != 1
    messages = jax.tree.map(lambda leaf: np.asarray(leaf)[None], Message(payload, np.float32(1)))
    assert next_server(method, HEADED, loose, messages).frozen["head"] == 0.25


def test_personalising_trains_the_head_without_a_pull():
    method = pinned(update="body", finetune_epochs=300, finetune_step_size=0.1)
    found = personalised(method, HEADED, PINNED, (), constant_shards(3.0).of(jnp.int32(0)), rng.root(0)).params.weights
    assert float(found["body"]) == pytest.approx(1, abs=1e-4)  # pinned by its tiny variance
    assert float(found["head"]) == pytest.approx(3 - 1, abs=1e-4)


def test_a_personal_model_is_the_mode_of_eq_46():
    method = pinned(dim="joint", finetune_epochs=3000, finetune_step_size=0.1, work=Work(batch_size=8))
    found = personalised(method, REGRESSION, DOWN, (), FIRST, rng.root(0))
    pull = np.diag(precision_of("joint", "mode"))
    expected = np.linalg.solve(X[:8].T @ X[:8] / SD**2 + pull, X[:8].T @ Y[:8] / SD**2 + pull @ M0)
    np.testing.assert_allclose(flat(found.params.weights), expected, atol=2e-5)
    prediction = predicted(method, REGRESSION, found, jnp.asarray(X[:3], jnp.float32), rng.root(0))
    np.testing.assert_allclose(prediction.outputs[..., 0], (X[:3] @ expected)[None], rtol=1e-4)
    assert prediction.log_weights.shape == (1, 3)


@each_dim
def test_personal_draws_spread_as_the_covariance_at_its_mode(dim):
    method = pinned(dim=dim, personal_samples=7, finetune_epochs=0)
    posterior = personalised(method, REGRESSION, DOWN, (), FIRST, rng.root(0))
    d, n0, _ = constants(dim, sum(COUNTS))
    right = stats.norm(M0, np.sqrt(V0 / (n0 + d + 1)))
    assert posterior.num_samples == 7
    assert_drawn(method, posterior, right)


@each_dim
def test_global_draws_are_a_student_t(dim):
    method = pinned(dim=dim, global_samples=4)
    posterior = population(method, REGRESSION, DOWN, None, rng.root(0))
    _, _, l0 = constants(dim, sum(COUNTS))
    nu = sum(COUNTS) + 3  # n0 − d + 1, whatever d is
    assert_drawn(method, posterior, stats.t(nu, M0, np.sqrt((l0 + 1) * V0 / (l0 * nu))))


def assert_drawn(method, posterior, right):
    """Draws follow a distribution, coordinate by coordinate: 5000 of them, Kolmogorov-Smirnov at 10⁻⁴."""
    num = 5000
    networks = drawn(method, REGRESSION, posterior, rng.root(1), num)
    rows = np.concatenate([np.reshape(leaf, (num, -1)) for leaf in jax.tree.leaves(networks.weights)], axis=1)
    uniform = right.cdf(rows.astype(np.float64))
    for j in range(6):
        assert stats.kstest(uniform[:, j], "uniform").pvalue > 1e-4


def test_draws_predict_together():
    method = pinned(dim="joint", global_samples=4)
    posterior = population(method, REGRESSION, DOWN, None, rng.root(0))
    prediction = predicted(method, REGRESSION, posterior, jnp.asarray(X[:3], jnp.float32), rng.root(2))
    assert prediction.outputs.shape == (4, 3, 1)
    assert len(np.unique(prediction.outputs)) == 12
    np.testing.assert_allclose(prediction.log_weights, np.full((4, 3), -np.log(4)), rtol=1e-6)


def test_without_samples_the_mean_predicts():
    method = pinned()
    x = jnp.asarray(X[:3], jnp.float32)
    for posterior in (
        population(method, REGRESSION, DOWN, None, rng.root(0)),
        personalised(replace(method, finetune_epochs=0), REGRESSION, DOWN, (), FIRST, rng.root(0)),
    ):
        prediction = predicted(method, REGRESSION, posterior, x, rng.root(2))
        np.testing.assert_allclose(prediction.outputs[..., 0], (X[:3] @ M0)[None], rtol=1e-4)


def test_a_frozen_head_is_not_drawn():
    method = pinned(update="body", personal_samples=3, global_samples=3, finetune_epochs=0)
    loose = replace(PINNED, scale={"body": np.float32(10), "head": None})
    data = constant_shards(3.0).of(jnp.int32(0))
    for posterior in (
        population(method, HEADED, loose, None, rng.root(0)),
        personalised(method, HEADED, loose, (), data, rng.root(0)),
    ):
        found = drawn(method, HEADED, posterior, rng.root(1), 5).weights
        np.testing.assert_array_equal(found["head"], 0.25)
        assert len(np.unique(found["body"])) == 5


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def federation():
    """Six clients of two classes and three features, two of them newcomers."""
    draw = np.random.default_rng(0)
    client = np.repeat(np.arange(6), 15)
    x = draw.normal(size=(90, 3)).astype(np.float32)
    y = (np.sum(x * draw.normal(size=(6, 3))[client], axis=1) > 0).astype(int)
    return priory.data.from_arrays(x, y, client, test=0.2, newcomers=0.34, seed=0)


def test_by_default_the_spread_of_clients_does_not_move_the_scale_so_the_pull_is_that_of_fedprox():
    """μ = p (N + 3) / (s0² n_k), as the documentation says, up to the 2/(|D| + 3) between mode and expectation."""
    digits = priory.data.load("digits").partition("dirichlet:0.3", clients=20, seed=0)
    run = priory.simulate(FedHBNIW(), digits, model="linear", rounds=3, seed=0, eval_every=0)
    num_examples, num_clients = run.task.num_examples, 20
    precision = (num_examples + 5) / flat(run.server.scale)  # of the penalty, before p and n_k
    mu = (num_clients + 3) / FedHBNIW().prior_scale ** 2
    assert 0.999 < np.median(precision) / mu < 1.002
    assert np.mean(np.abs(precision / mu - 1) < 0.01) > 0.98


@pytest.mark.slow  # a whole run; tests/engine/test_newcomers.py has the ways in
def test_clients_that_never_took_part_are_onboarded(federation):
    run = priory.simulate(FedHBNIW(stateful=True), federation, model="linear", rounds=2, cohort=2, seed=0, eval_every=0)
    assert len(run.newcomers.per_client["accuracy"]) == federation.num_newcomers == 2
    own = federation.rows(5, "train")
    found = run.onboard(federation.x[own], federation.y[own]).predict(federation.x[:4])
    assert found.probabilities.shape == (4, 2)
    np.testing.assert_allclose(found.probabilities.sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (FedHBNIW(keep=0.0), r"keep=0.0 lies outside \(0, 1\]; choose a probability such as 0.999\.$"),
        (FedHBNIW(keep=1.1), r"keep=1.1 lies outside \(0, 1\]"),
        (FedHBNIW(keep=-1.0), r"keep=-1.0 lies outside \(0, 1\]"),
        (FedHBNIW(keep=float("nan")), r"keep=nan lies outside \(0, 1\]"),
        (FedHBNIW(epsilon=-1.0), r"epsilon=-1.0 is out of range; choose 0 or more\.$"),
        (
            FedHBNIW(epsilon=0.0, learn_scale=True),
            r"epsilon=0.0 leaves learn-scale no scale above zero; choose a",
        ),
        (FedHBNIW(prior_mean="flat"), r"prior-mean='flat' is not known; choose from zero, learned, plain\.$"),
        (FedHBNIW(optimiser=Optimiser("sdg")), r"kind='sdg' is not known; choose from sgd, adam, rmsprop\.$"),
        (FedHBNIW(prior_scale=0.0), r"prior-scale=0.0 is not a positive number; choose one above 0\.$"),
        (FedHBNIW(prior_scale=float("inf")), r"prior-scale=inf is not a positive number"),
        (FedHBNIW(kl_scale=-1.0), r"kl-scale=-1.0 is out of range; choose 0 or more\.$"),
        (FedHBNIW(kl_scale=float("nan")), r"kl-scale=nan is out of range"),
        (FedHBNIW(global_samples=-1), r"global-samples=-1 is out of range; choose 0 or more\.$"),
        (FedHBNIW(personal_samples=-1), r"personal-samples=-1 is out of range; choose 0 or more\.$"),
        (FedHBNIW(finetune_epochs=-1), r"finetune-epochs=-1 is out of range"),
        (FedHBNIW(finetune_step_size=0.0), r"finetune-step-size=0.0 is not a positive number"),
        (FedHBNIW(optimiser=Optimiser(step_size=-1.0)), r"step-size=-1.0 is not a positive number"),
        (FedHBNIW(work=Work(batch_size=0)), r"batch-size=0 is out of range"),
    ],
)
def test_a_bad_value_ends_in_a_sentence(method, sentence):
    with pytest.raises(UsageError, match=sentence):
        method.check()


def test_a_network_that_is_all_head_has_no_body_to_learn(federation):
    with pytest.raises(UsageError, match=r"update=body leaves nothing to learn together, .*; choose update=full or"):
        priory.simulate(FedHBNIW(update="body"), federation, model="linear", rounds=1)


def test_a_bad_value_ends_a_run_before_anything_is_traced(federation, monkeypatch):
    def never(*args):
        raise AssertionError("the method was traced")

    monkeypatch.setattr(FedHBNIW, "init_server", never)
    with pytest.raises(UsageError, match=r"keep=0.0 lies outside"):
        priory.simulate(FedHBNIW(keep=0.0), federation, model="linear", rounds=1)


def test_the_bounds_of_what_is_allowed_are_good():
    FedHBNIW().check()
    FedHBNIW(keep=1.0, epsilon=0.0, kl_scale=0.0).check()
