"""FedHB-Mixture through the simulator: one to ten prototypes, newcomers, bad settings, and the bound on log p(D)."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory import FedHBMixture, Optimiser, Work
from priory.bayes import mixture
from priory.core import rng, trees
from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.engine.rounds import run_block
from priory.fed.capabilities import Evidence
from priory.methods.fedhb_mixture import Update
from tests.methods.mixture_problem import BODY, each_prior, location, num_rows, pinned
from tests.methods.problems import constant_shards, quadratic_task, shards_from

# --- through the simulator -------------------------------------------------------------------------------------------


def two_kinds(num_clients, newcomers=0.0, seed=0):
    """Clients of two features whose labels follow the first, those of odd number the other way round."""
    draw = np.random.default_rng(seed)
    client = np.repeat(np.arange(num_clients), 20)
    x = draw.normal(size=(len(client), 2)).astype(np.float32)
    x[:, 0] += 0.5 * np.sign(x[:, 0])
    y = ((x[:, 0] > 0) ^ (client % 2 == 1)).astype(int)
    return priory.data.from_arrays(x, y, client, test=0.25, seed=0, newcomers=newcomers)


def run_of(num, data, finetune_step_size):
    """Return a run with a number of prototypes, in which six clients take part in each round."""
    method = pinned(
        num_prototypes=num,
        optimiser=Optimiser(step_size=0.5),
        work=Work(epochs=2, batch_size=5),
        finetune_step_size=finetune_step_size,
    )
    options = {"rounds": 10, "model": "linear", "cohort": 6, "eval_every": 0, "seed": 0, "onboard_visits": 0}
    return priory.simulate(method, data, **options)


@pytest.mark.slow  # whole runs; the one below has two
@pytest.mark.parametrize("num", [1, 10])
def test_a_run_with_one_or_ten_prototypes_is_sound(num):
    """Ten are more than the two outputs of a gate."""
    run = run_of(num, two_kinds(12, newcomers=0.34 if num == 1 else 0.0), finetune_step_size=0.5)
    assert num_rows(run.server.networks) == num
    assert bool(trees.all_finite(run.server))
    assert run.personal.accuracy > 0.8
    assert 0 < run.population.nll < 5
    assert math.isfinite(run.elbo().total)
    d = 2 * 2 + 2
    assert run.communication == {"down_bytes": 4 * (num + 1) * d, "up_bytes": 4 * 2 * d}


def test_two_prototypes_find_two_kinds_of_clients_and_newcomers_find_theirs():
    """Without fine-tuning or visits a newcomer only chooses a prototype; one for all could be right for half."""
    data, never = two_kinds(12, newcomers=0.34), 1e-30
    run, alone = (run_of(num, data, finetune_step_size=never) for num in (2, 1))
    assert data.num_newcomers == 4
    assert run.newcomers.accuracy > 0.95
    assert alone.newcomers.accuracy < 0.75
    x = np.random.default_rng(5).normal(size=(60, 2)).astype(np.float32)
    for y in (x[:, 0] > 0, x[:, 0] < 0):
        model = run.onboard(x, y.astype(int))
        assert np.mean(np.argmax(model.predict(x).probabilities, axis=1) == y) > 0.9


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_prototypes": 0}, r"num-prototypes=0 is out of range; choose 1 or more\."),
        ({"num_prototypes": -1}, r"num-prototypes=-1 is out of range; choose 1 or more\."),
        ({"variance": 0.0}, r"variance=0.0 is not a positive number; choose one above 0\."),
        ({"variance": -1.0}, r"variance=-1.0 is not a positive number; choose one above 0\."),
        ({"variance": math.nan}, r"variance=nan is not a positive number; choose one above 0\."),
        ({"epsilon": -1.0}, r"epsilon=-1.0 is out of range; choose 0 or more\."),
        ({"empty": "zero"}, r"empty=zero has no prior mean of zero .*; add prior-mean=zero, or leave empty=keep\."),
        ({"start": "nowhere"}, r"start='nowhere' is not known; choose from best, centre, last\."),
        ({"separation": -1.0}, r"separation=-1.0 is out of range; choose 0 or more\."),
        ({"finetune_epochs": -1}, r"finetune-epochs=-1 is out of range; choose 0 or more\."),
        ({"finetune_step_size": 0.0}, r"finetune-step-size=0.0 is not a positive number; choose one above 0\."),
        ({"optimiser": Optimiser(step_size=-1.0)}, r"step-size=-1.0 is not a positive number; choose one above 0\."),
        ({"work": Work(batch_size=0)}, r"batch-size=0 is out of range; choose 1 or more\."),
    ],
)
def test_a_bad_setting_ends_in_a_sentence(options, sentence):
    with pytest.raises(UsageError, match=f"^{sentence}$"):
        FedHBMixture(**options).check()


def test_more_prototypes_than_clients_end_in_a_sentence_before_anything_is_compiled_or_written(tmp_path):
    data, before = two_kinds(6, newcomers=0.34), run_block._cache_size()
    with pytest.raises(UsageError) as caught:
        priory.simulate(FedHBMixture(num_prototypes=5), data, rounds=1, model="linear", out=tmp_path / "run")
    assert str(caught.value) == "num-prototypes=5 exceeds the 4 clients of this federation; choose 1 to 4."
    assert run_block._cache_size() == before
    assert not (tmp_path / "run").exists()


def test_a_body_that_is_empty_ends_in_a_sentence():
    with pytest.raises(UsageError) as caught:
        priory.simulate(FedHBMixture(update="body"), two_kinds(4), rounds=1, model="linear")
    assert str(caught.value) == (
        "update=body leaves nothing to learn together, for the head is the whole network; "
        "choose update=full or a model with hidden layers."
    )


# --- the bound -------------------------------------------------------------------------------------------------------


@each_prior
def test_the_bound_with_one_prototype_is_that_of_the_formulas(prior_mean):
    r, m, variance, epsilon, y = 0.7, 1.2, 0.3, 0.05, np.array([1.0, 2.0, 0.5, 1.5], np.float32)
    method = replace(BODY, variance=variance, epsilon=epsilon, prior_mean=prior_mean, work=Work(batch_size=3))
    data, down = shards_from(np.zeros((4, 1), np.float32), y, (4,)).of(jnp.int32(0)), location(r)
    payload = Update({"body": jnp.float32(m), "head": None}, {}, None)
    assert isinstance(method, Evidence)
    found, off_centre = float(method.server_evidence(quadratic_task(), down)), r**2 if prior_mean == "zero" else 0.0
    assert found == pytest.approx(-0.5 * (epsilon**2 + off_centre - 1 - 2 * math.log(epsilon)), rel=1e-5)

    each = jax.jit(jax.vmap(lambda key: method.client_evidence(quadratic_task(), down, payload, data, key)))
    draws = np.asarray(each(jax.random.split(jax.random.key(0), 4000)), np.float64)
    nll = 0.5 * np.sum((y - m) ** 2 + epsilon**2 + math.log(2 * math.pi))  # of θ ~ N(m, ε²)
    # θ − μ has mean m − r and variance 2ε².
    prior = -0.5 * math.log(2 * math.pi * variance) - ((m - r) ** 2 + 2 * epsilon**2) / (2 * variance)
    entropy = 0.5 * (1 + math.log(2 * math.pi) + 2 * math.log(epsilon))
    error = np.std(draws) / math.sqrt(len(draws))
    assert error < 2e-3
    assert abs(np.mean(draws) - (entropy + prior - nll)) < 4 * error


def test_the_bound_lies_below_log_evidence():
    """One client and one example: μ ~ N(0, 1), θ ~ N(μ, σ²), y ~ N(θ, 1), hence y ~ N(0, 2 + σ²)."""
    y, variance, num_draws = 1.3, 0.4, 500
    data, task = constant_shards(y, counts=(1,)).of(jnp.int32(0)), quadratic_task(1, 1)
    truth = -0.5 * (math.log(2 * math.pi * (2 + variance)) + y**2 / (2 + variance))

    @jax.jit
    def bounds(epsilon, r, m):
        method, down = replace(BODY, variance=variance, epsilon=epsilon, prior_mean="zero"), location(r)
        payload = Update({"body": m, "head": None}, {}, None)
        keys = jax.random.split(jax.random.key(0), num_draws)
        each = jax.vmap(lambda key: method.client_evidence(task, down, payload, data, key))(keys)
        return method.server_evidence(task, down) + each

    grid = itertools.product([0.1, 0.3, 0.5, 0.8], [0.0, 0.5, 1.0], [0.0, 0.5, 1.0])
    found = np.array([bounds(*map(np.float32, place)) for place in grid], np.float64)
    mean, error = found.mean(axis=1), found.std(axis=1) / math.sqrt(num_draws)
    assert np.all(mean < truth + 4 * error)
    assert truth - np.max(mean) < 0.5


evidence = jax.jit(lambda method, *arguments: method.client_evidence(*arguments))


@pytest.mark.parametrize("linear", [False, True])
def test_the_bound_is_the_same_for_shares(linear):
    method, task, down = replace(BODY, variance=0.4, linear=linear), quadratic_task(), location(0.5)
    data = constant_shards(1.0).of(jnp.int32(0))
    point = {"body": jnp.float32(0.8), "head": None}
    sent = mixture.share_out(point, down.networks, 0.4) if linear else point
    found = evidence(method, task, down, Update(sent, {}, None), data, rng.root(0))
    plain = evidence(replace(method, linear=False), task, down, Update(point, {}, None), data, rng.root(0))
    np.testing.assert_allclose(found, plain, rtol=1e-6)
