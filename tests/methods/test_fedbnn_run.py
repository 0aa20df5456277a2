"""FedBNN in the engine: whole federations, of one architecture and of several."""

import jax
import numpy as np
import pytest

import priory
from priory.core.errors import UsageError
from priory.core.struct import replace

METHOD = priory.FedBNN(
    gamma=0.7, optimiser=priory.Optimiser("sgd", 0.1), work=priory.Work(epochs=2, batch_size=32), samples=3
)
DIGITS = priory.data.load("digits")


def federation(newcomers=2):
    """Six clients and some newcomers."""
    clients = 6 + newcomers
    return DIGITS.partition("classes:5", clients=clients, newcomers=newcomers / clients, align="own:60", seed=0)


# Laws and tests of single visits hold FedBNN to its equations in the fast tier; two federations take half a minute.
trains = pytest.mark.slow


def run(method=METHOD, data=None, **more):
    """Return a run in which a third of the clients takes part in each round."""
    options = {"rounds": 18, "seed": 2, "cohort": 2, "eval_every": 0, "model": "linear", "onboard_visits": 6, **more}
    return priory.simulate(method, data or federation(), **options)


@pytest.fixture(scope="module")
def plain():
    return run()


@pytest.fixture(scope="module")
def several():
    """A run of two architectures, whose server has a cache."""
    return run(replace(METHOD, cache=True), federation(newcomers=0), model=["linear", "mlp:8"], rounds=25)


def posterior(found, client):
    return found.client(client).posterior


@trains
def test_without_mixing_a_client_trains_as_if_it_were_alone_in_the_world(plain):
    """Bit for bit: the same client, number 0, in a federation of six and in one whose other five hold other data."""
    data = federation()
    mine = data.rows(0)
    others = np.ones(len(data.y), bool)
    others[mine] = False
    shuffled = data.y.copy()
    shuffled[others] = np.random.default_rng(0).permutation(shuffled[others])
    changed = priory.data.Federation(**{**vars(data), "y": shuffled})
    alone = METHOD.local_baseline()
    jax.tree.map(np.testing.assert_array_equal, posterior(run(alone, data), 0), posterior(run(alone, changed), 0))
    mixed = [posterior(found, 0).weights.mean for found in (plain, run(METHOD, changed))]
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, mixed), strict=True))


@trains
def test_a_round_costs_as_many_numbers_as_the_alignment_set_needs(plain, several):
    for found in (plain, several):
        assert found.communication == {"down_bytes": 4 * 60 * 10, "up_bytes": 4 * 60 * 10}


@trains
def test_rows_of_the_server_are_distributions_with_and_without_a_cache(plain, several):
    for found in (plain, several):
        mean = np.asarray(found.server.mean)
        assert mean.shape == (60, 10)
        assert np.all(mean >= 0)
        np.testing.assert_allclose(mean.sum(axis=1), np.ones(60), rtol=1e-5)


@trains
def test_the_federation_knows_the_alignment_set_better_than_its_clients_do(plain):
    """Each client has seen five classes; together they have seen all ten."""
    data = plain.federation
    truth = DIGITS.y[data.public_rows.index]
    together = np.mean(np.argmax(plain.server.mean, axis=1) == truth)
    each = [np.mean(plain.predict(i, data.public).label == truth) for i in range(data.num_clients)]
    assert together > np.max(each) + 0.1


@trains
def test_every_architecture_takes_part(several):
    assert set(several.extra["architectures"]) == {"linear", "mlp:8"}
    assert several.personal.accuracy > 0.5


@trains
def test_a_newcomer_with_labels_has_a_model_of_its_own(plain):
    assert plain.newcomers.accuracy > 0.5
    assert plain.newcomers_unlabelled is None
    with pytest.raises(UsageError, match="fedbnn has nothing for a client without data"):
        plain.onboard()


def test_a_federation_without_an_alignment_set_is_told_how_to_get_one():
    with pytest.raises(UsageError, match="--align own:500"):
        run(data=DIGITS.partition("iid", clients=3, seed=0))


def test_a_regression_is_refused():
    data = priory.data.load("synthetic:linear").partition("natural", align="own:20")
    with pytest.raises(UsageError, match="regression"):
        run(data=data, model="linear")
