"""From run directories to records: what is found, and what is refused."""

import json

import pytest

from priory.core.errors import UsageError
from priory.core.sealed import sealed
from priory.report import records
from priory.report.measure import measured
from priory.store import UNCERTAINTY, RunDirectory
from tests.older import without_checksums


def test_the_runs_of_a_comparison_come_in_its_order_and_unfinished_ones_are_told(written, tmp_path):
    paths = [written(f"fedavg-s{seed}", seed=seed) for seed in (2, 10)]
    ditto, stopped = written("ditto-s0", method="ditto"), written("local-s0", method="local")
    (stopped / "summary.json").unlink()
    assert records.find([tmp_path]) == ([ditto, *paths], [stopped])  # by name, 2 before 10
    runs = [{"runs": [{"path": name} for name in ("fedavg-s2", "fedavg-s10", "ditto-s0")]}]
    (tmp_path / "comparison.json").write_text(json.dumps({"methods": runs}))
    assert records.find([tmp_path])[0] == [*paths, ditto]


def test_a_damaged_comparison_is_refused(written, tmp_path):
    written("fedavg-s0")
    (tmp_path / "comparison.json").write_text(sealed({"methods": []}).replace("methods", "metiods"))
    with pytest.raises(UsageError, match=r"comparison\.json is damaged; delete it"):
        records.find([tmp_path])


def test_a_run_that_is_named_twice_is_found_once(written, tmp_path):
    path = written("a")
    assert records.find([path, path / "manifest.toml", tmp_path])[0] == [path]


def test_a_directory_without_runs_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="holds no run"):
            records.find([place])


def cut(path):
    text = path.read_text()
    path.write_text(text[: len(text) // 2])


DAMAGE = {
    "a truncated manifest": ("manifest.toml", lambda path: path.write_text("[method"), "not valid TOML"),
    "a foreign manifest": (
        "manifest.toml",
        lambda path: path.write_text("[tool]\nname = 'x'"),
        "not written by a run",
    ),
    "a truncated summary": ("summary.json", cut, "damaged"),
    "a foreign summary": ("summary.json", lambda path: path.write_text("[1, 2]"), "damaged"),
    "a summary of another tool": ("summary.json", lambda path: path.write_text('{"method": "x"}'), "damaged"),
    "scores that are words": (
        "summary.json",
        lambda path: path.write_text(path.read_text().replace('"ece": 0.1', '"ece": "good"')),
        "has no scores under personal",
    ),
    "truncated clients": ("clients.json", cut, "damaged"),
    "clients of unlike length": (
        "clients.json",
        lambda path: path.write_text('{"personal": {"client": ["a"], "nll": []}}'),
        "has no columns",
    ),
    "a damaged line": ("metrics.jsonl", lambda path: path.write_text("{not json}\n"), "damaged"),
    "a foreign line": ("metrics.jsonl", lambda path: path.write_text('{"step": 1}\n'), "damaged"),
    "a line without scores": (
        "metrics.jsonl",
        lambda path: path.write_text('{"round": 1, "personal": 3}\n'),
        "foreign line",
    ),
    "a truncated uncertainty": ("uncertainty.json", lambda path: path.write_text('{"kind": "cl'), "damaged"),
    "no summary": ("summary.json", lambda path: path.unlink(), "not finished"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_told_in_a_sentence_that_names_the_file(written, what):
    path = without_checksums(written("run"))
    name, damage, sentence = DAMAGE[what]
    damage(path / name)
    with pytest.raises(UsageError, match=sentence) as raised:
        records.read(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_damaged_commit_is_told(written):
    path = written("run")
    (path / "checkpoint").mkdir()
    (path / "checkpoint" / "commit.json").write_text("{")
    with pytest.raises(UsageError, match="not a commit"):
        records.read(path)


def test_a_line_that_a_crash_cut_short_is_left_out(written):
    path = written("run")
    whole = records.read(path).lines
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write('{"round": 3, "pers')
    assert records.read(path).lines == whole


@pytest.mark.xdist_group("command line")
def test_uncertainty_of_an_earlier_round_or_another_version_is_not_taken(comparison, written):
    measured(records.read(comparison / "FedAvg-s0"))
    table = RunDirectory(comparison / "FedAvg-s0").read(UNCERTAINTY)
    path = written("run")
    for found, is_taken in (({**table, "rounds": 2}, True), (table, False), ({"kind": "other"}, False)):
        (path / "uncertainty.json").write_text(json.dumps(found))
        assert (records.read(path).uncertainty is not None) == is_taken
