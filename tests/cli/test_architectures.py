"""`priory run --models`: the table by model that a run ends with."""

import json
from pathlib import Path

import numpy as np
import pytest

from priory.cli import main, run
from priory.core.sealed import unsealed
from tests.deploy.conftest import small_arrays

pytestmark = pytest.mark.xdist_group("several networks")  # tests/deploy/test_one_truth.py trains the same
MIXED = ["--data", "small.npz", "--rounds", "2", "--models", "mlp:4,linear"]
FEDBNN = ["run", "fedbnn", *MIXED, "--align", "own:8", "--min-examples", "4", "--step-size", "0.01"]


@pytest.fixture(autouse=True)
def _data(somewhere_else):
    np.savez("small.npz", **small_arrays(3))


def table_of(path):
    return unsealed(Path(path, "architectures.json").read_text())


@pytest.mark.slow  # as below; tests/engine/test_architectures.py has the table
def test_a_run_with_several_models_ends_with_a_table_beside_the_clients_alone(capsys, monkeypatch):
    assert main([*FEDBNN, "--out", "together"]) == 0
    told = capsys.readouterr().out
    assert "accuracy alone" in told
    table = table_of("together")
    assert list(table) == ["mlp:4", "linear"]
    assert [row["clients"] for row in table.values()] == [2, 1]
    assert main([*FEDBNN, "--gamma", "0", "--no-alone", "--out", "apart"]) == 0
    assert "accuracy alone" not in capsys.readouterr().out
    alone = json.loads(Path("apart/summary.json").read_text())["extra"]["architectures"]
    for model, row in table.items():
        assert row["alone"] == alone[model]["accuracy"]
        assert row["gain"] == pytest.approx(row["accuracy"] - row["alone"])
    # A finished run shows its table again and trains nobody.
    monkeypatch.setattr(run, "simulate", lambda *_, **__: pytest.fail("trained again"))
    assert main(["resume", "together"]) == 0
    assert "accuracy alone" in capsys.readouterr().out


def test_a_method_that_sends_weights_says_that_it_takes_one_model(capsys):
    assert main(["run", "fedavg", *MIXED]) == 2
    assert "fedavg exchanges what depends on the network" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_model_that_is_unknown_is_named(capsys):
    assert main([*FEDBNN[:-2], "--models", "linear,nonsense"]) == 2
    assert "'nonsense' is unknown" in capsys.readouterr().err


@pytest.mark.slow  # rounds with noise, for two networks, are a program that takes longest of all to compile
def test_a_run_that_ends_with_its_budget_still_ends_with_the_table(capsys):
    budget = ["--dp-noise", "4", "--dp-epsilon", "3", "--dp-delta", "0.01", "--rounds", "30"]
    assert main([*FEDBNN, *budget, "--out", "budget"]) == 0
    assert json.loads(Path("budget/summary.json").read_text())["rounds"] < 30
    assert "accuracy alone" in capsys.readouterr().out
    assert table_of("budget")["linear"]["gain"] is not None
