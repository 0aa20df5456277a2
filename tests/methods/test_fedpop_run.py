"""Whole runs of FedPop: populations that are no Gaussian, compressed gradients, other kernels and states."""

from functools import cache

import jax
import numpy as np
import pytest
from scipy import optimize

import priory
from priory import FedPop, Optimiser
from priory.bayes import kernels
from priory.core import trees
from priory.core.struct import replace
from priory.fed.capabilities import AdviceWarning
from priory.fed.channel import Clip
from tests.methods.mixed_problem import DIM, RANK
from tests.methods.verbs import population


def two_kinds(num: int = 30, examples: int = 5):
    """Clients whose mean is 2 or −2, but for little; nothing lies between."""
    draw = np.random.default_rng(0)
    z = np.where(np.arange(num) % 2 == 0, 2.0, -2.0) + 0.2 * draw.normal(size=num)
    client = np.repeat(np.arange(num), examples)
    y = z[client] + 0.3 * draw.normal(size=len(client))
    x, scale = np.ones((len(y), 1), np.float32), np.full(len(y), 0.3, np.float32)
    return priory.data.from_arrays(x, y.astype(np.float32), client, scale=scale, task="regression", test=0.0)


@pytest.mark.slow  # 500 rounds of a program that no other test shares
def test_an_energy_learns_a_population_of_two_kinds():
    """Of a normal population with that spread 38 % would lie between −1 and 1; of the energy's particles hardly any."""
    method = FedPop(kernel="mala", prior="energy", particles=128, prior_sd=2.0, prior_step_size=0.015)
    settings = {"rounds": 500, "model": "intercept", "schedule": ("prior-step-size=cosine",), "eval_every": 0}
    run = priory.simulate(method, two_kinds(), client_batch=30, **settings)
    particles = np.asarray(run.server.crowd["intercept"])[:, 0]
    assert np.mean(np.abs(particles) < 1) < 0.1
    assert min(np.mean(particles > 1), np.mean(particles < -1)) > 0.1
    newcomer = population(run.method, run.task, run.method.broadcast(run.server), None, jax.random.key(0))
    assert np.mean(np.abs(newcomer.z["intercept"]) < 1) < 0.1


@cache
def partitioned(test):
    data = priory.data.load(f"synthetic:representation:clients=20,examples=20,dim={DIM},rank={RANK},seed=1")
    return data.partition("natural", test=test, seed=0)


@pytest.fixture(scope="module")
def representation():
    return partitioned(0.2)


@pytest.fixture(scope="module")
def untested():
    """The same clients without test examples: a run of them compiles no evaluation."""
    return partitioned(0.0)


QUICK = {"rounds": 100, "model": f"factor:{RANK}", "eval_every": 0}
FORMS = {  # every kernel, prior and score that other tests do not run, in as few programs as hold them all
    "sgld, stateless, scalar draws": FedPop(
        kernel="sgld", batch_size=4, stateful=False, prior="scalar", prior_draws=10
    ),
    "psgld, scalar": FedPop(kernel="psgld", gamma=0.01, batch_size=4, prior="scalar", prior_sigma="half-normal:1"),
    "map, frozen": FedPop(kernel="map", freeze_prior=True),
    "nuts, mixed": FedPop(kernel="nuts", score="mixed", steps=3, burn_in=1, warm_up=5, samples=5),
}


def with_adam(method):
    return replace(method, optimiser=Optimiser("adam", 0.05))


@pytest.fixture(scope="module")
def form(representation):
    """Return the run of a form."""

    @cache
    def run(name):
        return priory.simulate(with_adam(FORMS[name]), representation, **QUICK)

    return run


AT_ONCE = ("psgld, scalar",)  # a test below trains it too


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in AT_ONCE else pytest.mark.slow) for name in FORMS]
)
def test_every_form_learns(name, form, representation):
    """Better than the predictive of a model that knows nothing, on examples that no client trained on."""
    run = form(name)
    nothing = np.sqrt(np.mean(representation.y**2))
    assert run.personal.rmse < 0.8 * nothing
    assert not run.extra["rejected"]


ONE_ROUND = QUICK | {"rounds": 1, "compress": "qsgd:16"}


@pytest.mark.filterwarnings("ignore::priory.fed.capabilities.AdviceWarning")  # one round is too little
def test_only_the_gradient_of_the_body_is_compressed(untested):
    """32 bits for each number of I, and of J one norm and 1 + 5 bits a number."""
    run = priory.simulate(FedPop(gamma=0.003), untested, **ONE_ROUND)
    assert run.communication["up_bytes"] == (32 * 2 * RANK + 32 + 6 * DIM * RANK) // 8
    assert run.communication["down_bytes"] == 4 * (2 * RANK + DIM * RANK)


@pytest.mark.filterwarnings(
    "ignore:Training diverged:priory.fed.capabilities.AdviceWarning"
)  # as the other warning says
def test_a_step_size_beyond_the_limit_is_warned_of(untested):
    with pytest.warns(AdviceWarning, match="gamma=0.02 is above the stability limit of 100% of the clients"):
        priory.simulate(FedPop(gamma=0.02), untested, **ONE_ROUND)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"compress": "top:0.1"}, "compress=top:0.1"),
        ({"compress": None, "channel": Clip(1.0)}, r"channel=Clip\(norm=1.0"),
    ],
)
def test_a_biased_compression_is_warned_of_once_and_the_warning_is_kept(untested, how, said):
    with pytest.warns(AdviceWarning, match=rf"{said}.* is biased, and .* \(H3\) needs .*; use compress=qsgd") as told:
        run = priory.simulate(FedPop(gamma=0.003), untested, **(ONE_ROUND | {"rounds": 0} | how))
    assert [one.category for one in told] == [AdviceWarning]
    assert run.summary()["extra"]["advice"] == {"bias": str(told[0].message)}


@pytest.mark.slow  # the runs of the test above
def test_a_stateless_client_keeps_nothing_and_a_stateful_one_its_last_state(form):
    runs = {False: form("sgld, stateless, scalar draws"), True: form("psgld, scalar")}
    assert all(run.method.stateful == stateful for stateful, run in runs.items())
    sizes = {stateful: trees.size(run.evaluator.ready.record.client) for stateful, run in runs.items()}
    assert sizes == {False: 0, True: RANK}


def test_a_chain_that_is_not_finite_is_left_out_counted_and_named(representation):
    """A step size near the largest number overflows within a round."""
    method = with_adam(replace(FORMS["psgld, scalar"], gamma=1e38))
    with pytest.warns(AdviceWarning, match=r"^Training diverged: .* --gamma \(now 1e\+38\)"):
        run = priory.simulate(method, representation, **QUICK | {"rounds": 2})
    assert run.extra["rejected"] == dict.fromkeys(representation.clients, 2)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(run.server))


def sloping(num: int = 100, examples: int = 10, noise: float = 0.5):
    """y = z_k + 2x + noise with z_k ~ N(1, 0.5²): a random intercept and a fixed slope."""
    draw = np.random.default_rng(2)
    client = np.repeat(np.arange(num), examples)
    x = draw.normal(size=(len(client), 1))
    z = 1 + 0.5 * draw.normal(size=num)
    y = z[client] + 2 * x[:, 0] + noise * draw.normal(size=len(client))
    scale = np.full(len(y), noise, np.float32)
    data = {"scale": scale, "task": "regression", "test": 0.0}
    return priory.data.from_arrays(x.astype(np.float32), y.astype(np.float32), client, **data)


def test_a_hundred_rounds_end_within_a_thousandth_of_the_optimum_without_a_federation():
    """θ = (slope, μ, σ) against the numerical maximum of the closed-form marginal likelihood, relative error in ℓ2."""
    data = sloping()
    x, y = np.asarray(data.x, float)[:, 0].reshape(100, 10), np.asarray(data.y, float).reshape(100, 10)

    def loss(theta):
        covariance = 0.25 * np.eye(10) + np.exp(2 * theta[2])
        rest = y - theta[1] - theta[0] * x
        return 0.5 * np.sum(rest @ np.linalg.inv(covariance) * rest) + 50 * np.linalg.slogdet(covariance)[1]

    best = optimize.minimize(loss, [0.0, 0.0, 0.0], method="BFGS").x
    best[2] = np.exp(best[2])
    method = FedPop(kernel="mala", score="mixed", steps=40, burn_in=10, prior_step_size=0.2)
    method = replace(method, optimiser=Optimiser("sgd", 0.2))
    settings = {"model": "linear", "head": "Dense_0/bias", "eval_every": 0, "client_batch": 100}
    run = priory.simulate(method, data, rounds=100, schedule=("step-size=cosine", "prior-step-size=cosine"), **settings)
    down = run.method.broadcast(run.server)
    found = [
        down.phi["Dense_0"]["kernel"][0, 0],
        down.beta.mean["Dense_0"]["bias"][0],
        np.exp(down.beta.log_sd["Dense_0"]["bias"][0]),
    ]
    assert np.linalg.norm(np.array(found) - best) < 1e-3 * np.linalg.norm(best), (found, best)


def test_a_client_needs_room_for_the_kept_states_alone(representation):
    """M·d in table 1 of the paper, less what burn-in leaves out; between rounds d, or nothing."""
    task = priory.engine.problem.tasks_of(representation, priory.Settings(model=f"factor:{RANK}"))[0]
    z = trees.partition(jax.eval_shape(task.init, jax.random.key(0)).weights, task.is_head)[0]

    def kept(z, key):
        return kernels.sample("ula", lambda z, key: trees.norm_squared(z), z, 0.1, key, num_steps=10, burn_in=4).kept

    assert trees.size(jax.eval_shape(kept, z, jax.random.key(0))) == 6 * RANK
