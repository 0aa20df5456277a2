"""Training that diverges on the command line: exit code 3, one sentence with the likely cause, a usable directory."""

import json
from pathlib import Path

import numpy as np
import pytest

from priory.cli import main
from priory.cli.app import DIVERGED
from priory.tune import trials
from tests.cli.conftest import TINY, patients

pytestmark = [
    pytest.mark.xdist_group("command line"),
    pytest.mark.filterwarnings(
        "default::priory.fed.capabilities.AdviceWarning", "default:.*(diverged|not finite):UserWarning"
    ),
]
HUGE = "1e30"  # steps that end above --max-norm at once


def complaint(argv, capsys, code=DIVERGED) -> str:
    """The sentence on standard error of a command that ends with a code."""
    capsys.readouterr()
    assert main(argv) == code
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("warning:", "priory:"))]
    return line


@pytest.fixture
def diverged(capsys):
    """A run whose every update was rejected, in `bad`, and the sentence that it ended with."""
    return complaint(["run", "fedavg", *TINY, "--step-size", HUGE, "--out", "bad"], capsys)


def test_a_run_ends_with_exit_code_3_and_the_likely_cause(diverged):
    assert diverged.startswith("warning: Training diverged: the last 15 updates of clients were not finite or above")
    assert "the likely cause is a step size that is too large, so choose a lower --step-size (now 1e+30)" in diverged


def test_a_run_that_diverged_is_read_by_every_command(diverged, capsys):
    """`resume` says it again; the others use the state of the last finite round."""
    assert complaint(["resume", "bad"], capsys) == diverged
    np.savez("rows.npz", x=np.zeros((2, 8, 8, 1), np.uint8))
    assert main(["predict", "bad", "--client", "0", "--data", "rows.npz", "--out", "rows.csv"]) == 0
    assert "nan" not in Path("rows.csv").read_text()
    assert main(["clients", "bad"]) == 0
    assert json.loads(Path("bad/summary.json").read_text())["extra"]["advice"]["diverged"] in diverged


def test_an_outlier_is_named_as_the_cause(capsys):
    frame = patients()
    frame.loc[3, "cost"] = 1e12
    frame.to_csv("table.csv", index=False)
    where = ["--data", "table.csv", "--client", "site", "--target", "cost", "--drop", "ill", "--model", "linear"]
    said = complaint(["run", "fedavg", *where, "--test", "0", "--rounds", "3", "--out", "bad"], capsys)
    assert "an outlier, the target = 1e+12 of client east (" in said


def test_numbers_beyond_single_precision_are_refused_when_they_are_read(capsys):
    frame = patients()
    frame.loc[[3, 7], "age"] = [1e308, -1e308]
    frame.to_csv("table.csv", index=False)
    where = ["--data", "table.csv", "--client", "site", "--target", "ill", "--drop", "cost"]
    said = complaint(["run", "fedavg", *where, "--out", "bad"], capsys, code=2)
    assert said.startswith("priory: column 'age' is beyond single precision (±3.4e+38) in 2 rows; correct those rows")
    assert not Path("bad").exists()


def test_a_comparison_keeps_the_methods_beside_one_that_diverged(capsys):
    said = complaint(["compare", "fedavg", f"fedavg:step-size={HUGE}", *TINY, "--out", "both"], capsys)
    assert said.startswith("warning: Training diverged")
    assert main(["compare", "fedavg", f"fedavg:step-size={HUGE}", *TINY, "--out", "both"]) == DIVERGED  # as loaded
    assert f"diverged: fedavg:step-size={HUGE}" in capsys.readouterr().out
    labels = [method["label"] for method in json.loads(Path("both/comparison.json").read_text())["methods"]]
    assert labels == ["fedavg", f"fedavg:step-size={HUGE}"]


def test_a_tuning_without_any_finite_score_diverged(capsys, monkeypatch):
    nothing = {"personal": {"accuracy": None, "nll": None}, "global": None}
    monkeypatch.setattr(trials, "scores_of", lambda ready, cells, *_: [nothing for _ in cells])
    said = complaint(["tune", "fedavg", "--over", "step-size=1,2", *TINY, "--out", "tuned"], capsys)
    assert said.startswith("warning: Training diverged with every setting: no personal.accuracy is finite")


def test_predictions_that_are_not_finite_are_said(unscored, capsys):
    """Of a personal model whose fine-tuning diverges, in a run that scores nothing."""
    patients().to_csv("table.csv", index=False)
    where = ["--data", "table.csv", "--client", "site", "--target", "cost", "--drop", "ill", "--validation", "0.4"]
    assert main(["run", "fedavg", *where, "--rounds", "1", "--model", "linear", "--out", "run"]) == 0
    argv = ["predict", "run", "--client", "east", "--data", "table.csv", "--out", "predicted.csv"]
    assert "120 of 120 predictions are not finite" in complaint(argv, capsys)
