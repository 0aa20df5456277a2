"""A checkpoint, the run directory around it, and what damages them."""

import errno
import hashlib
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from priory import store
from priory.core.errors import UsageError
from priory.core.files import private_directory, write_atomically
from priory.store import Checkpoint, RunDirectory, TrialDirectory, read_manifest
from tests.test_records import LIKE, FullDisk, ids, stack

SERVER = {"w": np.zeros(4, np.float32)}


def server(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(4, value, np.float32)}


def test_a_checkpoint_of_another_schema_is_refused(tmp_path):
    first = Checkpoint(tmp_path, SERVER, LIKE, 3)
    first.commit(server(1), 0, 0, {})
    first.close()
    turned = {**LIKE, "w": np.zeros((3, 2), np.float32)}  # as many bytes, another meaning
    with pytest.raises(UsageError, match="holds another method, model or federation"):
        Checkpoint(tmp_path, SERVER, turned, 3)


@pytest.mark.parametrize("text", ["{", "[]", '{"round": 3}', "\x00\x00"])
def test_a_commit_that_is_not_one_is_refused(tmp_path, text):
    Checkpoint(tmp_path, SERVER, LIKE, 3).close()
    (tmp_path / "commit.json").write_text(text)
    with pytest.raises(UsageError, match="is not a commit of this library"):
        Checkpoint(tmp_path, SERVER, LIKE, 3)


@pytest.mark.parametrize("name", ["clients/records.bin", "clients/index.bin", "server/records.bin"])
def test_a_committed_checkpoint_that_lost_a_file_is_refused(tmp_path, name):
    first = Checkpoint(tmp_path, SERVER, LIKE, 3)
    first.clients.write(ids(0), stack([1]), 1, 0)
    first.commit(server(1), 1, 0, {})
    first.close()
    (tmp_path / name).unlink()
    with pytest.raises(UsageError, match=r"is missing.*start the run again"):
        Checkpoint(tmp_path, SERVER, LIKE, 3)


def test_a_commit_makes_server_round_and_extra_readable(tmp_path):
    first = Checkpoint(tmp_path, SERVER, LIKE, 3)
    assert first.round == -1
    first.commit(server(1), 0, 0, {})
    first.commit(server(2), 4, 17, {"rejected": {"a": 1}})
    first.close()
    second = Checkpoint(tmp_path, SERVER, LIKE, 3)
    assert (second.round, second.metrics_bytes, second.extra) == (4, 17, {"rejected": {"a": 1}})
    np.testing.assert_array_equal(second.read_server()["w"], server(2)["w"])


def test_committing_the_same_round_twice_keeps_it_readable(tmp_path):
    kept = Checkpoint(tmp_path, SERVER, LIKE, 3)
    for _ in range(3):
        kept.commit(server(2), 4, 0, {})
    assert Checkpoint(tmp_path, SERVER, LIKE, 3).read_server()["w"][0] == 2


@pytest.mark.parametrize("left", [0, 1, 30, 70, 100])
def test_a_full_disk_leaves_the_last_commit_readable(tmp_path, monkeypatch, left):
    kept = Checkpoint(tmp_path, SERVER, LIKE, 3)
    kept.clients.write(ids(0, 1), stack([1, 2]), 1, 0)
    kept.commit(server(1), 1, 0, {})

    def next_round() -> None:
        kept.clients.write(ids(0, 1), stack([3, 4]), 2, 1)
        kept.commit(server(2), 2, 0, {})

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "pwrite", FullDisk(left))
        with pytest.raises(OSError, match="No space left"):
            next_round()
    kept.close()
    again = Checkpoint(tmp_path, SERVER, LIKE, 3)
    again.clients.discard_after(again.round)
    assert again.round == 1
    assert again.read_server()["w"][0] == 1
    assert again.clients.read(ids(0, 1), again.round)[0]["n"].tolist() == [1, 2]


def test_an_atomic_write_that_fails_leaves_the_old_text_and_no_debris(tmp_path, monkeypatch):
    path = tmp_path / "commit.json"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_are_cut_where_the_commit_says(tmp_path):
    directory = RunDirectory(tmp_path)
    end = directory.append_metrics({"round": 1}, 0)
    directory.append_metrics({"round": 2, "torn": "by a crash"}, end)
    directory.cut_metrics(end)
    assert directory.metrics() == [{"round": 1}]
    directory.append_metrics({"round": 3}, end)
    assert [line["round"] for line in directory.metrics()] == [1, 3]


def damaged(path: Path) -> None:
    """Change a digit of the first line."""
    path.write_text(path.read_text().replace('"round": 1', '"round": 7', 1))


def test_metrics_that_a_commit_counts_are_refused_when_they_change(tmp_path):
    directory = RunDirectory(tmp_path)
    end = directory.append_metrics({"round": 1}, 0)
    Checkpoint(directory.checkpoint, SERVER, LIKE, 3).commit(server(1), 1, end, {}, directory.metrics_sha256(end))
    directory.append_metrics({"round": 2}, end)
    assert [line["round"] for line in RunDirectory(tmp_path).metrics()] == [1, 2]
    damaged(tmp_path / "metrics.jsonl")
    with pytest.raises(UsageError, match=r"metrics\.jsonl does not match its checksum"):
        RunDirectory(tmp_path).metrics()


def test_the_last_line_of_a_finished_run_is_refused_when_it_changes(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.append_metrics({"round": 1}, 0)
    summary = {"rounds": 1, "communication": {}, "seconds": {}, "extra": {}}
    directory.write_summary(summary, {})
    assert directory.summary() == summary
    damaged(tmp_path / "metrics.jsonl")
    with pytest.raises(UsageError, match=r"metrics\.jsonl does not match its checksum"):
        RunDirectory(tmp_path).metrics()


def test_the_checksum_of_metrics_is_that_of_the_file_whoever_wrote_it(tmp_path):
    first, ends = RunDirectory(tmp_path), [0]
    for t in range(1, 4):
        ends.append(first.append_metrics({"round": t}, ends[-1]))
    raw = (tmp_path / "metrics.jsonl").read_bytes()
    for directory in (first, RunDirectory(tmp_path)):
        for end in (ends[3], ends[1], ends[2], 0):
            assert directory.metrics_sha256(end) == hashlib.sha256(raw[:end]).hexdigest()


def test_a_line_put_before_the_end_drops_what_stood_behind_it(tmp_path):
    directory = RunDirectory(tmp_path)
    end = directory.append_metrics({"round": 1}, 0)
    directory.append_metrics({"round": 2, "long": "x" * 50}, end)
    directory.append_metrics({"round": 2}, end)
    assert directory.metrics() == [{"round": 1}, {"round": 2}]


def test_a_torn_last_line_of_the_metrics_is_not_read(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.append_metrics({"round": 1}, 0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "pers')
    assert directory.metrics() == [{"round": 1}]


def test_a_directory_that_holds_a_run_is_left_alone(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    written = {"run": {"rounds": 3}, "environment": {"data_checksum": "0"}}
    directory.create(written)
    with pytest.raises(UsageError, match=r"holds a run already.*priory resume"):
        directory.create({"run": {"rounds": 4}})
    assert directory.manifest() == written


def test_a_manifest_that_was_edited_is_no_longer_that_of_a_run(tmp_path):
    RunDirectory(tmp_path).create({"run": {"rounds": 3}, "environment": {"data_checksum": "0"}})
    path = tmp_path / "manifest.toml"
    path.write_text(path.read_text().replace("3", "4", 1))
    with pytest.raises(UsageError, match=r"edited; bring the original back, or delete its last line if .* priory run "):
        RunDirectory(tmp_path).manifest()
    assert read_manifest(path, may_be_edited=True)["run"] == {"rounds": 4}
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))  # the remedy
    assert RunDirectory(tmp_path).manifest()["run"] == {"rounds": 4}


def test_a_directory_that_cannot_be_made_ends_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be written.*choose a directory that can"):
        RunDirectory(tmp_path / "file" / "run").create({})


@pytest.mark.parametrize(("text", "sentence"), [(None, "cannot be read"), ("rounds = = 3", "is not valid TOML")])
def test_a_manifest_that_is_none_ends_in_a_sentence(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "manifest.toml").write_text(text)
    with pytest.raises(UsageError, match=sentence):
        RunDirectory(tmp_path).manifest()


def test_a_damaged_summary_ends_in_a_sentence(tmp_path):
    (tmp_path / "summary.json").write_text('{"method": ')
    with pytest.raises(UsageError, match=r"summary.json is damaged; delete it and resume the run"):
        RunDirectory(tmp_path).summary()


def test_a_checkpoint_of_trials_that_does_not_fit_is_begun_anew(tmp_path):
    kept = TrialDirectory(tmp_path, {})
    kept.checkpoint("0-0", np.zeros(3)).commit(np.ones(3), 2, 0, {})
    assert kept.checkpoint("0-0", np.zeros(3)).round == 2
    assert kept.checkpoint("0-0", np.zeros(4)).round == -1


def test_scores_of_trials_that_are_damaged_are_refused(tmp_path):
    kept = TrialDirectory(tmp_path, {"run": {"rounds": 3}})
    kept.begin()
    kept.add({"zeta=1": 0.5})
    assert kept.scores() == {"zeta=1": 0.5}
    (kept.path / "scores.json").write_text("{")
    with pytest.raises(UsageError, match=r"scores\.json is damaged; delete it"):
        kept.scores()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_directory_and_the_parents_it_lacks_are_closed_to_others(tmp_path, open_umask):
    (tmp_path / "theirs").mkdir(mode=0o755)
    private_directory(tmp_path / "theirs" / "a" / "b")
    assert [mode(tmp_path / "theirs" / name) for name in ("", "a", "a/b")] == [0o755, 0o700, 0o700]


@pytest.mark.parametrize(("ours", "full", "after"), [(True, True, 0o700), (False, False, 0o700), (False, True, 0o755)])
def test_a_directory_that_exists_is_closed_if_it_is_ours_or_empty(tmp_path, ours, full, after):
    place = tmp_path / "place"
    place.mkdir(mode=0o755)
    if full:
        (place / "file").touch()
    private_directory(place, ours)
    assert mode(place) == after


def test_a_file_in_the_place_of_a_private_directory_is_left_alone(tmp_path):
    (tmp_path / "file").touch(mode=0o644)
    with pytest.raises(FileExistsError):
        private_directory(tmp_path / "file")
    assert mode(tmp_path / "file") == 0o644


def test_a_secret_file_was_never_open_to_others(tmp_path, open_umask, monkeypatch):
    path, seen = tmp_path / "secret", []
    path.write_text("readable by all")
    (tmp_path / f".secret.{os.getpid()}").touch(mode=0o644)  # left behind by a process that died
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(stat.S_IMODE(os.fstat(handle).st_mode)))
    write_atomically(path, "hidden", mode=0o600)
    assert (seen[0], mode(path)) == (0o600, 0o600)
