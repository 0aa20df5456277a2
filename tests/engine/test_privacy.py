"""What privacy costs and what it does: accountants, budgets, and rounds whose sums can be done by hand."""

import json
import math
import tomllib
import warnings
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import dp_accounting
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy.stats import norm

import priory
from priory import report
from priory.core import rng, trees
from priory.core.rng import Stream
from priory.core.struct import struct
from priory.engine import accountants, devices, settings
from priory.engine.accountants import Counted, Poisson, WithoutReplacement
from priory.engine.cohort import Participation
from priory.engine.rounds import Plan, draw_slots
from priory.fed import privacy
from priory.fed.capabilities import AdviceWarning
from priory.fed.channel import Clip
from tests.methods import verbs
from tests.methods.verbs import on_host

DELTA = 1e-3
REPLACE, ADD = dp_accounting.NeighboringRelation.REPLACE_ONE, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
# Each with a number of rounds; loss distributions are cheap for many, which are resolved on a coarser grid.
SPENDINGS = {
    "counted": (Counted((0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7)), 10),
    "poisson": (Poisson(60, 0.1, 21), 400),
    "fixed": (WithoutReplacement(60, 6), 10),
}
EACH_SPENDING = pytest.mark.parametrize(("spending", "rounds"), SPENDINGS.values(), ids=SPENDINGS)


@struct
class Stating(priory.FedAvg):
    """FedAvg that states its sensitivities."""

    bounded: ClassVar[bool] = True

    def sensitivity(self, task, replaces=True):
        del task
        return 3.0 if replaces else 2.0


@struct
class Apart(priory.FedAvg):
    """FedAvg that has its two arrays clipped apart."""

    parts: ClassVar[tuple[str, ...]] = ("weights/Dense_0/kernel", "weights/Dense_0/bias")


class Normed(nn.Module):
    """A network with statistics."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x))


@pytest.fixture
def private(simulate):
    """A run with privacy, of FedAvg unless it is told otherwise."""

    def run(method=None, **options):
        return simulate(method or priory.FedAvg(), **({"dp_delta": DELTA} | options))

    return run


@pytest.fixture
def told(begin):
    """Returns the privacy part of the summary of a run that is stopped before its first round."""

    def ask(method=None, **options):
        return begin(method or priory.FedAvg(), **({"dp_delta": DELTA} | options)).extra["privacy"]

    return ask


def test_a_simulation_says_that_its_noise_is_simulated(told):
    assert told(dp="local", dp_noise=1.0)["noise"].startswith("simulated: floating-point numbers from the seed")


# What it costs


@pytest.mark.parametrize("delta", [1e-2, 1e-6])
@pytest.mark.parametrize("noise", [0.3, 1.0, 20.0])
def test_the_accountant_asks_for_no_more_than_the_papers_formulas(noise, delta):  # B.1 to B.3
    counts = [1, 4, 9]  # rounds of three clients, whose data are disjoint
    rho = privacy.parallel(*(privacy.sequential(*[privacy.gaussian_rho(1.0, noise)] * k) for k in counts))
    found = Counted((0, *[1] * 8, 9)).epsilon(noise, 9, delta)
    assert 0 < found <= privacy.epsilon_of(rho, delta)


def test_the_accountant_has_the_papers_rho():  # B.5: at each order α the Rényi divergence is ρα
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(2.5))
    np.testing.assert_allclose(accountant.rdp, privacy.gaussian_rho(2.0, 5.0) * accountant.orders, rtol=1e-12)


def test_sampling_without_replacement_counts_noise_in_distances_between_neighbours():
    """So the multiplier must be σ/2C: with everybody drawn, the divergence is that of a Gaussian moved by 1."""
    accountant = rdp.RdpAccountant(neighboring_relation=REPLACE)
    everyone = dp_accounting.SampledWithoutReplacementDpEvent(7, 7, dp_accounting.GaussianDpEvent(2.0))
    accountant.compose(everyone)
    np.testing.assert_allclose(accountant.rdp, accountant.orders / (2 * 2.0**2), rtol=1e-12)


def test_the_other_accountant_would_count_noise_in_norms_under_replacement():
    """A trap that `accountants` goes around: the same event means a distance of 2 there."""
    accountant = pld.PLDAccountant(REPLACE)
    accountant.compose(dp_accounting.GaussianDpEvent(2.0))
    twice = dp_accounting.get_epsilon_gaussian(2.0 / 2, DELTA)
    assert accountant.get_epsilon(DELTA) == pytest.approx(twice, rel=1e-3)


def test_poisson_sampling_counts_noise_in_norms_of_a_message():
    accountant = pld.PLDAccountant(ADD)
    accountant.compose(dp_accounting.TruncatedSubsampledGaussianDpEvent(7, 1.0, 7, 2.0))
    assert accountant.get_epsilon(DELTA) == pytest.approx(dp_accounting.get_epsilon_gaussian(2.0, DELTA), rel=1e-3)


@pytest.mark.parametrize(("noise", "rounds"), [(3.0, 100), (4.0, 1000)])
def test_bernoulli_rounds_cost_what_dp_accounting_says(noise, rounds):
    accountant = pld.PLDAccountant(ADD)
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(60, 0.1, 21, noise)
    direct = accountant.compose(event, rounds).get_epsilon(DELTA)
    found = SPENDINGS["poisson"][0].epsilon(noise, rounds, DELTA)
    assert direct - 1e-4 <= found <= 1.01 * direct  # a coarser grid may only err upwards


@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 20), (3.0, 100)])
def test_fixed_rounds_cost_what_dp_accounting_says(noise, rounds):
    accountant = rdp.RdpAccountant(neighboring_relation=REPLACE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(60, 6, dp_accounting.GaussianDpEvent(noise))
    direct = accountant.compose(event, rounds).get_epsilon(DELTA)
    assert SPENDINGS["fixed"][0].epsilon(noise, rounds, DELTA) == pytest.approx(direct, rel=1e-12)
    assert direct < dp_accounting.get_epsilon_gaussian(noise / math.sqrt(rounds), DELTA)  # sampling did amplify


def test_a_loose_bound_for_sampling_is_not_used():
    found = WithoutReplacement(60, 59).epsilon(2.0, 10, DELTA)
    assert found == pytest.approx(dp_accounting.get_epsilon_gaussian(2.0 / math.sqrt(10), DELTA), rel=1e-12)


def test_without_amplification_the_client_with_the_most_rounds_decides():
    most, noise = SPENDINGS["counted"][0], 1.3
    for t, k in enumerate(most.most):
        exact = dp_accounting.get_epsilon_gaussian(noise / math.sqrt(k), DELTA) if k else 0.0
        assert most.epsilon(noise, t, DELTA) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("kind", ["fixed", "bernoulli"])
@pytest.mark.parametrize("groups", [1, 2])
def test_participations_are_counted_as_the_rounds_will_draw_them(kind, groups):
    drawn = Participation(12, 6, 6, kind, groups)
    mesh, root, rounds = devices.mesh_of_all(), rng.root(3), 7
    plan = Plan(drawn, 0, (), 1, "method", False, 1, mesh)
    sizes = SimpleNamespace(count=jnp.asarray(np.ones(12, np.int32)))
    counts, most, draw = np.zeros(12, int), [0], jax.jit(lambda t: draw_slots(plan, sizes, root, t))
    for t in range(rounds):
        slots = on_host(draw(np.int32(t)))
        np.add.at(counts, slots.ids[slots.uploads], 1)
        most.append(counts.max())
    np.testing.assert_array_equal(accountants.participations(drawn, root, rounds), most)


def test_only_uploads_count_where_more_clients_run():
    most = accountants.participations(Participation(12, 2, 12), rng.root(3), 6)
    assert most[-1] < 6


@pytest.fixture
def few_orders(monkeypatch):
    """Rényi divergences at few orders, which bound ε as well, in a fiftieth of the time."""
    monkeypatch.setattr(rdp, "RdpAccountant", partial(rdp.RdpAccountant, orders=(2, 3, 4, 6, 8, 12, 16)))
    accountants._renyi.cache_clear()
    yield
    accountants._renyi.cache_clear()


@EACH_SPENDING
def test_the_noise_solved_for_is_just_enough(few_orders, spending, rounds):
    noise = accountants.solve_noise(spending, 4.0, DELTA, rounds)
    assert spending.epsilon(noise, rounds, DELTA) <= 4.0
    assert spending.epsilon(0.998 * noise, rounds, DELTA) > 4.0


@EACH_SPENDING
def test_a_budget_is_never_exceeded_and_one_more_round_would(spending, rounds):
    allowed = 6 * rounds // 10
    budget = 0.5 * (spending.epsilon(1.5, allowed, DELTA) + spending.epsilon(1.5, allowed + 1, DELTA))
    assert accountants.rounds_within(spending, 1.5, budget, DELTA, rounds) == allowed
    assert spending.epsilon(1.5, allowed, DELTA) <= budget < spending.epsilon(1.5, allowed + 1, DELTA)


# What a run does


@partial(jax.jit, static_argnames="participation")
def drawn_first(root, participation):
    return participation.draw(rng.key(root, Stream.COHORT, 0))


@jax.jit
def sent_first(method, task, server, shards, root, client):
    key = rng.key(root, Stream.CLIENT, 0, client)
    return method.client_update(task, server, (), shards.of(client), key)[1].payload


@jax.jit
def noise_first(root, like):
    key, leaves = rng.key(root, Stream.NOISE, 0), jax.tree.leaves(like)
    return [jax.random.normal(jax.random.fold_in(key, i), leaf.shape) for i, leaf in enumerate(leaves)]


def by_hand(run, clip):
    """The server after one round: every client's difference clipped, summed and noised as written down."""
    ready = run.evaluator.ready
    root = ready.root
    start = verbs.init_server(run.method, run.task, jax.random.fold_in(root, int(Stream.INIT)))
    slots = on_host(drawn_first(root, ready.plan.participation))
    who = slots.ids[slots.uploads]
    total = [np.zeros(leaf.shape) for leaf in jax.tree.leaves(start)]
    for client in who:
        payload = sent_first(run.method, run.task, start, ready.train, root, client)
        leaves = zip(jax.tree.leaves(payload), jax.tree.leaves(start), strict=True)
        moved = [np.asarray(new, np.float64) - old for new, old in leaves]
        size = math.sqrt(sum(np.sum(leaf**2) for leaf in moved))
        assert size > clip, "clipping should show"
        total = [sum_ + leaf * clip / size for sum_, leaf in zip(total, moved, strict=True)]
    noise = [run.extra["privacy"]["sd"] * np.asarray(leaf) for leaf in noise_first(root, start)]
    expected = ready.plan.participation.cohort
    server = [
        old + (sum_ + drawn) / expected for old, sum_, drawn in zip(jax.tree.leaves(start), total, noise, strict=True)
    ]
    return server, len(who)


@pytest.mark.parametrize(
    "options",
    [{"cohort": 3, "participation": "bernoulli", "seed": 2}, pytest.param({"cohort": 6}, marks=pytest.mark.slow)],
)
def test_a_central_round_is_the_noised_sum_over_the_expected_cohort(train, federation, options):
    run = train(priory.FedAvg(), dp="central", dp_delta=DELTA, dp_noise=0.5, dp_clip=0.01, rounds=1, **options)
    server, came = by_hand(run, 0.01)
    assert len(set(federation.train.count.tolist())) > 1, "weights of examples would show"
    assert came != 3, "dividing by those that came would show"
    for found, wanted in zip(jax.tree.leaves(run.server), server, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_a_central_round_that_nobody_comes_to_still_gets_noise(train, begin):
    part = Participation(6, 3, 3, "bernoulli")
    seed = next(seed for seed in range(500) if not np.any(drawn_first(rng.root(seed), part).uploads))
    options = {"dp": "central", "dp_delta": DELTA, "dp_noise": 1.0, "participation": "bernoulli", "seed": seed}
    run, start = (make(priory.FedAvg(), **options) for make in (partial(train, rounds=1), begin))
    assert not np.allclose(jax.tree.leaves(run.server)[0], jax.tree.leaves(start.server)[0], atol=1e-3)


@pytest.mark.parametrize(
    ("options", "sensitivity", "relation"),
    [
        ({"dp": "local"}, 1.0, "replace one client"),
        ({"dp": "central"}, 1.0, "replace one client"),
        ({"dp": "central", "participation": "bernoulli"}, 0.5, "add or remove one client"),
    ],
)
def test_the_sensitivity_goes_with_the_neighbours(told, options, sensitivity, relation):
    found = told(**options, dp_clip=0.5, dp_noise=2.0, rounds=1)
    assert (found["sensitivity"], found["relation"]) == (sensitivity, relation)
    assert found["sd"] == 2.0 * sensitivity


def test_a_method_that_states_its_sensitivity_takes_local_noise_and_is_not_clipped(told):
    found = told(Stating(), dp_epsilon=50.0, rounds=1)
    assert (found["mode"], found["sensitivity"], found["clip"]) == ("local", 3.0, None)
    assert found["sensitivity_from"] == "stated by stating"


@pytest.mark.parametrize(("participation", "sensitivity"), [("fixed", 3.0), ("bernoulli", 2.0)])
def test_a_stated_sensitivity_goes_with_the_neighbours(told, participation, sensitivity):
    found = told(Stating(), dp="central", dp_noise=2.0, participation=participation, rounds=1)
    assert (found["sensitivity"], found["sd"]) == (sensitivity, 2.0 * sensitivity)
    assert found["clip"] == 2.0  # the norm of a message, whoever the neighbours are


@pytest.mark.parametrize(
    ("options", "sensitivity", "origin"),
    [
        ({"dp": "local"}, 2 * math.sqrt(2), "2 x sqrt(2) x dp-clip of each part: beta 0.5, phi 20"),
        (
            {"dp": "central", "participation": "bernoulli"},
            math.sqrt(2),
            "sqrt(2) x dp-clip of each part: beta 0.5, phi 20",
        ),
    ],
)
def test_parts_that_are_clipped_apart_are_counted_in_their_units(told, options, sensitivity, origin):
    found = told(priory.FedPop(), **options, model="mlp:2", dp_clip="0.5,20", dp_noise=2.0, rounds=1)
    assert found["sensitivity"] == pytest.approx(sensitivity, rel=1e-12)
    assert found["clip"] == {"beta": 0.5, "phi": 20.0}
    assert found["sd"] == pytest.approx({"beta": sensitivity, "phi": 40 * sensitivity}, rel=1e-12)
    assert found["sensitivity_from"] == origin
    assert origin in report.tables._privacy_lines(found, 0)[0]


def test_a_part_without_numbers_does_not_count(told):
    """All of a linear model is the head, so nothing is left for φ."""
    found = told(priory.FedPop(), dp="local", dp_clip=(0.5, 20), dp_noise=2.0, rounds=1)
    assert (found["clip"], found["sensitivity"]) == ({"beta": 0.5}, 2.0)


def test_one_norm_for_parts_of_different_scale_clips_them_as_one_and_is_warned_of(begin):
    ask = partial(begin, priory.FedPop(), dp="local", dp_delta=DELTA, dp_noise=1.0, dp_clip=0.5)
    with pytest.warns(AdviceWarning, match=r"dp-clip=0.5 clips beta and phi as one.*--dp-clip BETA,PHI"):
        found = ask(model="mlp:2").extra["privacy"]
    assert (found["clip"], found["sensitivity"]) == (0.5, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(model="linear")  # has one part
        ask(model="mlp:2", dp_clip="0.5,20")


def delta_of(distance, sd, epsilon):
    """Return δ of a Gaussian that is moved so far (Balle and Wang 2018, theorem 8)."""
    one, other = (norm.cdf(sign * distance / (2 * sd) - epsilon * sd / distance) for sign in (1, -1))
    return one - math.exp(epsilon) * other


@pytest.mark.parametrize("method", [priory.FedAvg(), Apart()], ids=["whole", "apart"])
def test_two_clients_as_far_apart_as_clipping_allows_cost_what_is_claimed(begin, method):
    """With the √2 of two parts forgotten, they would cost more."""
    clip = "0.5,20" if isinstance(method, Apart) else 0.5
    ledger = begin(method, dp="local", dp_delta=DELTA, dp_clip=clip, dp_noise=1.5, rounds=1).log.ledger
    payload = {"weights": {"Dense_0": {"kernel": jnp.full((3, 2), 1e3), "bias": jnp.full(2, -1e3)}}}
    sent = [trees.scale(sign, privacy.clipped(payload, ledger.clip, ledger.parts)) for sign in (1.0, -1.0)]
    distance = float(trees.norm(ledger.parts.to_units(trees.sub(*sent))))
    epsilon = ledger.spent(1)
    assert delta_of(distance, ledger.sd, epsilon) == pytest.approx(DELTA, rel=1e-4)
    if isinstance(method, Apart):
        assert delta_of(distance, ledger.sd / math.sqrt(2), epsilon) > 10 * DELTA


@pytest.mark.parametrize(("method", "clip"), [(priory.FedAvg(), 0.5), (Apart(), "0.5,20")], ids=["one", "several"])
def test_a_manifest_keeps_one_norm_or_several(tmp_path, begin, method, clip):
    run = begin(method, dp="local", dp_delta=DELTA, dp_noise=1.0, dp_clip=clip, out=tmp_path / "run")
    table = tomllib.loads((tmp_path / "run" / "manifest.toml").read_text())
    assert table["run"]["dp_clip"] == clip
    assert settings.make(table["run"]) == run.settings


def test_an_assumed_sensitivity_is_called_one(told):
    found = told(dp="local", dp_noise=2.0, dp_sensitivity=0.25, rounds=1)
    assert found["sd"] == 0.5
    assert found["sensitivity_from"] == "an assumption (dp-sensitivity) in place of 2, 2 x dp-clip 1"


def test_clients_that_keep_a_state_get_no_amplification_from_a_fixed_cohort(told):
    assert "own participations" in told(priory.Ditto(), dp="central", dp_noise=2.0, rounds=1)["accountant"]
    assert "Rényi" in told(dp="central", dp_noise=2.0, rounds=1)["accountant"]


def test_every_line_tells_what_is_spent(private):
    run = private(dp="local", dp_epsilon=9.0, eval_every=1)
    spent = [line["epsilon"] for line in run.history]
    assert spent == [run.log.ledger.spent(t) for t in (1, 2, 3, 4)]
    assert spent == sorted(spent)
    assert 8.99 < spent[-1] <= 9.0
    assert run.extra["privacy"]["epsilon"] == spent[-1]


def test_a_run_without_privacy_says_nothing_of_it(simulate):
    run = simulate(priory.FedAvg(), rounds=0)
    assert "epsilon" not in run.history[-1]
    assert "privacy" not in run.extra


def test_a_run_ends_with_its_budget_and_is_finished(private, tmp_path):
    run = private(dp="local", dp_noise=1.0, dp_epsilon=6.0, rounds=40, out=tmp_path / "run")
    ledger = run.log.ledger
    assert 0 < run.completed < 40
    most = accountants.participations(run.evaluator.ready.plan.participation, run.evaluator.ready.root, 40)
    assert ledger.spent(run.completed) <= 6.0 < Counted(tuple(most)).epsilon(1.0, run.completed + 1, DELTA)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == run.completed == summary["extra"]["privacy"]["rounds_allowed"]
    assert f"ended after round {run.completed} of 40" in report.run_lines(summary)[-1]
    again = priory.resume(tmp_path / "run", federation=run.federation)
    assert again.completed == run.completed
    assert again.personal.accuracy == run.personal.accuracy


@pytest.mark.parametrize("options", [{"dp": "local"}, {"dp": "central", "participation": "bernoulli"}])
def test_a_resumed_run_has_the_same_noise_and_the_same_epsilon(
    private, assert_same_bits, tmp_path, monkeypatch, options
):
    options = {"dp_epsilon": 20.0, "rounds": 2, "eval_every": 1} | options
    monkeypatch.setattr(accountants, "solve_noise", lambda *_: 1.0)
    whole, asked = private(**options), iter([False, True])
    private(out=tmp_path / "run", stop=lambda: next(asked), **options)
    monkeypatch.setattr(accountants, "solve_noise", lambda *_: 99.0)  # as another version might solve for another
    resumed = priory.resume(tmp_path / "run", federation=whole.federation)
    assert_same_bits(whole, resumed)
    assert resumed.extra["privacy"] == whole.extra["privacy"]
    assert len(resumed.history) == 2
    assert [line["epsilon"] for line in resumed.history] == [line["epsilon"] for line in whole.history]


def test_a_delta_that_allows_giving_a_client_away_is_warned_of_once(private):
    with pytest.warns(AdviceWarning, match=r"dp-delta=0.5 is not below 1/6") as told:
        run = private(dp="local", dp_noise=1.0, dp_delta=0.5, rounds=2, eval_every=1)
    assert len([one for one in told if one.category is AdviceWarning]) == 1
    assert "delta" in run.extra["advice"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private(dp="local", dp_noise=1.0, rounds=1)


REFUSED = {
    "dp='both' is unknown": {"dp": "both"},
    "dp=central needs a budget or noise": {"dp": "central"},
    "not in which form; add --dp": {"dp_epsilon": 1.0},
    "dp-clip=0.0 is not a positive": {"dp": "local", "dp_noise": 1.0, "dp_clip": 0.0},
    "dp-clip='1,x' is not a positive": {"dp": "local", "dp_noise": 1.0, "dp_clip": "1,x"},
    "dp-clip='1,-1' is not a positive": {"dp": "local", "dp_noise": 1.0, "dp_clip": (1, -1)},
    "dp-clip=1,2 has 2 numbers, and a message of fedavg has one part; give one": {
        "dp": "local",
        "dp_noise": 1.0,
        "dp_clip": "1,2",
    },
    "of fedpop has 2 parts (beta, phi); give one number, or 2": {
        "method": priory.FedPop(),
        "dp": "local",
        "dp_noise": 1.0,
        "dp_clip": "1,2,3",
    },
    "dp-clip=1,2 says how private": {"dp_clip": "1,2"},
    "dp-noise=-1.0 is not a positive": {"dp": "local", "dp_noise": -1.0},
    "dp-epsilon=0.0 is not a positive": {"dp": "local", "dp_epsilon": 0.0},
    "dp-epsilon=nan is not a positive": {"dp": "local", "dp_epsilon": math.nan},
    "dp-delta=1.0 lies outside": {"dp": "local", "dp_epsilon": 1.0, "dp_delta": 1.0},
    "dp-epsilon=0.01 is too small for even one round": {"dp": "local", "dp_epsilon": 0.01, "dp_noise": 0.1},
    "and compress=top:0.1 both change": {"dp": "local", "dp_noise": 1.0, "compress": "top:0.1"},
    "both change what is sent; give one": {"dp": "local", "dp_noise": 1.0, "channel": Clip()},
    "what exclude-uncertain=0.2 tells": {"dp": "local", "dp_noise": 1.0, "exclude_uncertain": 0.2},
    "which weighting=examples sends": {"dp": "local", "dp_noise": 1.0, "weighting": "examples"},
    "pooled pools their data": {"method": priory.Pooled(), "dp": "local", "dp_noise": 1.0},
    "local sends nothing": {"method": priory.Local(), "dp": "local", "dp_noise": 1.0},
    "fedhb-niw is not linear": {"method": priory.FedHBNIW(), "dp": "central", "dp_noise": 1.0},
    "sends cluster as a whole number": {"method": priory.CFedBayes(clusters=2), "dp": "local", "dp_noise": 1.0},
    "does not cover batch-norm statistics": {"dp": "local", "dp_noise": 1.0, "model": Normed()},
}


@pytest.mark.parametrize(("words", "options"), REFUSED.items(), ids=REFUSED)
def test_what_privacy_cannot_be_is_refused_before_training(simulate, arrays, words, options):
    data = priory.data.from_arrays(**arrays, test=0.2, validation=0.2, seed=0)
    with pytest.raises(priory.UsageError) as error:
        simulate(**({"method": priory.FedAvg(), "data": data} | options))
    assert words in str(error.value)


def test_clients_with_a_state_in_tiny_cohorts_that_are_cut_get_no_amplification():
    """Cohorts of 1 among 20 have 10 places: over 200 rounds somebody is displaced with a probability above δ/1000."""

    def spending(stateful, cohort, num):
        drawn = Participation(num, cohort, cohort, "bernoulli")
        return accountants.spending_of("central", drawn, stateful, rng.root(0), 200, 1e-5)

    assert isinstance(spending(False, 1, 20), accountants.Poisson)
    assert isinstance(spending(True, 1, 20), accountants.Counted)
    assert isinstance(spending(True, 100, 1000), accountants.Poisson)


@pytest.mark.parametrize("field", ["dp_clip", "dp_delta"])
def test_a_wish_for_privacy_without_its_form_is_not_passed_over(field):
    data = priory.data.load("digits").partition("iid", clients=5, seed=0)
    with pytest.raises(priory.UsageError, match=f"{field.replace('_', '-')}=0.01 says how private fedavg is to be"):
        priory.simulate(priory.FedAvg(), data, rounds=1, model="linear", **{field: 0.01})


def test_a_budget_that_protects_nothing_is_refused():
    data = priory.data.load("digits").partition("iid", clients=5, seed=0)
    with pytest.raises(priory.UsageError, match="protects nothing"):
        priory.simulate(priory.FedAvg(), data, rounds=1, model="linear", dp="local", dp_epsilon=1e300)
