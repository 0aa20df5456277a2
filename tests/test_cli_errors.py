"""Bad input: exit code 2 and one sentence with a remedy, no traceback, and nothing that was there is damaged."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from priory.cli import app, main
from tests.cli.conftest import TINY as DIGITS
from tests.older import edit_manifest

pytestmark = [
    pytest.mark.usefixtures("somewhere_else"),
    pytest.mark.xdist_group("command line"),  # tests/cli trains the same methods on the same clients
]


def with_flag(name: str, value: str) -> list[str]:
    rest = list(DIGITS)
    if name in rest:
        rest[rest.index(name) + 1] = value
        return rest
    return [*rest, name, value]


def write_npz(**changed) -> None:
    rows = {"x": np.ones((6, 2)), "y": np.array([0, 1] * 3), "client": np.array([0, 0, 0, 1, 1, 1])}
    np.savez("d.npz", **{**rows, **changed})


def complaint(argv, capsys) -> str:
    """The one sentence that the command ends in."""
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    lines = err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("priory: ")
    assert lines[0].endswith((".", "?"))
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["run", "fedavgg", *DIGITS], "did you mean fedavg?"),
        (["rum"], "did you mean run?"),
        (["run", "--rounds", "3"], "--rounds"),
        (["run", "fedavg", *with_flag("--data", "digit")], "'digits'"),
        (["run", "fedavg", *with_flag("--data", "d.parquet")], "d.parquet"),
        (["run", "fedavg", *with_flag("--data", "absent.csv")], "absent.csv"),
        (["run", "fedavg", *with_flag("--partition", "dirichet:0.3")], "dirichet"),
        (["run", "fedavg", *with_flag("--partition", "dirichlet:-1")], "-1"),
        (["run", "fedavg", *with_flag("--clients", "2000")], "2000"),
        (["run", "fedavg", *with_flag("--clients", "0")], "clients=0"),
        (["run", "fedavg", *with_flag("--min-examples", "1000")], "choose at most 1 clients"),
        (["run", "fedavg", *with_flag("--cohort", "0")], "cohort=0"),
        (["run", "fedavg", *with_flag("--cohort", "6")], "choose 1 to 5"),
        (["run", "fedavg", *with_flag("--rounds", "-1")], "rounds=-1"),
        (["run", "fedavg", *with_flag("--model", "mlpp")], "mlpp"),
        (["run", "fedavg", *with_flag("--head", "(")], "head="),
        (["run", "fedavg", *with_flag("--schedule", "step-size=sine")], "step-size=sine"),
        (["run", "fedavg", *with_flag("--step-size", "-1")], "step-size=-1"),
        (["run", "fedavg", *with_flag("--momentum", "1")], "momentum=1"),
        (["run", "fedavg", *with_flag("--scale", "0.5")], "scale=0.5"),
        (["run", "fedavg", *with_flag("--test", "1.5")], "1.5"),
        (["run", "fedavg", *with_flag("--devices", "0")], "devices=0"),
        (["run", "absent.toml"], "absent.toml"),
        (["resume", "absent"], "absent"),
        (["compare", *DIGITS], "no method"),
        (["compare", "fedavg", "fedavg", *DIGITS], "twice"),
        (["compare", "fedavg", "fedprox:muu=1", *DIGITS], "did you mean mu?"),
        (["compare", "fedavg:step-size", *DIGITS], "FIELD=VALUE"),
        (["compare", "fedavg:epochs=x", *DIGITS], "epochs='x'"),
        (["compare", "fedavg", *with_flag("--seeds", "0")], "seeds=0"),
        (["compare", "fedavg", *with_flag("--cohort", "9")], "cohort=9"),
        (["tune", "fedavg", *DIGITS], "nothing to tune"),
        (["tune", "fedavg", *with_flag("--over", "stepsize=1")], "did you mean step-size?"),
        (["tune", "fedavg", *with_flag("--over", "step-size=log:0..1:5")], "log:0..1:5"),
        (["tune", "fedavg", *with_flag("--over", "step-size=-1,1")], "step-size=-1"),
        (["tune", "fedavg", *with_flag("--over", "step-size=1"), "--validation", "0"], "validation=0"),
        (["tune", "fedavg", *with_flag("--over", "step-size=1"), "--by", "personal.rmse"], "personal.rmse"),
    ],
    ids=lambda value: " ".join(value[:2] + value[-2:]) if isinstance(value, list) else "",
)
def test_a_bad_value_ends_in_one_sentence(argv, named, capsys, tmp_path):
    assert named in complaint(argv, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--bogus", "1"], ["--rounds", "many"], ["--optimiser", "sdg"]])
def test_a_bad_flag_ends_in_the_parsers_panel(flags, capsys):
    assert main(["run", "fedavg", *DIGITS, *flags]) == 2
    err = capsys.readouterr().err
    assert flags[0] in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "changed",
    [
        {"x": np.array([[np.nan, 1.0]] * 6)},
        {"x": np.array([[np.inf, 1.0]] * 6)},
        {"x": np.array([["a", "b"]] * 6)},
        {"y": np.array([0, 1, 5] * 2), "classes": np.array(["no", "yes"])},
        {"y": np.array([0, 1])},
        {"x": np.ones((0, 2)), "y": np.zeros(0, int), "client": np.zeros(0, int)},
    ],
    ids=["nan", "inf", "text", "label out of range", "too few labels", "no rows"],
)
def test_data_that_cannot_be_used_end_in_one_sentence(changed, capsys):
    write_npz(**changed)
    complaint(["run", "fedavg", "--data", "d.npz", "--rounds", "1"], capsys)


def test_one_example_and_one_class_are_legal():
    write_npz(x=np.ones((3, 2)), y=np.array([0, 1, 1]), client=np.array([0, 1, 1]))
    assert main(["run", "fedavg", "--data", "d.npz", "--rounds", "1", "--model", "linear", "--out", "a"]) == 0


def test_a_run_is_never_overwritten(capsys):
    Path("a").mkdir()
    Path("a/manifest.toml").write_text("kept")
    assert "never overwritten" in complaint(["run", "fedavg", *DIGITS, "--out", "a"], capsys)
    assert Path("a/manifest.toml").read_text() == "kept"
    assert os.listdir("a") == ["manifest.toml"]


@pytest.mark.parametrize("out", ["taken/below", "/proc/priory"])
def test_a_directory_that_cannot_be_written_ends_in_one_sentence(out, capsys):
    Path("taken").write_text("a file")
    assert out in complaint(["run", "fedavg", *DIGITS, "--out", out], capsys)


def test_a_full_disk_ends_in_one_sentence_and_the_run_can_go_on(capsys, monkeypatch):
    real, calls = os.pwrite, []

    def pwrite(handle, raw, offset):
        calls.append(offset)
        if len(calls) > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, raw, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        assert main(["run", "fedavg", *DIGITS, "--out", "a"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "No space left" in err.splitlines()[-1]
    assert main(["resume", "a"]) == 0


@pytest.fixture
def stopped_run(monkeypatch, capsys):
    """The directory of a run that was stopped after its first evaluation."""
    from priory.cli import progress

    with monkeypatch.context() as patch:
        patch.setattr(progress.Lines, "evaluated", lambda self, line: os.kill(os.getpid(), 2))
        assert main(["run", "fedavg", *DIGITS, "--out", "a"]) == 130
    capsys.readouterr()
    return Path("a")


def test_a_commit_that_is_not_json_is_refused(stopped_run, capsys):
    (stopped_run / "checkpoint/commit.json").write_text("{")
    assert "another directory" in complaint(["resume", "a"], capsys)


def test_a_damaged_record_is_refused(stopped_run, capsys):
    records = stopped_run / "checkpoint/server/records.bin"
    records.write_bytes(bytes(255 - byte for byte in records.read_bytes()))
    assert "checksum" in complaint(["resume", "a"], capsys)


def test_the_checkpoint_of_another_run_is_refused(stopped_run, capsys):
    edit_manifest(stopped_run / "manifest.toml", 'model = "linear"', 'model = "mlp:8"')
    complaint(["resume", "a"], capsys)


@pytest.mark.parametrize("text", ["not toml [", "x = 1", '[method]\nname = "fedavgg"\n[run]\n[data]\n'])
def test_a_manifest_that_is_none_is_refused(text, capsys):
    Path("m.toml").write_text(text)
    complaint(["run", "m.toml"], capsys)


def test_a_comparison_with_other_settings_leaves_the_old_one_alone(capsys):
    assert main(["compare", "fedavg", *DIGITS, "--out", "c"]) == 0
    before = {path: path.read_bytes() for path in Path("c").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["compare", "fedavg", *with_flag("--rounds", "4"), "--out", "c"]) == 2
    assert "rounds=3" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("c").rglob("*") if path.is_file()} == before


def test_a_bug_still_shows_its_traceback(monkeypatch):
    def broken(argv):
        raise ZeroDivisionError

    monkeypatch.setitem(app.COMMANDS, "methods", ("", broken))
    with pytest.raises(ZeroDivisionError):
        main(["methods"])


def test_a_tuning_that_cannot_be_written_is_refused_before_it_is_run(capsys, monkeypatch):
    Path("taken").write_text("")
    argv = ["tune", "fedavg", *DIGITS, "--over", "step-size=0.1,0.2", "--out"]
    assert "out='taken' cannot be written" in complaint([*argv, "taken"], capsys)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "read-only" in complaint([*argv, "shut"], capsys)


def test_a_manifest_with_a_word_for_a_number_is_refused(capsys):
    assert main(["run", "local", *with_flag("--rounds", "0"), "--out", "a"]) == 0
    edit_manifest(Path("a/manifest.toml"), "rounds = 0", 'rounds = "ten"')
    capsys.readouterr()
    assert "rounds='ten' is not a whole number" in complaint(["run", "a/manifest.toml", "--out", "b"], capsys)
    assert "rounds='ten' is not a whole number" in complaint(["resume", "a/manifest.toml"], capsys)
