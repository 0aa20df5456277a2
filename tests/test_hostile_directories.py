"""Links that were planted in an output directory, and files that vanish while a run writes them."""

import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import priory
from priory.cli import main, progress
from priory.core.errors import UsageError
from priory.core.files import check_no_links, write_atomically
from tests.cli.conftest import TINY

pytestmark = pytest.mark.xdist_group("command line")

RUN = ["run", "fedavg", *TINY, "--eval-every", "1", "--out", "out"]
# Commands by the directory that they write to, and a place in it that a link could hold.
NEW = {
    "run": (RUN, "metrics.jsonl"),
    "run into a linked checkpoint": (RUN, "checkpoint"),
    "run beside a linked summary": (RUN, "summary.json"),
    "run into a deep link": (RUN, "checkpoint/server/records.bin"),
    "compare": (["compare", "fedavg", *TINY, "--out", "out"], "fedavg-s0"),
    "compare into a linked file": (["compare", "fedavg", *TINY, "--out", "out"], "fedavg-s0/metrics.jsonl"),
    "tune": (["tune", "fedavg", *TINY, "--over", "step-size=0.1,0.2", "--out", "out"], "trials"),
    "tune into a linked file": (
        ["tune", "fedavg", *TINY, "--over", "step-size=0.1", "--out", "out"],
        "trials/scores.json",
    ),
    "flower up": (["flower", "up", *TINY[:2], "--nodes", "2", "--model", "linear", "--out", "out"], "app"),
    "flower up into linked logs": (["flower", "up", *TINY[:2], "--nodes", "2", "--out", "out"], "flower/logs"),
}
OLD = {
    "resume": (["resume", "run"], "metrics.jsonl"),
    "resume a linked checkpoint": (["resume", "run"], "checkpoint/clients"),
    "resume with a linked report": (["resume", "run", "--report"], "report.html"),
    "onboard": (["onboard", "run", "--data", "client.npz"], "onboarded"),
    "export": (["export", "run", "--client", "1", "--draws", "0"], "exported"),
    "run a manifest": (["run", "run/manifest.toml", "--out", "out"], "../out/metrics.jsonl"),
}
LOST = ["checkpoint/server/records.bin", "checkpoint/clients/records.bin", "checkpoint/server/index.bin"]
LOST += ["metrics.jsonl", "manifest.toml", "checkpoint", "."]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished run and the rows of a client that comes later."""
    jax.devices()
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main([*RUN[:-1], "run"]) == 0
    digits = priory.data.load("digits")
    np.savez(place / "client.npz", x=digits.x[:50], y=digits.y[:50])
    return place


@pytest.fixture
def elsewhere(finished, tmp_path, monkeypatch, capsys) -> Path:
    """Something of the user's that nothing may write to; the current directory holds a run."""
    shutil.copytree(finished, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "bashrc").write_text("kept")
    capsys.readouterr()
    return precious


def plant(entry: Path, precious: Path) -> None:
    """Put a link in a place: to a file where a file would be, else to a directory."""
    if entry.exists():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    entry.parent.mkdir(parents=True, exist_ok=True)
    entry.symlink_to(precious / "bashrc" if entry.suffix else precious)


@pytest.mark.parametrize("command", [*NEW, *OLD])
def test_nothing_is_written_through_a_link_in_an_output_directory(command, elsewhere, capsys):
    argv, name = (NEW | OLD)[command]
    if argv[0] == "resume":  # a finished run is only loaded
        for result in ("summary.json", "clients.json"):
            Path("run", result).unlink()
    plant(Path("out" if command in NEW else "run") / name, elsewhere)
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "is a symbolic link" in line
    assert "choose another directory, or remove the link" in line
    assert [path.name for path in elsewhere.iterdir()] == ["bashrc"]
    assert (elsewhere / "bashrc").read_text() == "kept"


def test_a_link_that_the_user_named_is_followed(elsewhere, tmp_path):
    (tmp_path / "disk").mkdir()
    Path("out").symlink_to(tmp_path / "disk")
    assert main(RUN) == 0
    assert main(["resume", "out"]) == 0
    assert (tmp_path / "disk/summary.json").exists()


def test_a_pipe_in_an_output_directory_is_refused_before_anybody_waits_for_it(elsewhere, capsys):
    Path("out").mkdir()
    os.mkfifo("out/metrics.jsonl")
    assert main(RUN) == 2
    assert "is neither a file nor a directory" in capsys.readouterr().err


def test_a_directory_without_links_is_accepted(finished):
    check_no_links(finished)
    check_no_links(finished / "nothing")


@pytest.mark.parametrize("name", ["state.db-wal", "flower/logs/node.log", "nodes.lock", "lock", "deep/config.TOML"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_an_entry_that_could_be_written_through_is_refused(name, kind, tmp_path):
    entry = tmp_path / "out" / name
    entry.parent.mkdir(parents=True)
    (tmp_path / "target").touch()
    os.mkfifo(entry) if kind == "pipe" else entry.symlink_to(tmp_path / ("target" if kind == "link" else "nothing"))
    with pytest.raises(UsageError, match="choose another directory, or remove"):
        check_no_links(tmp_path / "out")


def test_links_that_users_and_tools_make_are_left_alone(tmp_path):
    (tmp_path / "target").touch()
    out = tmp_path / "out"
    for name in (".venv/bin/python", "data.csv", "deep/rows.parquet", "wandb/debug.log", ".git/hooks.toml"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).symlink_to(tmp_path / "target")
    for name in ("wandb/latest-run", "mlruns", ".cache"):
        (out / name).symlink_to(tmp_path, target_is_directory=True)
    (out / "absent.csv").symlink_to(tmp_path / "nothing")
    os.mkfifo(out / "socket")
    check_no_links(out)


def test_an_entry_that_vanishes_meanwhile_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "old.json").touch()
    found = [(str(tmp_path), ["gone"], ["gone.json", "old.json"])]
    monkeypatch.setattr(os, "walk", lambda _: found)
    check_no_links(tmp_path)


def test_a_finished_run_with_links_is_loaded_by_resume(elsewhere):
    plant(Path("run/data.json"), elsewhere)
    assert main(["resume", "run"]) == 0


def test_a_planted_temporary_file_is_not_followed(elsewhere):
    Path(f".file.{os.getpid()}").symlink_to(elsewhere / "bashrc")
    write_atomically(Path("file"), "new")
    assert Path("file").read_text() == "new"
    assert (elsewhere / "bashrc").read_text() == "kept"


def vanish(name: str) -> None:
    """Delete a file or directory of the run."""
    path = Path("out", name)
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("home", ["resident", "on disk"])
@pytest.mark.parametrize("name", LOST)
def test_a_run_whose_files_vanish_ends_in_a_sentence_that_names_one(name, home, elsewhere, monkeypatch, capsys):
    def evaluated(self, line):
        if line["round"] == 1:
            vanish(name)

    monkeypatch.setattr(progress.Lines, "evaluated", evaluated)
    assert main([*RUN, *(["--resident-bytes", "0"] if home == "on disk" else [])]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{Path('out', name)}" in line
    assert "while the run was writing it" in line
    assert not Path("out/summary.json").exists()


@pytest.mark.parametrize("name", [*LOST, "checkpoint/commit.json"])
def test_files_that_vanish_during_the_last_evaluation_are_missed_too(name, elsewhere, monkeypatch, capsys):
    def evaluated(self, line):
        if line["round"] == 3:
            vanish(name)

    monkeypatch.setattr(progress.Lines, "evaluated", evaluated)
    assert main(RUN) == 2
    assert "while the run was writing it" in capsys.readouterr().err
    assert not Path("out/summary.json").exists()


@pytest.mark.parametrize("added", ["", "more"])
def test_metrics_that_were_replaced_are_missed(added, elsewhere, monkeypatch, capsys):
    path = Path("out/metrics.jsonl")

    def evaluated(self, line):
        if line["round"] == 1:
            Path("copy").write_text(path.read_text().replace('"round": 1', '"round": 7') + added)
            os.replace("copy", path)

    monkeypatch.setattr(progress.Lines, "evaluated", evaluated)
    assert main(RUN) == 2
    assert f"{path} was deleted, cut or replaced" in capsys.readouterr().err
    assert not Path("out/summary.json").exists()


def test_a_file_that_was_replaced_is_missed(elsewhere):
    records = Path("out/checkpoint/server/records.bin")

    class Listener:
        def advanced(self, completed, rounds, info):
            shutil.copy(records, "copy")
            os.replace("copy", records)

        def evaluated(self, line):
            pass

    federation = priory.data.load("digits").partition("iid", clients=5, seed=0)
    with pytest.raises(UsageError, match=r"records\.bin was deleted, cut or replaced"):
        priory.simulate(priory.FedAvg(), federation, out="out", listener=Listener(), rounds=3, model="linear")
