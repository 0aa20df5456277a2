"""FedBNN in the engine: whole federations, of one architecture and of several."""

import jax
import numpy as np
import pytest

import priory
from priory.core.errors import UsageError

METHOD = priory.FedBNN(
    gamma=0.7, optimiser=priory.Optimiser("adam", 0.005), work=priory.Work(epochs=2, batch_size=32), samples=3
)
DIGITS = priory.data.load("digits")


def federation(clients=6, **more):
    return DIGITS.partition("classes:5", clients=clients, seed=0, **{"align": "own:60", **more})


def run(method=METHOD, data=None, **more):
    options = {"rounds": 4, "seed": 2, "eval_every": 0, "model": "mlp:16", **more}
    return priory.simulate(method, data or federation(), **options)


@pytest.fixture(scope="module")
def whole():
    return run()


def posterior(found, client):
    return found.client(client).posterior


def test_without_mixing_a_client_trains_as_if_it_were_alone_in_the_world():
    """Bit for bit: the same client, number 0, in a federation of six and in one whose other five hold other data."""
    data = federation()
    mine = data.rows(0)
    others = np.ones(len(data.y), bool)
    others[mine] = False
    shuffled = data.y.copy()
    shuffled[others] = np.random.default_rng(0).permutation(shuffled[others])
    changed = priory.data.Federation(**{**vars(data), "y": shuffled})
    alone = METHOD.alone()
    jax.tree.map(np.testing.assert_array_equal, posterior(run(alone, data), 0), posterior(run(alone, changed), 0))
    mixed = [posterior(run(METHOD, each), 0).weights.mean for each in (data, changed)]
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, mixed), strict=True))


@pytest.mark.parametrize("model", ["linear", "mlp:64"])
def test_a_round_costs_as_many_numbers_as_the_alignment_set_needs(model):
    found = run(model=model, rounds=1)
    assert found.communication == {"down_bytes": 4 * 60 * 10, "up_bytes": 4 * 60 * 10}


def test_rows_of_the_server_are_distributions(whole):
    mean = np.asarray(whole.server.mean)
    assert mean.shape == (60, 10)
    assert np.all(mean >= 0)
    np.testing.assert_allclose(mean.sum(axis=1), np.ones(60), rtol=1e-5)


def test_the_federation_knows_the_alignment_set_better_than_its_clients_do(whole):
    """Each client has seen five classes; together they have seen all ten."""
    data = whole.federation
    truth = DIGITS.y[data.public_rows.index]
    together = np.mean(np.argmax(whole.server.mean, axis=1) == truth)
    each = [np.mean(whole.predict(i, data.public).label == truth) for i in range(data.num_clients)]
    assert together > np.max(each) + 0.1


def test_every_architecture_takes_part():
    found = run(model=["linear", "mlp:8", "mlp:24"])
    assert set(found.extra["architectures"]) == {"linear", "mlp:8", "mlp:24"}
    assert found.server.mean.shape == (60, 10)
    assert found.personal.accuracy > 0.5


def test_partial_participation_works_with_and_without_a_cache():
    for cache in (False, True):
        method = priory.FedBNN(cache=cache, optimiser=METHOD.optimiser, samples=2)
        found = run(method, cohort=2, model=["linear", "mlp:8"], rounds=5)
        np.testing.assert_allclose(np.sum(found.server.mean, axis=1), np.ones(60), rtol=1e-5)


def test_a_newcomer_with_labels_has_a_model_of_its_own():
    found = run(data=federation(clients=8, newcomers=0.25), rounds=6, onboard_visits=6)
    assert found.newcomers.accuracy > 0.5
    assert found.newcomers_unlabelled is None
    with pytest.raises(UsageError, match="fedbnn has nothing for a client without data"):
        found.onboard()


def test_a_federation_without_an_alignment_set_is_told_how_to_get_one():
    with pytest.raises(UsageError, match="--align own:500"):
        run(data=DIGITS.partition("iid", clients=3, seed=0))


def test_a_regression_is_refused():
    data = priory.data.load("synthetic:linear").partition("natural", align="own:20")
    with pytest.raises(UsageError, match="regression"):
        run(data=data, model="linear")
