"""Every command that reads a run, on every kind of bad run directory: one sentence, exit code 2, nothing written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import priory
from priory.cli import main
from priory.store import RunDirectory
from tests.cli.conftest import TINY
from tests.older import edit_json, edit_manifest

pytestmark = [
    pytest.mark.xdist_group("command line"),  # one worker makes the runs, of methods that other commands train too
    pytest.mark.filterwarnings(
        "ignore::priory.fed.capabilities.AdviceWarning"
    ),  # a few rounds are too few, and are said to be
]

DIGITS = [*TINY, "--eval-every", "1"]
RUNS = {
    "digits": ["fedavg", *DIGITS],
    "other": ["fedavg", *DIGITS, "--seed", "5"],
    "hierarchical": ["fedhb-niw", *DIGITS],
    "schools": ["fedpop", "--data", "eight_schools", "--model", "intercept", "--rounds", "5"],
    "private": ["fedavg", *DIGITS, "--dp", "central", "--dp-noise", "1", "--dp-delta", "0.1"],
}
# The run that a command is shown, and what else it is told.
COMMANDS = {
    "resume": ("digits", []),
    "resume a stopped run": ("stopped", []),
    "elbo": ("hierarchical", []),
    "onboard": ("digits", ["--data", "client.npz"]),
    "predict": ("digits", ["--client", "1", "--data", "client.npz", "--out", "predictions.csv"]),
    "export": ("digits", ["--client", "1", "--draws", "0", "--out", "model"]),
    "effects": ("schools", []),
    "audit": ("private", ["--canaries", "100"]),
}
STATES = [f"checkpoint/{who}/{what}.bin" for who in ("server", "clients") for what in ("records", "index")]
RESULTS = ["summary.json", "clients.json"]  # of a finished run alone


def text(name: str, written: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(written)


def cut(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[: (run / name).stat().st_size // 2])


def emptied(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(b"")


def lost(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).unlink()


def commit(**changed) -> Callable[[Path], object]:
    return lambda run: edit_json(run / "checkpoint/commit.json", **changed)


def manifest(old: str, new: str) -> Callable[[Path], object]:
    return lambda run: edit_manifest(run / "manifest.toml", old, new)


def foreign(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()
    (run / "notes.txt").write_text("no run")


def a_file(run: Path) -> None:
    shutil.rmtree(run)
    run.write_text("no directory")


def no_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoint")


def empty_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoint")
    (run / "checkpoint").mkdir()


def checkpoint_of_another_run(run: Path) -> None:
    """States of the same shape: only the seed, or the method, tells them apart."""
    shutil.rmtree(run / "checkpoint")
    shutil.copytree(run.parent / "other" / "checkpoint", run / "checkpoint")


def garbled_line(run: Path) -> None:
    raw = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(b"x" + raw[1:])


# Kinds of damage, by the file that is damaged and by the way.
DAMAGE: dict[str, dict[str, dict[str, Callable[[Path], object]]]] = {
    "the directory": {"of something else": {"a foreign directory": foreign, "a file": a_file}},
    "the checkpoint": {
        "lost": {"no checkpoint": no_checkpoint},
        "emptied": {"an empty checkpoint": empty_checkpoint},
        "of another run": {"the checkpoint of another run": checkpoint_of_another_run},
    },
    "manifest.toml": {
        "of something else": {
            "a manifest of something else": text("manifest.toml", "[tool]\nname = 1\n"),
            "a manifest that is not text": lambda run: (run / "manifest.toml").write_bytes(bytes(range(128, 256))),
        },
        "of another run": {"a manifest of other data": manifest('data_checksum = "', 'data_checksum = "0')},
        "changed": {
            "a manifest without its last line": lambda run: (run / "manifest.toml").write_text(
                (run / "manifest.toml").read_text().rpartition("data_checksum")[0]
            ),
            "a manifest with a number for a table": lambda run: (run / "manifest.toml").write_text(
                "environment = 3\n" + (run / "manifest.toml").read_text().partition("[environment]")[0]
            ),
            "a manifest with an unknown setting of data": manifest("[data]\n", "[data]\nshape = 3\n"),
            "a manifest without a data set": manifest('\ndata = "', '\ngroup = "'),
        },
    },
    "checkpoint/commit.json": {
        "of something else": {
            "a commit of something else": text("checkpoint/commit.json", "{}"),
            "a commit that is a list": text("checkpoint/commit.json", "[]"),
        },
        "changed": {
            "a commit with a word for extra": commit(extra="none"),
            "a commit with a word for a round": commit(round="two"),
            "a commit before the first round": commit(round=-5),
            "a commit after the last round": commit(round=99),
            "a commit of more metrics than there are": commit(metrics_bytes=10**9),
        },
    },
    "metrics.jsonl": {
        "of something else": {"metrics of something else": text("metrics.jsonl", "3\n" * 10_000)},
        "changed": {"a line of the metrics garbled": garbled_line},
    },
    **{
        name: {
            "of something else": {f"{name} of something else": text(name, "3\n")},
            "changed": {"summary.json without a number": text("summary.json", "{}")} if name == "summary.json" else {},
        }
        for name in RESULTS
    },
    **{name: {} for name in STATES},
}
for name in ["manifest.toml", "checkpoint/commit.json", *STATES, "metrics.jsonl", *RESULTS]:
    for way, harm in {"cut": cut, "emptied": emptied, "lost": lost}.items():
        if not (way == "lost" and name in RESULTS):  # a run without results is one that was stopped
            DAMAGE[name][way] = {f"{name} {way}": harm(name)}
HARMS = {kind: harm for ways in DAMAGE.values() for kinds in ways.values() for kind, harm in kinds.items()}
# An audit makes the run again, so it needs the manifest and the commit alone.
NOT_AUDITED = (
    "a commit after the last round",
    "a commit of more metrics than there are",
    "the checkpoint of another run",
)


def is_read(command: str, name: str, kind: str) -> bool:
    """Whether a command meets the damage at all."""
    if command == "audit":
        return name not in (*STATES, "metrics.jsonl", *RESULTS) and kind not in NOT_AUDITED
    return not (command == "resume a stopped run" and name in RESULTS)


def covering() -> list[tuple[str, str]]:
    """Commands with kinds of damage: every kind, every command with every file and with every way, and little more."""
    cases = {
        (command, kind): {kind, (command, name), (command, way)}
        for command in COMMANDS
        for name, ways in DAMAGE.items()
        for way, kinds in ways.items()
        for kind in kinds
        if is_read(command, name, kind)
    }
    chosen, wanted = [], set().union(*cases.values())
    while wanted:
        chosen.append(max(cases, key=lambda case: len(cases[case] & wanted)))
        wanted -= cases[chosen[-1]]
    return chosen


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A directory with a finished run of each kind, one that was stopped, and a file of a client that comes later."""
    jax.devices()
    place = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, argv in RUNS.items():
            assert main(["run", *argv, "--out", name]) == 0
        calls: list[int] = []
        federation = priory.data.load("digits").partition("iid", clients=5, seed=0)
        settings = {"rounds": 3, "eval_every": 1, "model": "linear"}
        stop = lambda: len(calls) > 1 or calls.append(0)  # noqa: E731
        priory.simulate(priory.FedAvg(), federation, out="stopped", stop=stop, **settings)
    digits = priory.data.load("digits")
    np.savez(place / "client.npz", x=digits.x[:50], y=digits.y[:50])
    return place


def files(place: Path) -> dict[Path, bytes | None]:
    """Every file below with its contents, and every directory."""
    return {path: path.read_bytes() if path.is_file() else None for path in (place, *sorted(place.rglob("*")))}


@pytest.fixture
def place(runs, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "other", "other")
    shutil.copy(runs / "client.npz", "client.npz")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_the_runs_themselves_are_good(command, runs, place):
    name, more = COMMANDS[command]
    shutil.copytree(runs / name, "run")
    assert main([command.split()[0], "run", *more]) == 0


@pytest.mark.parametrize(("command", "kind"), covering(), ids=lambda value: value)
def test_a_bad_run_directory_ends_in_one_sentence_and_stays_as_it_is(command, kind, runs, place, capsys):
    name, more = COMMANDS[command]
    shutil.copytree(runs / name, "run")
    HARMS[kind](Path("run").absolute())
    before = files(place)
    assert main([command.split()[0], "run", *more]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("priory: ")
    assert line.endswith(".")
    assert files(place) == before


def test_a_run_that_died_before_its_first_commit_begins_again(runs, place):
    shutil.copytree(runs / "stopped", "run")
    no_checkpoint(Path("run"))
    path = Path("run/metrics.jsonl")
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])  # a line is written before its commit
    assert main(["resume", "run"]) == 0
    assert [line["round"] for line in RunDirectory("run").metrics()] == [1, 2, 3]
    assert RunDirectory("run").summary()["personal"] == RunDirectory(runs / "digits").summary()["personal"]


@pytest.mark.parametrize("name", RESULTS)
def test_the_remedy_for_damaged_results_is_one(name, runs, place, capsys):
    shutil.copytree(runs / "digits", "run")
    cut(name)(Path("run"))
    assert main(["resume", "run"]) == 2
    assert "resume the run" in capsys.readouterr().err
    for damaged in {name, "summary.json"}:
        Path("run", damaged).unlink()
    assert main(["resume", "run"]) == 0
    assert (
        json.loads(Path("run", name).read_text())["personal"]
        == json.loads((runs / "digits" / name).read_text())["personal"]
    )
