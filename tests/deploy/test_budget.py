"""One ledger for all runs of a client: what it pays for, what it refuses, and who may change it."""

import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from priory.core.errors import UsageError
from priory.deploy.budget import BUDGET, Budget, Price
from priory.engine.accountants import concentrated_epsilon

LOCAL = Price(rho=0.05, answers=3, rounds=5, epsilon=concentrated_epsilon(0.15, 1e-5), delta=1e-5)
CENTRAL = Price(rho=0.0, answers=4, rounds=4, epsilon=2.0, delta=1e-5)


@pytest.fixture
def budget(tmp_path):
    return Budget(tmp_path / "client-3", 3)


def answer(budget, run, t, question="q", price=LOCAL):
    assert budget.promise(run, t, question, price) == ""
    budget.settle(run, t, question, f"answer {t}")


def test_an_answer_costs_its_rho_and_rounds_add_up(budget):
    assert budget.spent() is None
    answer(budget, "a", 0)
    answer(budget, "a", 4)
    assert budget.spent() == pytest.approx(concentrated_epsilon(0.10, 1e-5))


def test_the_same_question_costs_nothing_and_names_the_answer(budget):
    answer(budget, "a", 1)
    spent = budget.spent()
    assert budget.promise("a", 1, "q", LOCAL) == "answer 1"
    assert budget.spent() == spent


def test_a_question_that_a_crash_left_without_an_answer_is_worked_on_again(budget):
    budget.promise("a", 1, "q", LOCAL)
    assert budget.promise("a", 1, "q", LOCAL) == ""
    assert budget.read().runs["a"].answers == 1


def test_of_two_answers_to_one_question_the_first_counts(budget):
    budget.promise("a", 0, "q", LOCAL)
    assert budget.settle("a", 0, "q", "mine") == "mine"
    assert budget.settle("a", 0, "q", "theirs") == "mine"


@pytest.mark.parametrize(("t", "question"), [(2, "another"), (1, "q")], ids=["other question", "earlier round"])
def test_no_other_answer_of_a_round(budget, t, question):
    answer(budget, "a", 2)
    with pytest.raises(UsageError, match="has answered round 2 and its privacy allows one answer a round"):
        budget.promise("a", t, question, LOCAL)


def test_no_round_and_no_answer_beyond_the_claim_of_the_run(budget):
    with pytest.raises(UsageError, match="Round 5 is beyond the 5"):
        budget.promise("a", 5, "q", LOCAL)
    for t in range(3):
        answer(budget, "a", t)
    with pytest.raises(UsageError, match="Client 3 has given 3 answers in this run, all that its claim of ε = "):
        budget.promise("a", 3, "q", LOCAL)


@pytest.mark.parametrize("price", [LOCAL, CENTRAL], ids=["local", "central"])
def test_without_a_total_the_first_run_is_the_last(budget, price):
    answer(budget, "run-0", 0, price=price)
    for run in range(1, 400):
        with pytest.raises(UsageError, match="that the first run claimed, and its owner has set no other"):
            answer(budget, f"run-{run}", 0, price=price)
    assert list(budget.read().runs) == ["run-0"]


@pytest.mark.parametrize(("price", "fit"), [(LOCAL, 4), (CENTRAL, 2)], ids=["local", "central"])
def test_the_owners_total_holds_over_runs(budget, price, fit):
    budget.allow({LOCAL: concentrated_epsilon(0.15 * 4, 1e-5), CENTRAL: 5.0}[price], 2e-5 if price is CENTRAL else 1e-5)
    for run in range(fit):
        for t in range(3):
            answer(budget, f"run-{run}", t, price=price)
    with pytest.raises(UsageError, match="that its owner allows; the owner raises it with `priory flower budget`"):
        answer(budget, "one more", 0, price=price)
    assert budget.spent() <= budget.read().epsilon * (1 + 1e-9)


@pytest.mark.parametrize("price", [LOCAL, CENTRAL], ids=["local", "central"])
def test_a_run_has_one_app(budget, price):
    """Another app under the name of a run could otherwise write over what the run has cost."""
    budget.allow(8.0, 3e-5)
    answer(budget, "a", 0, price=price)
    before = budget.read()
    with pytest.raises(UsageError, match="Client 3 knows run a with another app or other settings; start a new run"):
        budget.promise("a", 1, "q", replace(price, epsilon=1e-4, terms="another"))
    assert budget.read() == before


@pytest.mark.parametrize("epsilon", [float("inf"), float("nan")])
def test_a_claim_that_is_not_finite_is_refused(budget, epsilon):
    with pytest.raises(UsageError, match="This app claims no finite ε for client 3"):
        budget.promise("a", 0, "q", replace(CENTRAL, epsilon=epsilon))
    assert budget.spent() is None


def test_a_run_that_could_not_end_does_not_begin(budget):
    budget.allow(concentrated_epsilon(0.14, 1e-5), 1e-5)
    with pytest.raises(UsageError, match="would spend"):
        budget.promise("a", 0, "q", LOCAL)
    assert budget.spent() is None


def test_a_central_run_costs_its_claim_once(budget):
    for t in range(4):
        answer(budget, "a", t, price=CENTRAL)
    assert budget.spent() == 2.0


def test_local_and_central_runs_add_up(budget):
    budget.allow(10.0, 3e-5)
    answer(budget, "a", 0, price=CENTRAL)
    answer(budget, "b", 0, price=LOCAL)
    assert budget.spent() == pytest.approx(2.0 + concentrated_epsilon(0.05, 2e-5))


def test_a_budget_of_nothing_answers_nothing(budget):
    budget.allow(0.0, 1e-5)
    with pytest.raises(UsageError, match="above the 0 that its owner allows"):
        budget.promise("a", 0, "q", LOCAL)


@pytest.mark.parametrize(("epsilon", "delta"), [(-1.0, 1e-5), (float("nan"), 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_a_total_that_is_none_is_refused(budget, epsilon, delta):
    with pytest.raises(UsageError, match="must be"):
        budget.allow(epsilon, delta)


def test_of_many_questions_at_once_one_is_promised(tmp_path, monkeypatch):
    read = Budget.read

    def slowly(budget):
        book = read(budget)
        time.sleep(0.02)  # the others come between reading and writing, unless they wait for the lock
        return book

    def ask(question):
        try:
            return Budget(tmp_path, 3).promise("a", 0, str(question), LOCAL)
        except UsageError as error:
            return str(error)

    monkeypatch.setattr(Budget, "read", slowly)
    with ThreadPoolExecutor(20) as pool:
        answers = sorted(pool.map(ask, range(20)))
    assert answers[0] == ""
    assert {one[:34] for one in answers[1:]} == {"Client 3 has answered round 0 and "}


@pytest.mark.parametrize(("mode", "fits"), [("local", True), ("central", True), (None, False)])
def test_an_owned_total_admits_private_apps_alone(budget, mode, fits):
    budget.admit(mode)
    budget.allow(8.0, 1e-5)
    if fits:
        budget.admit(mode)
    else:
        with pytest.raises(UsageError, match="The owner of client 3 allows ε = 8 over all runs, and this app has no "):
            budget.admit(mode)


@pytest.mark.parametrize(("mode", "told"), [("central", "dp='central'"), (None, "no differential privacy")])
def test_an_owner_can_require_local_privacy(budget, mode, told):
    budget.require(True)
    budget.admit("local")
    with pytest.raises(UsageError, match=f"requires local differential privacy, and this app has {told}; use --dp loc"):
        budget.admit(mode)
    budget.require(False)
    budget.admit(mode)


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        '{"epsilon": "8"}',
        '{"runs": {"a": 1}}',
        '{"runs": {"a": {"rho": -1.0}}}',
        '{"runs": {"a": {"answers": true}}}',
        '{"runs": {"a": {"rho": NaN}}}',
        '{"more": 1}',
        '{"runs": []}',
    ],
)
def test_a_damaged_ledger_answers_nothing_and_stays_as_it_is(budget, damage):
    budget.place.mkdir()
    (budget.place / BUDGET).write_text(damage)
    with pytest.raises(UsageError, match="is damaged, so nothing is answered; put a copy of it back"):
        budget.promise("a", 0, "q", LOCAL)
    assert (budget.place / BUDGET).read_text() == damage


def test_a_full_disk_answers_nothing(budget, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    answer(budget, "a", 0)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\), so nothing is answered"):
        budget.promise("a", 1, "q", LOCAL)
    assert budget.read().runs["a"].round == 0


def test_the_directory_is_for_its_owner_alone(budget):
    answer(budget, "a", 0)
    assert stat.S_IMODE(budget.place.stat().st_mode) == 0o700
    assert json.loads((budget.place / BUDGET).read_text())["runs"]["a"]["answers"] == 1
