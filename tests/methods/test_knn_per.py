"""kNN-Per: the vote against brute force, the choice of λ where the better voice is known, and its way back to FedAvg.

With a linear model the embedding is the input itself, so that distances are known.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp, softmax

from priory import FedAvg, KNNPer, Optimiser, UsageError, Work
from priory.core import rng
from priory.core.struct import replace
from priory.models.linen import Linen
from priory.models.model import Head, Params
from priory.models.nets import MLP
from tests.methods.problems import a_round_of, quadratic_task, shards_from, tiny_shards, tiny_task
from tests.methods.verbs import outputs, parameters, personalised, population, predicted

DRAW = np.random.default_rng(8)
X = DRAW.normal(size=(30, 2)).astype(np.float32)
Y = DRAW.integers(0, 3, 30).astype(np.int32)
QUERIES = jnp.asarray(DRAW.normal(size=(9, 2)), jnp.float32)


def linear_task():
    model = Linen(MLP((), 3))
    return replace(tiny_task(), model=model, input_shape=(2,), is_head=Head(model.last_layer((2,))))


def personal(method, x=X, y=Y, weights=None, count=None):
    """What the method makes of one client's examples; the global model is drawn or given."""
    task = linear_task()
    down = parameters(task, rng.root(0)) if weights is None else weights
    shards = shards_from(x, y, (len(x) if count is None else count,), capacity=len(x))
    return task, personalised(method, task, down, (), shards.of(jnp.int32(0)), rng.root(1))


def probabilities(method, task, posterior, x=QUERIES):
    predictive = predicted(method, task, posterior, x, rng.root(2))
    parts = log_softmax(predictive.outputs, axis=-1) + np.asarray(predictive.log_weights)[:, :, None]
    return np.exp(logsumexp(parts, axis=0))


def brute_force(k, scale, x=X, y=Y, queries=QUERIES):
    """p_kNN as it is written."""
    found = np.zeros((len(queries), 3))
    for row, query in enumerate(np.asarray(queries, np.float64)):
        squared = ((x - query) ** 2).sum(axis=1)
        for i in np.argsort(squared)[:k]:
            found[row, y[i]] += np.exp(-squared[i] / (2 * scale))
    return found / found.sum(axis=1, keepdims=True)


def scores(weights):
    """A linear model with the given kernel."""
    return Params({"Dense_0": {"kernel": jnp.asarray(weights, jnp.float32), "bias": np.zeros(3, np.float32)}})


@pytest.mark.parametrize(("k", "scale"), [(1, 1.0), (10, 1.0), (10, 0.1), (30, 3.0)])
def test_the_vote_is_that_of_a_search_by_brute_force(k, scale):
    method = KNNPer(neighbours=k, lam=1.0, kernel_scale=scale)
    np.testing.assert_allclose(probabilities(method, *personal(method)), brute_force(k, scale), atol=2e-5)


def test_fewer_examples_than_neighbours_vote_all():
    method = KNNPer(neighbours=10, lam=1.0)
    found = probabilities(method, *personal(method, X[:4], Y[:4]))
    np.testing.assert_allclose(found, brute_force(4, 1.0, X[:4], Y[:4]), atol=2e-5)


def test_without_a_share_in_the_prediction_it_is_the_global_model():
    method = KNNPer(lam=0.0)
    task, posterior = personal(method)
    logits = outputs(task, posterior.params, QUERIES)
    np.testing.assert_allclose(probabilities(method, task, posterior), softmax(logits, axis=-1), atol=1e-6)


def test_the_prediction_mixes_vote_and_model_as_probabilities():
    method = KNNPer(lam=0.3)
    task, posterior = personal(method)
    logits = outputs(task, posterior.params, QUERIES)
    expected = 0.3 * brute_force(10, 1.0) + 0.7 * softmax(logits, axis=-1)
    np.testing.assert_allclose(probabilities(method, task, posterior), expected, atol=2e-5)


def test_the_population_is_the_global_model():
    method, task = KNNPer(lam=0.5), linear_task()
    down = parameters(task, rng.root(0))
    posterior = population(method, task, down, None, rng.root(1))
    expected = softmax(outputs(task, down, QUERIES), axis=-1)
    np.testing.assert_allclose(probabilities(method, task, posterior), expected, atol=1e-6)
    assert jax.tree.structure(posterior) == jax.tree.structure(personal(method)[1])


@pytest.mark.parametrize("lam", [None, 0.5])
def test_a_client_without_examples_has_the_global_model(lam):
    method = KNNPer(lam=lam)
    task, posterior = personal(method, count=0)
    expected = softmax(outputs(task, posterior.params, QUERIES), axis=-1)
    np.testing.assert_allclose(probabilities(method, task, posterior), expected, atol=1e-6)


def test_a_client_whose_neighbours_agree_under_a_wrong_model_trusts_them():
    x = np.repeat(3 * np.eye(2, dtype=np.float32), 20, axis=0) + 0.01 * DRAW.normal(size=(40, 2)).astype(np.float32)
    y = np.repeat(np.array([0, 1], np.int32), 20)
    wrong = scores([[-5.0, 5.0, 0.0], [5.0, -5.0, 0.0]])
    assert float(personal(KNNPer(), x, y, wrong)[1].lam) == pytest.approx(0.9)  # the largest


def test_a_client_whose_neighbours_know_nothing_keeps_the_global_model():
    """Labels follow a rule that the model knows, at inputs too far apart for neighbours to share them."""
    x = np.stack([np.where(np.arange(40) % 2 == 0, 1, -1), 100 * np.arange(40)], axis=1).astype(np.float32)
    y = (np.arange(40) % 2).astype(np.int32)
    right = scores([[9.0, -9.0, 0.0], [0.0, 0.0, 0.0]])
    assert float(personal(KNNPer(neighbours=1), x, y, right)[1].lam) == 0.0


def test_lambda_maximises_the_likelihood_of_examples_that_only_the_others_vote_for():
    method = KNNPer(grid=4)
    task, posterior = personal(method)
    model = softmax(outputs(task, posterior.params, X), axis=-1)
    grid, likelihood = np.arange(4) / 4, np.zeros(4)
    for i in range(30):
        others = np.arange(30) != i
        vote = brute_force(10, 1.0, X[others], Y[others], X[i : i + 1])[0, Y[i]]
        likelihood += np.log(np.maximum(grid * vote + (1 - grid) * model[i, Y[i]], 1e-38))
    assert np.sort(likelihood)[-1] - np.sort(likelihood)[-2] > 1e-3, "no tie that rounding could decide"
    assert float(posterior.lam) == grid[np.argmax(likelihood)]


def test_lambda_sees_every_example_of_a_store_of_several_blocks():
    """500 pairs far from each other, half of which agree on their class: four blocks."""
    x = np.zeros((1000, 2), np.float32)
    x[:, 0] = 100 * (np.arange(1000) // 2)
    y = np.repeat(np.arange(500) % 3, 2).astype(np.int32)  # of one class
    y[::4] = (y[::4] + 1) % 3  # but every second pair, which disagrees
    method = KNNPer(neighbours=1)
    found = float(personal(method, x, y, scores(np.zeros((2, 3))))[1].lam)
    # Half of the votes are right, half wrong: λ + (1 − λ)/3 and (1 − λ)/3 are likeliest together at λ = ¼.
    likelihood = [np.log(lam + (1 - lam) / 3) + np.log((1 - lam) / 3) for lam in np.arange(10) / 10]
    assert found == pytest.approx(np.argmax(likelihood) / 10)


def test_a_client_of_one_example_has_nobody_to_choose_by_and_keeps_the_global_model():
    assert float(personal(KNNPer(), X[:1], Y[:1])[1].lam) == 0.0


def test_the_datastore_holds_every_example_once():
    store = personal(KNNPer(work=Work(batch_size=7)))[1].store
    assert int(store.count) == 30
    found = np.column_stack([store.features[:30], store.labels[:30]])
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, np.column_stack([X, Y]).tolist()))
    assert not np.asarray(store.features[30:]).any()


def test_a_full_datastore_holds_some_of_the_examples_once():
    store = personal(KNNPer(neighbours=3, capacity=11, work=Work(batch_size=4)))[1].store
    assert int(store.count) == 11
    rows = {tuple(row) for row in np.asarray(store.features).tolist()}
    assert len(rows) == 11
    assert rows <= {tuple(row) for row in X.tolist()}


def test_a_prediction_does_not_depend_on_how_many_are_asked_for_at_once():
    method = KNNPer(lam=0.5)
    task, posterior = personal(method)
    many = np.tile(QUERIES, (60, 1))  # 540 queries: two blocks and a rest
    found = probabilities(method, task, posterior, many)
    np.testing.assert_allclose(found, np.tile(probabilities(method, task, posterior), (60, 1)), atol=1e-5)


def test_a_round_is_that_of_fedavg():
    task, shards = tiny_task(), tiny_shards()
    same = {"optimiser": Optimiser(step_size=0.05, momentum=0.9), "work": Work(epochs=2, batch_size=3)}
    rounds = [a_round_of(method, task, shards) for method in (KNNPer(**same), FedAvg(**same))]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), *rounds)


def test_a_regression_is_refused_in_one_sentence():
    with pytest.raises(UsageError, match=r"^knn-per .*regression; choose .*\.$"):
        KNNPer().init_server(quadratic_task(), rng.root(0))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (KNNPer(neighbours=0), "neighbours=0"),
        (KNNPer(lam=1.5), "lam=1.5"),
        (KNNPer(grid=1), "grid=1"),
        (KNNPer(kernel_scale=0.0), "kernel-scale=0.0"),
        (KNNPer(capacity=5), "capacity=5 has no room for neighbours=10"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_hyper_parameter_ends_in_one_sentence(method, says):
    with pytest.raises(UsageError) as caught:
        method.check()
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")
