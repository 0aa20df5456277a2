"""Whole runs of FedVI: context that inputs alone give, regression, every form, and what a user may get wrong."""

from functools import cache

import flax.linen as nn
import jax
import numpy as np
import pytest

import priory
from priory import FedVI, Optimiser, Work
from priory.core.errors import UsageError
from priory.fed.capabilities import AdviceWarning, Unlabelled

QUICK = {"width": 32, "server_step_size": 1.0, "optimiser": Optimiser(step_size=0.1)}


@cache
def plain():
    """Return a run on digits where each client's are turned its own way; which one, its inputs tell."""
    rotated = priory.data.load("digits").partition(
        "iid", clients=20, newcomers=0.2, seed=0, transform="rotate-by-client"
    )
    method = FedVI(optimiser=Optimiser(step_size=0.1), server_step_size=1.0, work=Work(batch_size=64))
    return priory.simulate(method, rotated, rounds=60, model="mlp:64", eval_every=15, seed=0)


def sloping(num=20, examples=12):
    """y = 2x + z_k + noise of 0.3; the inputs of client k lie around z_k, so that they tell it."""
    draw = np.random.default_rng(2)
    client = np.repeat(np.arange(num), examples)
    z = draw.normal(size=num)[client]
    x = z + draw.normal(size=len(client))
    y = 2 * x + 2 * z + 0.3 * draw.normal(size=len(client))
    inputs = np.stack([x, np.ones_like(x)], axis=1).astype(np.float32)
    scale = np.full(len(y), 0.3, np.float32)
    return inputs, y.astype(np.float32), client, scale


FORMS = {  # every option and every scale of a regression, in as few programs as hold them all
    "gaussian over theta, samples, sum": {
        "gamma": 1e-3, "samples": 3, "reduction": "sum", "width": 8, "optimiser": Optimiser(step_size=0.01),
    },
    "overlap, steps, refined": {"overlap": True, "work": Work(steps=9, batch_size=8), "refine_epochs": 2},
    "a third is support, momentum": {"support": 1 / 3, "server_momentum": 0.5},
}  # fmt: skip
SCALES = dict(zip(FORMS, ("fixed", "column", "learned"), strict=True))
MODELS = dict(zip(FORMS, ("linear", "mlp:32", "mlp:32"), strict=True))


@cache
def regression(form):
    """Return the run of a form under its scale."""
    scale = SCALES[form]
    x, y, client, known = sloping()
    data = priory.data.from_arrays(x, y, client, scale=known if scale == "column" else None, task="regression", seed=0)
    settings = {} if scale == "column" else {"scale": 1.0 if scale == "fixed" else "learned"}
    step = Optimiser(step_size=0.001 if scale == "column" else 0.05)
    method = FedVI(**QUICK | {"optimiser": step, "server_momentum": 0.0} | FORMS[form])
    return priory.simulate(method, data, rounds=60, model=MODELS[form], eval_every=15, seed=0, **settings)


AT_ONCE = ("a third is support, momentum",)  # a test below looks at it


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in AT_ONCE else pytest.mark.slow) for form in FORMS]
)
def test_every_form_learns_a_regression(form):
    run = regression(form)
    assert run.personal.rmse < 0.5 * np.std(sloping()[1])
    assert not run.extra["rejected"]


def test_the_scale_of_a_regression_is_learned():
    run = regression("a third is support, momentum")
    log_scale = float(run.server.weights["embedding"]["log_scale"])
    assert log_scale != 0.0
    assert abs(log_scale - np.log(run.personal.rmse)) < 0.7


@pytest.mark.slow  # sixty rounds on digits
def test_where_inputs_tell_the_context_personal_models_beat_the_global_one():
    """By 11 points of accuracy at this seed; two standard errors of a difference are below 5 on 288 test examples."""
    run = plain()
    assert run.personal.accuracy > run.population.accuracy + 0.05
    assert run.personal.accuracy > 0.75
    assert not run.extra["rejected"]
    assert run.newcomers_unlabelled.accuracy > run.newcomers_global.accuracy
    # Nothing of a client's posterior comes from its labels, so they are worth nothing to a newcomer.
    assert run.newcomers.accuracy == run.newcomers_unlabelled.accuracy


@pytest.fixture(params=[pytest.param(form, marks=pytest.mark.slow) for form in ("point", "gaussian")])
def told(request):
    return plain() if request.param == "point" else regression("gaussian over theta, samples, sum")


def test_the_pieces_of_the_bound_are_told_at_every_evaluation(told):
    lines = [line["info"] for line in told.history]
    assert len(lines) >= 2
    for info in lines:
        assert info["risk"] > 0
        assert info["kl"] > 0
        assert (info["kl_global"] > 0) == (told.method.gamma is not None)
        assert info["skipped"] == 0


def test_theta_travels_both_ways_and_a_gaussian_over_it_takes_twice_the_bytes(told):
    point, width = told.method.gamma is None, told.method.width
    # The embedding of a linear model is its two inputs, without weights.
    embedding, num_global, num_local, outputs = ((64 + 1) * 64, 51, 13, 10) if point else (0, 1, 1, 1)
    constructor = (num_global + 1) * width + (width + 1) * width + (width + 1) * (2 * num_local + 1) * outputs
    expected = 4 * (embedding + constructor + (num_global + 1) * outputs) * (1 if point else 2)
    assert told.communication == {"down_bytes": expected, "up_bytes": expected}


def test_it_infers_from_inputs_alone():
    assert isinstance(FedVI(), Unlabelled)


# --- what a user may get wrong ---------------------------------------------------------------------------------------


def little(counts=(1, 4, 4, 4)):
    """Clients with few examples, all for training."""
    draw = np.random.default_rng(0)
    client = np.repeat(np.arange(len(counts)), counts)
    x = draw.normal(size=(len(client), 4, 4, 1)).astype(np.float32)
    return priory.data.from_arrays(x, np.arange(len(client)) % 3, client, test=0.0)


def test_a_client_with_one_example_is_skipped_and_the_user_is_told():
    sentence = "25% of a round's clients have fewer than 2 examples .* --min-examples 2, or use --overlap"
    with pytest.warns(AdviceWarning, match=sentence):
        run = priory.simulate(FedVI(**QUICK), little(), rounds=2, model="linear", eval_every=0)
    assert run.extra["advice"]


@pytest.mark.slow  # a run of its own; test_fedvi.py has it for one visit
def test_with_overlap_nobody_is_skipped():
    run = priory.simulate(FedVI(overlap=True, **QUICK), little(), rounds=2, model="linear", eval_every=0)
    assert "advice" not in run.extra


@pytest.mark.slow  # a run of its own; test_fedvi.py has it for one visit
def test_a_federation_of_clients_with_one_example_leaves_the_server_where_it_was():
    with pytest.warns(AdviceWarning, match="100% of a round's clients"):
        runs = [
            priory.simulate(FedVI(**QUICK), little((1, 1, 1)), rounds=rounds, model="linear", eval_every=0)
            for rounds in (1, 3)
        ]
    jax.tree.map(np.testing.assert_array_equal, runs[0].server, runs[1].server)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"support": 0.0}, r"support=0.0 lies outside \(0, 1\); choose a share such as 0.5"),
        ({"support": 1.0}, r"support=1.0 lies outside \(0, 1\); choose a share such as 0.5"),
        ({"local_share": 0.0}, r"local-share=0.0 lies outside \(0, 1\); choose a share such as 0.2"),
        ({"local_share": 1.0}, r"local-share=1.0 lies outside \(0, 1\); choose a share such as 0.2"),
        ({"local_share": 0.99}, "local-share=0.99 of 16 features leaves no global one; choose another share"),
        ({"local_share": 1e-12}, "local-share=1e-12 of 16 features leaves no local one; choose another share"),
        ({"tau": -1e-9}, "tau=-1e-09 is out of range; choose 0 or more"),
        ({"tau": float("nan")}, "tau=nan is out of range"),
        ({"gamma": -1.0}, "gamma=-1.0 is out of range; choose 0 or more"),
        ({"prior_sd": 0.0}, "prior-sd=0.0 is not a positive number"),
        ({"width": 0}, "width=0 is out of range"),
        ({"samples": -1}, "samples=-1 is out of range"),
        ({"refine_epochs": -1}, "refine-epochs=-1 is out of range"),
        ({"refine_step_size": 0.0}, "refine-step-size=0.0 is not a positive number"),
        ({"server_step_size": 0.0}, "server-step-size=0.0 is not a positive number"),
        ({"server_momentum": 1.0}, r"server-momentum=1.0 lies outside \[0, 1\); choose one such as 0.9"),
        ({"reduction": "median"}, "reduction='median' is not known; choose from mean, sum"),
        ({"work": Work(batch_size=1)}, "batch-size=1 has no room for support and query; choose 2 or more"),
    ],
    ids=str,
)
def test_a_bad_setting_is_refused_in_one_sentence(fields, sentence):
    with pytest.raises(UsageError, match=sentence):
        priory.simulate(FedVI(**fields), little(), rounds=1, model="mlp:16")


class Pixels(nn.Module):
    """The last layer sees an image; `tests/fed/test_embedding.py` has the other networks that do not fit."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Conv(4, (3, 3))(x))).mean(axis=(1, 2))


UNFIT = {
    "an image before the last layer": {"model": Pixels()},
    "nothing but a constant": {"model": "intercept"},
    "a head of two layers": {"model": "mlp:16,16", "head": "Dense_1|Dense_2"},
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_network_without_a_vector_of_features_is_refused_in_one_sentence(kind):
    with pytest.raises(UsageError, match=r"has no embedding that is a vector.*; flatten before nn.Dense") as error:
        priory.simulate(FedVI(), little(), rounds=1, **UNFIT[kind])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
