"""The two-slot store against a plain dictionary that crashes, and the run directory around it."""

import errno
import gc
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from priory import store
from priory.core.errors import UsageError
from priory.store import Checkpoint, RecordStore, RunDirectory, TrialDirectory, private_directory, write_atomically

LIKE = {"n": np.int32(0), "on": np.bool_(False), "w": np.zeros((2, 3), np.float32)}
SERVER = {"w": np.zeros(4, np.float32)}


def record(value: int) -> dict[str, np.ndarray]:
    """A record whose every number tells which one it is."""
    return {"n": np.int32(value), "on": np.bool_(value % 2), "w": np.full((2, 3), value / 8, np.float32)}


def stack(values: list[int]) -> dict[str, np.ndarray]:
    """Records on a leading axis."""
    return {name: np.stack([record(value)[name] for value in values]) for name in LIKE}


def ids(*clients: int) -> np.ndarray:
    return np.array(clients, int)


def opened(path: Path, num: int = 3) -> RecordStore:
    return RecordStore(path / "records", LIKE, num)


def server(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(4, value, np.float32)}


def test_a_record_comes_back_as_it_was_written(tmp_path):
    kept = opened(tmp_path)
    kept.write(ids(2, 0), stack([5, 6]), 1, 0)
    read, found = kept.read(ids(0, 1, 2), 1)
    assert found.tolist() == [True, False, True]
    expected = stack([6, 0, 5])
    for name, leaf in read.items():
        assert leaf.dtype == LIKE[name].dtype
        np.testing.assert_array_equal(leaf, expected[name])


def test_a_record_without_leaves_can_be_written_and_found(tmp_path):
    kept = RecordStore(tmp_path, (), 2)
    kept.write(ids(1), (), 1, 0)
    assert kept.read(ids(0, 1), 1)[1].tolist() == [False, True]


def test_a_read_at_a_generation_sees_nothing_younger(tmp_path):
    kept = opened(tmp_path)
    kept.write(ids(0), stack([4]), 4, 0)
    kept.write(ids(0), stack([7]), 7, 4)
    assert not kept.read(ids(0), 3)[1][0]
    assert [int(kept.read(ids(0), at)[0]["n"][0]) for at in (4, 6, 7, 9)] == [4, 4, 7, 7]


def test_uncommitted_generations_are_gone_after_reopening(tmp_path):
    first = opened(tmp_path)
    first.write(ids(0, 1), stack([1, 1]), 1, 0)
    first.write(ids(0), stack([2]), 2, 1)
    first.close()
    second = opened(tmp_path)
    second.discard_after(1)
    read, found = second.read(ids(0, 1), 9)
    assert read["n"].tolist() == [1, 1]
    assert found.all()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_was_committed_survives_any_sequence_of_writes_and_crashes(tmp_path, seed):
    draw, num = np.random.default_rng(seed), 4
    kept, generation, committed = opened(tmp_path, num), 0, 0
    now: dict[int, int] = {}
    safe: dict[int, int] = {}
    for step in range(200):
        action = draw.choice(["write", "write", "write", "commit", "crash"])
        if action == "write":
            cohort = draw.choice(num, size=draw.integers(1, num + 1), replace=False)
            generation += 1
            values = [step * num + int(client) for client in cohort]
            kept.write(cohort, stack(values), generation, committed)
            now.update(zip(cohort.tolist(), values, strict=True))
        elif action == "commit":
            committed, safe = generation, dict(now)
        else:
            kept.close()
            kept = opened(tmp_path, num)
            kept.discard_after(committed)
            generation, now = committed, dict(safe)
        everyone = np.arange(num)
        for at, model in ((generation, now), (committed, safe)):
            read, found = kept.read(everyone, at)
            assert found.tolist() == [client in model for client in range(num)]
            assert read["n"].tolist() == [model.get(client, 0) for client in range(num)]


def test_a_damaged_record_is_refused_and_named(tmp_path):
    kept = opened(tmp_path)
    kept.write(ids(1), stack([1]), 1, 0)
    kept.close()
    raw = bytearray((tmp_path / "records" / "records.bin").read_bytes())
    raw[next(place for place in range(len(raw) - 1, -1, -1) if raw[place])] ^= 1  # a bit of what was written
    (tmp_path / "records" / "records.bin").write_bytes(raw)
    with pytest.raises(UsageError, match=r"Record 1 of .*records\.bin does not match its checksum.*another directory"):
        opened(tmp_path).read(ids(1), 1)


def test_damage_of_a_slot_that_nobody_reads_is_not_noticed(tmp_path):
    kept = opened(tmp_path)
    kept.write(ids(0), stack([3]), 3, 0)
    kept.write(ids(0), stack([4]), 4, 3)
    size = (tmp_path / "records" / "records.bin").stat().st_size // 6
    with (tmp_path / "records" / "records.bin").open("r+b") as file:
        file.write(b"\xff" * size)  # client 0, slot 0: generation 3
    assert int(kept.read(ids(0), 4)[0]["n"][0]) == 4
    with pytest.raises(UsageError, match="checksum"):
        kept.read(ids(0), 3)


def test_a_file_of_another_size_is_refused(tmp_path):
    opened(tmp_path, num=3).close()
    with pytest.raises(UsageError, match=r"was cut or belongs to another run; start the run again in another"):
        opened(tmp_path, num=4)


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


class FullDisk:
    """Stands for `os.pwrite` on a disk with so many bytes left: the last write is cut short, then there is an error."""

    def __init__(self, left: int) -> None:
        self.left, self.write = left, os.pwrite

    def __call__(self, handle: int, raw: bytes, offset: int) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.write(handle, raw[: self.left], offset)
        self.left -= written
        return written


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


def test_a_short_write_is_completed(tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(store.os, "pwrite", lambda handle, raw, offset: write(handle, raw[:5], offset))
    kept = opened(tmp_path)
    kept.write(ids(1), stack([9]), 1, 0)
    assert int(kept.read(ids(1), 1)[0]["n"][0]) == 9


def test_a_store_that_nobody_holds_gives_its_files_back(tmp_path):
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("the open files of a process are listed on Linux only")
    gc.collect()
    before = num_open()
    for _ in range(5):
        opened(tmp_path)
    gc.collect()
    assert num_open() == before


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
