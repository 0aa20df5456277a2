"""The one-run audit: its statistics against direct computation, what it detects, and what it lets pass."""

import hashlib
import math
import re
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory.core import rng
from priory.core.rng import Stream
from priory.core.struct import struct
from priory.engine import audit as auditing
from priory.engine.audit import FEWEST, MOST, audit, lower_bound, p_value, right_guesses, with_canaries
from priory.engine.cohort import Participation

FORMS = {
    "central bernoulli": {"dp": "central", "participation": "bernoulli"},
    "central fixed": {"dp": "central"},
    "local": {"dp": "local"},
}


def binomial(num, right, least):
    """P(at least so many of num), summed term by term."""
    terms = [math.comb(num, k) * right**k * (1 - right) ** (num - k) for k in range(max(least, 0), num + 1)]
    return math.fsum(terms)


@pytest.mark.parametrize("delta", [0.0, 1e-4])
@pytest.mark.parametrize(("guesses", "correct"), [(20, 17), (50, 50), (40, 21)])
def test_the_p_value_is_that_of_the_theorem(guesses, correct, delta):
    epsilon, num = 0.7, 100
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    beta = binomial(guesses, right, correct)
    alpha = max((binomial(guesses, right, correct - i) - beta) / i for i in range(1, correct + 1))
    wanted = min(1.0, beta + 2 * num * delta * alpha)
    assert p_value(num, guesses, correct, epsilon, delta) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("guesses", [10, 50, 200])
def test_guesses_that_are_all_right_bound_epsilon_in_closed_form(guesses):
    right = 0.05 ** (1 / guesses)  # right^r = 0.05
    assert lower_bound(200, guesses, guesses, 0.0) == pytest.approx(math.log(right / (1 - right)), abs=2e-6)


def test_the_bound_has_the_p_value_that_was_asked_for():
    bound = lower_bound(200, 100, 85, 1e-5)
    assert p_value(200, 100, 85, bound, 1e-5) == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
def test_no_result_of_so_many_canaries_bounds_more_than_the_limit(delta):
    bounds = [lower_bound(100, 50, correct, delta) for correct in range(51)]
    assert max(bounds) == bounds[-1] == auditing.limit(100, delta) < 2.8


def test_the_table_of_the_page_has_the_limits_rounded_down():
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| (\d.*) \|$", page, re.MULTILINE))
    assert rows.keys() == {"100", "200", "500", "1000", "2000"}
    for canaries, told in rows.items():
        found = [auditing.limit(int(canaries), delta) for delta in (1e-3, 1e-4, 1e-5, 1e-6)]
        assert [float(cell) for cell in told.split(" | ")] == [math.floor(100 * value) / 100 for value in found]


@pytest.mark.parametrize(("epsilon", "delta"), [(3.0, 1e-4), (3.99, 1e-5), (5.0, 1e-5)])
def test_enough_canaries_are_the_least_whose_limit_is_above_the_claim(epsilon, delta):
    num = auditing.enough(epsilon, delta)
    assert FEWEST < num <= MOST
    assert auditing.limit(num, delta) > epsilon >= auditing.limit(num - 4, delta)


@pytest.mark.parametrize(("epsilon", "delta"), [(8.0, 1e-5), (3.0, 1e-3), (1e4, 1e-5)])
def test_a_claim_that_the_most_canaries_cannot_refute_has_no_number_of_them(epsilon, delta):
    assert auditing.enough(epsilon, delta) is None
    assert all(auditing.limit(num, delta) < epsilon for num in range(FEWEST, MOST + 1, 100))


def test_half_of_the_guesses_right_bound_nothing():
    assert lower_bound(200, 100, 50, 1e-5) == 0.0


def test_a_larger_delta_bounds_less():
    assert lower_bound(200, 100, 90, 1e-3) < lower_bound(200, 100, 90, 1e-6)


def test_a_true_claim_survives_as_often_as_it_should():
    """Randomised response is exactly ε-DP, so it is the worst case of the theorem."""
    draw, epsilon, trials = np.random.default_rng(0), 1.0, 2000
    correct = draw.binomial(100, math.e / (1 + math.e), trials)
    bounds = {v: lower_bound(200, 100, v, 0.0) for v in set(correct.tolist())}
    wrong = np.mean([bounds[v] > epsilon for v in correct.tolist()])
    assert wrong <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / trials)  # four standard errors
    assert wrong > 0.01  # and no less sharp than it may be


def test_the_highest_are_guessed_heads_and_the_lowest_tails():
    scores = np.array([0.1, 5.0, -3.0, 4.0, -2.0, 0.0])
    heads = np.array([True, True, False, False, False, True])
    assert right_guesses(scores, heads, 1) == 2
    assert right_guesses(scores, heads, 2) == 3  # 4.0 came from tails


def test_canaries_are_clients_after_all_others(federation):
    crowd = with_canaries(federation, 7)
    assert crowd.num_clients == federation.num_clients + 7
    np.testing.assert_array_equal(crowd.train.count[:6], federation.train.count)
    assert set(crowd.train.count[6:].tolist()) == {federation.train.count.min()}
    assert crowd.test.count[6:].sum() == 0


@pytest.fixture(scope="module")
def wide(arrays):
    """The federation with 150 features, so that a linear model has room for a hundred canaries."""
    x = np.random.default_rng(0).normal(size=(len(arrays["y"]), 150)).astype(np.float32)
    return priory.data.from_arrays(**(arrays | {"x": x}), test=0.2, seed=0)


@pytest.fixture(scope="module")
def audited(begin, wide, tmp_path_factory):
    """The audit of a run that has its noise and no round yet: it is made again with canaries in any case."""

    def contents(path):
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.rglob("*") if p.is_file()}

    def made(method=None, **options):
        path = tmp_path_factory.mktemp("runs") / "run"
        run = begin(method or priory.FedAvg(), wide, dp_delta=1e-4, out=path, **options)
        before = contents(path)
        found = audit(path, canaries=100, federation=run.federation, method=method)
        after = contents(path)
        assert after.pop("audit.json")
        assert after == before, "an audit changes nothing of the run"
        return run, found

    return made


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_false_claim_is_refuted(audited, form):
    """The noise is that of ε < 0.5 for a client that moves a release by 10⁻³, and canaries move it by 1."""
    _, found = audited(**form, dp_noise=30.0, dp_sensitivity=1e-3)
    assert found.claim <= 0.5
    assert found.bound > 2 * found.audited
    assert found.refuted
    assert not found.holds


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_true_claim_is_not_refuted(audited, form):
    run, found = audited(**form, dp_noise=3.0)
    assert 1 < found.claim == run.log.ledger.spent(4) < 8
    assert found.bound <= found.audited
    assert not found.refuted
    assert found.holds == (found.audited < found.limit)
    assert found.guesses == 50


@struct
class Apart(priory.FedAvg):
    """FedAvg that has its two layers clipped apart."""

    parts: ClassVar[tuple[str, ...]] = ("weights/Dense_0", "weights/Dense_1")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_claim_for_parts_is_refuted_if_it_is_false_and_not_if_it_is_true(audited, form):
    layers = {"model": "mlp:40", "dp_clip": "2,0.01"} | form  # both wide enough for a hundred canaries
    _, false = audited(Apart(), **layers, dp_noise=30.0, dp_sensitivity=1e-3)
    assert false.claim <= 0.5
    assert false.refuted
    _, true = audited(Apart(), **layers, dp_noise=3.0)
    assert 1 < true.claim < 8
    assert not true.refuted


@pytest.fixture
def attacked(begin, tmp_path, monkeypatch):
    """The audit of a run with a claim by an attacker who is right in a share of the coins; no round is run."""

    def made(right, canaries=None, **options):
        def observe(ready, ledger, num, rounds, told):
            heads = np.arange(num) % 2 == 0
            return heads, np.where(np.arange(num) < right * num, heads, ~heads) + np.linspace(0, 0.1, num)

        monkeypatch.setattr(auditing, "_observe", observe)
        run = begin(priory.FedAvg(), cohort=6, dp="central", out=tmp_path / "run", **options)
        return audit(tmp_path / "run", canaries=canaries, federation=run.federation)

    return made


CLAIM = {"dp_epsilon": 3.99, "dp_delta": 1e-5}


def test_the_number_of_canaries_follows_from_the_claim(attacked):
    found = attacked(1.0, **CLAIM)
    assert found.canaries == auditing.enough(found.claim, 1e-5) > 300
    assert found.correct == found.guesses
    assert found.bound == found.limit > found.audited
    assert found.refuted


def test_a_claim_out_of_reach_does_not_hold_though_it_is_not_refuted(attacked):
    found = attacked(1.0, canaries=200, **CLAIM)
    assert found.bound == found.limit == pytest.approx(3.487, abs=1e-3)
    assert not found.refuted
    assert not found.holds
    assert found.to_json()["reach"] == "cannot refute a claim above 3.487 with 200 canaries"


def test_a_claim_within_reach_holds_if_guesses_are_wrong(attacked):
    found = attacked(0.5, **CLAIM)
    assert not found.refuted
    assert found.holds


def test_a_claim_beyond_all_numbers_of_canaries_gets_those_of_the_highest_limit(attacked):
    found = attacked(1.0, dp_epsilon=8.0, dp_delta=1e-4)
    assert found.limit == max(auditing.limit(num, 1e-4) for num in range(100, 2001, 100))
    assert not found.holds


@pytest.mark.parametrize(
    ("method", "options", "radius"),
    [
        (priory.FedAvg(), {"dp_clip": 2.0}, 2.0),
        (Apart(), {"dp_clip": "2,0.01", "model": "mlp:40"}, math.sqrt(2)),  # in units of its parts
    ],
    ids=["whole", "apart"],
)
def test_a_canary_is_as_far_from_its_opposite_as_two_clients_can_be(
    begin, wide, tmp_path, monkeypatch, method, options, radius
):
    """Without noise to speak of, a local canary's score after k messages is ± k times the clipping norm."""
    kept = {}

    def judge(claimed, audited, heads, scores):
        kept.update(heads=heads, scores=scores)
        return wanted(claimed, audited, heads, scores)

    wanted = auditing._judge
    monkeypatch.setattr(auditing, "_judge", judge)
    run = begin(method, wide, out=tmp_path / "r", dp="local", dp_noise=1e-5, dp_delta=1e-4, **options)
    audit(tmp_path / "r", canaries=100, federation=run.federation, method=method)
    draw = jax.jit(lambda t: Participation(106, 53, 53).draw(rng.key(rng.root(0), Stream.COHORT, t)).ids)
    messages = np.bincount(np.concatenate([draw(jnp.int32(t)) for t in range(4)]), minlength=106)[6:]
    assert len(set(messages.tolist())) > 2
    np.testing.assert_allclose(kept["scores"], np.where(kept["heads"], radius, -radius) * messages, atol=1e-2)
    assert 0 < kept["heads"].sum() < 100


def test_too_few_canaries_are_refused(tmp_path):
    with pytest.raises(priory.UsageError, match="canaries=99 are too few"):
        audit(tmp_path, canaries=99)


def test_a_run_without_a_claim_cannot_be_audited(begin, tmp_path):
    run = begin(priory.FedAvg(), rounds=1, out=tmp_path / "run")
    with pytest.raises(priory.UsageError, match="claims no differential privacy"):
        audit(tmp_path / "run", federation=run.federation)
