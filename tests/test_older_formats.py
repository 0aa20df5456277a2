"""Run directories and models that older versions wrote: they open, predict, and go on to the numbers of today.

`fixtures/format-1` was written before files had checksums: a run that was stopped after round 3 of 6, the same run
finished, and a model with its predictions. `fixtures/format-2` was written before stores shared one codec: a run that
was stopped after round 2 of 4, a model with its predictions, and the state directory of a node that answered two rounds
under local differential privacy. Numbers are compared with a tolerance, since their last bits depend on the processor.
"""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest

import priory
from priory.cli import main
from priory.deploy.budget import Budget
from priory.deploy.client_states import ClientStateStore
from priory.deploy.node_log import NodeLog
from priory.records import INDEX, OLD_INDEX
from priory.store import RunDirectory
from tests.deploy.conftest import small_charter
from tests.engine.test_resume import Killed, Killer
from tests.older import edit_json, edit_manifest

pytestmark = [
    pytest.mark.xdist_group("command line"),
    pytest.mark.filterwarnings("ignore::priory.fed.capabilities.AdviceWarning"),  # a few rounds are too few
]

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def _copied(tmp_path, monkeypatch):
    jax.devices()
    for name in ("format-1", "format-2"):
        shutil.copytree(FIXTURES / name, tmp_path / "there" if name == "format-1" else tmp_path / "there" / name)
    monkeypatch.chdir(tmp_path / "there")


def numbers(name: str) -> dict:
    """What a finished run came to, without what depends on the machine."""
    found = RunDirectory(name)
    return {part: found.summary()[part] for part in ("personal", "global", "extra")} | found.per_client()


def assert_close(one, other) -> None:
    """Raises unless two tables have the same numbers but for rounding."""
    leaves = [jax.tree.leaves(table, is_leaf=lambda leaf: leaf is None) for table in (one, other)]
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for first, second in zip(*leaves, strict=True):
        if isinstance(first, float):
            assert first == pytest.approx(second, rel=1e-4, abs=1e-5)
        else:
            assert first == second


@pytest.fixture
def fresh() -> str:
    """The run of the manifest, made by today's code."""
    assert main(["run", "run/manifest.toml", "--out", "fresh"]) == 0
    return "fresh"


def test_a_run_of_format_1_goes_on_to_the_numbers_of_today(fresh):
    assert main(["resume", "run"]) == 0
    assert_close(numbers("run"), numbers(fresh))
    assert Path("run/checkpoint/clients", OLD_INDEX).exists()
    assert not Path("run/checkpoint/clients", INDEX).exists()
    assert RunDirectory("run").committed()["progress"] == RunDirectory(fresh).committed()["progress"]


@pytest.mark.parametrize("seed", range(2))
def test_a_run_of_format_1_may_die_at_any_moment_while_it_goes_on(fresh, monkeypatch, seed):
    draw, deaths, run = np.random.default_rng(seed), 0, None
    monkeypatch.setattr("priory.engine.runner.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("priory.engine.runner.COMMIT_SECONDS", -1.0)
    while run is None:
        with monkeypatch.context() as patch:
            Killer(patch, int(draw.integers(1, 60)))
            try:
                run = priory.resume("run")
            except Killed:
                deaths += 1
    assert deaths >= 2
    assert_close(numbers("run"), numbers(fresh))


def test_a_run_under_an_old_name_of_its_method_is_known_again(capsys):
    compare = [
        "compare",
        "preset",
        "--data",
        "digits",
        "--clients",
        "4",
        "--model",
        "linear",
        "--rounds",
        "1",
        "--out",
        "two",
    ]
    assert main(compare) == 0
    assert "warning: preset is now random-groups" in capsys.readouterr().err
    [manifest] = Path("two").rglob("manifest.toml")
    edit_manifest(manifest, 'name = "random-groups"', 'name = "preset"')
    edit_manifest(manifest, 'predict_with = "group"\n', "")
    commit = manifest.parent / "checkpoint" / "commit.json"
    extra = json.loads(commit.read_text())["extra"]
    edit_json(commit, extra=extra | {"origin": extra["origin"] | {"method": "preset"}})
    assert main(compare) == 0
    capsys.readouterr()
    assert main(["resume", str(manifest.parent)]) == 0
    assert "preset is now" not in capsys.readouterr().err


def test_a_finished_run_of_format_1_predicts_and_is_reported():
    assert main(["predict", "whole", "--client", "north", "--data", "new.csv", "--out", "now.csv"]) == 0
    pd.testing.assert_frame_equal(pd.read_csv("now.csv"), pd.read_csv("predictions.csv"), rtol=1e-3, atol=1e-5)
    assert main(["report", "whole"]) == 0
    assert Path("whole/report.html").exists()


def test_a_run_of_format_1_that_is_saved_again_has_checksums():
    run = priory.load("whole")
    run.save("again")
    assert Path("again/checkpoint/clients", INDEX).exists()
    assert priory.load("again").history == run.history
    raw = Path("again/metrics.jsonl").read_bytes()
    Path("again/metrics.jsonl").write_bytes(raw.replace(b'"round": 1', b'"round": 0', 1))
    with pytest.raises(priory.UsageError, match="does not match its checksum"):
        priory.load("again")


def test_a_model_of_format_1_predicts_the_same_bytes_when_it_is_written_today():
    priory.save_model(priory.load_model("model"), "today")
    for name in ("model", "today"):
        assert main(["predict", name, "--data", "new.csv", "--out", f"{name}.csv"]) == 0
    assert Path("model.csv").read_bytes() == Path("today.csv").read_bytes()
    pd.testing.assert_frame_equal(pd.read_csv("model.csv"), pd.read_csv("predictions.csv"), rtol=1e-3, atol=1e-5)
    assert "sha256" in json.loads(Path("today/model.json").read_text())


def test_files_of_format_1_can_still_be_edited(capsys):
    edit_json(Path("whole/summary.json"), seconds={"compile": 0.0, "train": 1.5, "evaluate": 0.0})
    edit_manifest(Path("whole/manifest.toml"), "devices = 2", f"devices = {len(jax.devices())}")
    assert main(["resume", "whole"]) == 0
    assert os.path.exists("whole/checkpoint/commit.json")
    assert "train 1.5 s" in capsys.readouterr().out


def test_a_run_of_format_2_goes_on_to_the_numbers_of_today_and_predicts():
    assert main(["run", "format-2/run/manifest.toml", "--out", "fresh"]) == 0
    assert main(["resume", "format-2/run"]) == 0
    assert_close(numbers("format-2/run"), numbers("fresh"))
    assert Path("format-2/run/checkpoint/clients", INDEX).exists()
    assert main(["predict", "format-2/run", "--client", "north", "--data", "new.csv", "--out", "now.csv"]) == 0
    assert_as_predicted("now.csv")


def test_a_model_of_format_2_predicts():
    assert main(["predict", "format-2/model", "--data", "new.csv", "--out", "now.csv"]) == 0
    assert_as_predicted("now.csv")


def assert_as_predicted(name: str) -> None:
    """Raises unless a file has the predictions that were made when format 2 was written."""
    then, now = pd.read_csv("format-2/predictions.csv"), pd.read_csv(name)
    pd.testing.assert_frame_equal(now[list(then)], then, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("t", [1, 2])
def test_the_states_of_a_node_of_format_2_are_read_with_their_bits(t):
    from safetensors.numpy import load_file

    charter = small_charter(priory.PFedBayes(), model="linear", dp="local", dp_noise=30.0, rounds=2)
    assert charter.digest == "f2c1f9cedfd7b456"
    states = ClientStateStore(Path("format-2/node"), 0, "run-1", charter.digest)
    record, generation = states.read(t, charter.record(0))
    assert generation == t
    assert states.generations() == [1, 2]
    written = load_file(states.place / f"state-0000000{t}.safetensors")
    leaves = jax.tree_util.tree_leaves_with_path(record)
    assert len(written) == len(leaves) == 10
    for path, leaf in leaves:
        np.testing.assert_array_equal(leaf, written[jax.tree_util.keystr(path, simple=True, separator="/")])


def test_the_answer_budget_and_log_of_a_node_of_format_2_are_read():
    states, place = (
        ClientStateStore(Path("format-2/node"), 0, "run-1", "f2c1f9cedfd7b456"),
        Path("format-2/node/client-0"),
    )
    spent = Budget(place, 0).read().runs["run-1"]
    assert (spent.answers, spent.round, spent.rho) == (2, 1, pytest.approx(2 / 1800))
    reply = states.read_reply(spent.reply)
    assert reply.config["round"] == 1
    assert len(reply.arrays) == 5
    verdict = NodeLog(place, 0).verify()
    assert (verdict.holds, verdict.entries) == (True, 2)
