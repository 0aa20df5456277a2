"""Clients with different networks: groups in the engine."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory import tune
from priory.core.errors import UsageError
from priory.engine import architectures, grouping
from priory.engine.cohort import Participation
from priory.models.model import several

MODELS = ["mlp:4", "linear"]
STEPS = tune.Axis("step-size", ("optimiser", "step_size"), (0.1, 0.2), is_static=False)


def federation(**more):
    """Seven clients of 20 examples with three features and two classes."""
    x = np.random.default_rng(0).normal(size=(140, 3)).astype(np.float32)
    return priory.data.from_arrays(x, (x.sum(axis=1) > 0).astype(int), np.arange(140) % 7, test=0.2, seed=0, **more)


def local(**more):
    return priory.Local(work=priory.Work(epochs=1, batch_size=64), **more)


@pytest.fixture(scope="module")
def held_out():
    """Six clients that take part, and a newcomer."""
    return federation(newcomers=0.15)


def run(data, **more):
    options = {"model": list(MODELS), "rounds": 3, "seed": 1, "eval_every": 0, **more}
    return priory.simulate(local(), data, **options)


@pytest.fixture(scope="module")
def mixed(held_out):
    return run(held_out)


@pytest.fixture(scope="module")
def trained(train, held_out):
    """A run of the same federation without its last evaluation."""

    def run(models, cohort=None, rounds=3, **more):
        return train(local(), held_out, model=models, cohort=cohort, rounds=rounds, seed=1, **more)

    return run


def test_what_was_packed_comes_back_bit_for_bit():
    tree = {
        "wide": np.array([[1.5, -0.0], [np.nan, 3e-39]], np.float32),
        "whole": np.int32(-3),
        "half": np.array([1.5, -2.0], jnp.bfloat16),
        "true": np.array([True, False]),
        "small": np.array([-5, 7], np.int8),
    }
    like = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))
    words = jax.jit(partial(architectures.pack, size=14))(tree)
    assert words.shape == (14,)
    back = jax.jit(partial(architectures.unpack, like=like))(words)
    for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(("clients", "cohort", "groups"), [(30, 4, 3), (20, 10, 3), (10, 5, 3)])
def test_every_client_is_called_equally_often_whatever_its_group(clients, cohort, groups):
    """Over 4000 rounds each group's calls are within 5 standard errors of its part; a count is rounded up or down."""
    part, rounds = Participation(clients, cohort, cohort, groups=groups), 4000
    keys = jax.random.split(jax.random.key(0), rounds)
    drawn = jax.tree.map(np.asarray, jax.jit(jax.vmap(part.draw_groups))(keys))
    sizes = np.array([len(range(g, clients, groups)) for g in range(groups)])
    counts = np.stack([np.sum(slots.uploads, axis=1) for slots in drawn], axis=1)
    exact = cohort * sizes / clients
    assert np.all(counts.sum(axis=1) == cohort)
    assert np.all((counts >= np.floor(exact)) & (counts <= np.ceil(exact)))
    assert np.all(np.abs(counts.mean(axis=0) - exact) < 5 * 0.5 / np.sqrt(rounds))
    for group, slots in enumerate(drawn):
        assert np.all(np.asarray(slots.ids) % groups == group)


def test_bernoulli_draws_are_as_likely_in_every_group():
    part, rounds = Participation(11, 4, 4, "bernoulli", groups=3), 4000
    drawn = jax.tree.map(np.asarray, jax.jit(jax.vmap(part.draw_groups))(jax.random.split(jax.random.key(1), rounds)))
    for slots, size in zip(drawn, (4, 4, 3), strict=True):
        rate = np.sum(slots.uploads) / (rounds * size)
        assert abs(rate - 4 / 11) < 5 * np.sqrt(4 / 11 * 7 / 11 / (rounds * size))


def test_a_list_of_models_keeps_their_numbers_together():
    assert several("mlp:32,16, cnn,reddi:8,pool,32,linear") == ("mlp:32,16", "cnn", "reddi:8,pool,32", "linear")


def test_clients_take_the_models_in_turn(mixed):
    widths = [jax.tree.leaves(mixed.client(i).posterior.weights)[0].shape for i in range(6)]
    assert widths == [(4,), (2,), (4,), (2,), (4,), (2,)]


def test_each_client_trains_as_if_all_had_its_model(mixed, trained):
    data = mixed.federation
    for group, model in enumerate(MODELS):
        alone = trained([model])
        for client in range(group, 6, len(MODELS)):
            models = [one.client(client) for one in (mixed, alone)]
            jax.tree.map(np.testing.assert_array_equal, *(one.posterior.weights for one in models))
            test = data.rows(client, "test")
            accuracy = np.mean(models[1].predict(data.x).label[test] == data.y[test])
            assert mixed.personal.per_client["accuracy"][client] == pytest.approx(accuracy, rel=1e-6)


def test_every_group_gives_its_part_of_a_cohort(trained):
    part = trained(["linear"] * 2, cohort=3, rounds=1)
    joined = [bool(part.evaluator.slot(i).joined) for i in range(6)]
    assert [sum(joined[group::2]) for group in range(2)] in ([2, 1], [1, 2])


def test_a_run_with_several_models_goes_on_from_its_directory(mixed, held_out, tmp_path):
    half, asked = tmp_path / "half", iter([False, True])
    run(held_out, out=half, stop=lambda: next(asked, True))
    whole = priory.resume(half, federation=held_out, model=list(MODELS))
    assert whole.completed == 3
    np.testing.assert_array_equal(whole.personal.per_client["nll"], mixed.personal.per_client["nll"])


@pytest.mark.slow  # test_simulate.py has it for one model
def test_states_on_disk_give_the_same_run(mixed, held_out):
    stored = run(held_out, resident_bytes=0)
    np.testing.assert_array_equal(stored.personal.per_client["nll"], mixed.personal.per_client["nll"])


def test_models_named_by_text_are_those_of_the_list(mixed, held_out):
    named = run(held_out, model=None, models=",".join(MODELS))
    np.testing.assert_array_equal(named.personal.per_client["nll"], mixed.personal.per_client["nll"])
    table = named.summary()["extra"]["architectures"]
    assert {name: row["clients"] for name, row in table.items()} == {"mlp:4": 3, "linear": 3}
    accuracy = named.personal.per_client["accuracy"]
    assert table["mlp:4"]["accuracy"] == pytest.approx(np.mean(accuracy[[0, 2, 4]]))


def test_newcomers_have_the_model_of_their_number(mixed):
    assert mixed.newcomers is not None
    data = mixed.federation
    place = data.rows(6)
    found = mixed.onboard(data.x[place], data.y[place])
    assert jax.tree.leaves(found.posterior.weights)[0].shape == (2,)  # the eighth client, number 7


@pytest.mark.parametrize(
    ("method", "more", "sentence"),
    [
        (priory.FedAvg(), {}, "fedavg exchanges what depends on the network"),
        (priory.Pooled(), {}, "pooled trains one model on everybody's data"),
        (local(), {"cohort": 2}, "cohort=2 cannot hold a client of each of the 3 models"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_runs(method, more, sentence):
    with pytest.raises(UsageError, match=sentence):
        priory.simulate(method, federation(), model=["mlp:7,5", *MODELS], rounds=1, **more)


@pytest.mark.parametrize("model", ["linear", ["linear"]])
def test_one_model_and_several_are_not_both_given(model):
    with pytest.raises(UsageError, match="both name networks"):
        priory.simulate(local(), federation(), model=model, models="linear,mlp:4", rounds=1)


def test_models_that_are_no_text_are_refused():
    with pytest.raises(UsageError, match="give a list as model="):
        priory.simulate(local(), federation(), models=["linear", "mlp:4"], rounds=1)


def test_a_model_whose_clients_have_no_test_rows_has_no_score(mixed):
    found = dataclasses.replace(mixed.personal, per_client={"accuracy": np.array([0.5, np.nan, 0.7])})
    table = grouping.by_architecture(("a", "b"), found)
    assert table["a"] == {"clients": 2, "accuracy": pytest.approx(0.6)}
    assert table["b"] == {"clients": 1, "accuracy": None}


def test_a_model_with_other_classes_is_refused():
    from priory.models.nets import MLP

    with pytest.raises(UsageError, match=r"outputs of shape \(3,\) where the data need \(2,\)"):
        priory.simulate(local(), federation(), model=["linear", MLP((4,), 3)], rounds=1)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [({"models": "linear,mlp:4"}, "tuning compares settings on one"), ({"dp": "local", "dp_noise": 1.0}, "spent anew")],
)
def test_tuning_takes_one_model_and_no_privacy(more, sentence):
    held = federation(validation=0.2)
    method = priory.Local() if "models" in more else priory.FedAvg()
    with pytest.raises(UsageError, match=sentence):
        tune.tune(method, held, [STEPS], seeds=1, settings=priory.Settings(rounds=1, **more))
