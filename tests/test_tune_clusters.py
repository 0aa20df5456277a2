"""`clusters="auto"`: the number of clusters by the likelihood of validation rows."""

import dataclasses
import re
import tomllib
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import priory
from priory import tune as tuner
from priory.cli import main
from priory.tune import Tried, clusters, fewest

# One federation, of one or two groups, for runs in Python and for commands: each number of clusters is compiled once.
DATA = "synthetic:clusters:clients=6,examples={},dim=3,classes=3,clusters={},seed=2"
METHOD = priory.CFedBayes(clusters="auto", zeta=1.0, optimiser=priory.Optimiser("adam", 0.02))
OPTIONS = {"rounds": 10, "model": "linear", "seed": 1}


@pytest.fixture(autouse=True)
def _up_to_three_clusters(monkeypatch):
    monkeypatch.setattr(clusters, "MOST_CLUSTERS", 3)


def federation(groups, validation=0.25):
    return priory.data.load(DATA.format(40, groups)).partition("natural", seed=0, validation=validation)


@pytest.mark.slow  # trains with one, two and three clusters, twice
@pytest.mark.parametrize("groups", [1, 2])
def test_as_many_clusters_are_chosen_as_there_are_groups(groups):
    settled = tuner.settle(METHOD, federation(groups), **OPTIONS)
    assert settled == dataclasses.replace(METHOD, clusters=groups)


def test_no_test_row_is_read(monkeypatch):
    monkeypatch.setattr(clusters, "MOST_CLUSTERS", 1)
    data = federation(2)
    spoilt = data.y.copy()
    for client in range(len(data.clients)):
        spoilt[data.rows(client, "test")] = 0
    assert (spoilt != data.y).any()
    one, other = (
        tuner.try_clusters(METHOD, each, **OPTIONS | {"rounds": 1})
        for each in (data, dataclasses.replace(data, y=spoilt))
    )
    np.testing.assert_array_equal(one[0].nll, other[0].nll)


@pytest.mark.parametrize(("newcomers", "numbers"), [(5, [1]), (4, [1, 2]), (0, [1, 2, 3])])
def test_there_are_at_most_as_many_clusters_as_clients_that_take_part(newcomers, numbers, monkeypatch):
    scores = {"nll": np.ones(6), "count": np.ones(6)}
    run = SimpleNamespace(personal=SimpleNamespace(per_client=scores))
    monkeypatch.setattr(clusters, "simulate", lambda *_, **__: run)
    few = dataclasses.replace(federation(2), num_newcomers=newcomers)
    assert [tried.clusters for tried in tuner.try_clusters(METHOD, few, **OPTIONS)] == numbers


def test_a_method_that_leaves_nothing_open_is_given_back():
    for method in (priory.FedAvg(), priory.CFedBayes(clusters=3)):
        assert tuner.settle(method, federation(2, validation=0.0)) is method


def tried(*rows):
    return [Tried(number, np.array(row)) for number, row in enumerate(rows, start=1)]


def test_the_smallest_number_within_one_paired_error_of_the_best_wins():
    # Clients differ by far more than one; paired, the second beats the first beyond its error and the third does not.
    base = np.array([1.0, 5.0, 9.0, 13.0])
    first, second = base + np.array([0.5, 0.6, 0.5, 0.6]), base
    assert fewest(tried(first, second, second - np.array([0.1, -0.1, 0.1, -0.05]))) == 2
    assert fewest(tried(second + np.array([0.1, -0.05, 0.1, -0.05]), second)) == 1
    assert fewest(tried(first, second, second - 0.2)) == 3


def test_a_number_that_diverged_is_passed_over():
    assert fewest(tried([np.nan, 1.0], [2.0, 3.0])) == 2
    with pytest.raises(priory.UsageError, match="found no number whose validation likelihood is finite"):
        fewest(tried([np.nan, 1.0], [np.inf, 3.0]))


def test_without_validation_rows_auto_ends_in_a_sentence():
    with pytest.raises(priory.UsageError, match="clusters=auto is chosen on validation rows, and there are none"):
        tuner.settle(METHOD, federation(2, validation=0.0), **OPTIONS)


def test_the_validation_rows_cannot_judge_clients_too():
    with pytest.raises(
        priory.UsageError, match=r"exclude-uncertain=0\.2 needs the rows that clusters=auto is chosen on"
    ):
        tuner.settle(METHOD, federation(2), exclude_uncertain=0.2, **OPTIONS)


def test_the_commands_print_the_choice_and_record_it(tmp_path, monkeypatch, capsys):
    jax.devices()
    monkeypatch.chdir(tmp_path)
    # Without test rows the run that follows has the shapes of those that the choice is made by.
    data = ["--data", DATA.format(32, 2), "--test", "0", "--validation", "0.25", "--model", "linear"]
    run = ["--rounds", "1", "--eval-every", "0"]
    assert main(["run", "cfedbayes", "--clusters", "auto", *data, *run, "--out", "r"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    recorded = tomllib.loads((tmp_path / "r" / "manifest.toml").read_text())["method"]["clusters"]
    assert recorded in (1, 2, 3)
    assert f"clusters={recorded}, the fewest within one standard error of the best validation nll" in printed
    assert re.findall(r"\d with (\d)", printed) == ["1", "2", "3"]
    command = ["compare", "cfedbayes:clusters=auto", *data, *run, "--out", "c"]
    assert main(command) == 0
    assert f"clusters={recorded}, the fewest" in capsys.readouterr().out
    assert main(command) == 0  # what is there is loaded, and nothing chosen again
    assert "the fewest" not in capsys.readouterr().out
