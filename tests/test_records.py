"""The two-slot store against a plain dictionary that crashes, and against flipped bits."""

import errno
import gc
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from priory import records
from priory.core.errors import UsageError
from priory.records import INDEX, OLD_INDEX, RECORDS, RecordStore

LIKE = {"n": np.int32(0), "on": np.bool_(False), "w": np.zeros((2, 3), np.float32)}


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


@pytest.fixture(params=[INDEX, OLD_INDEX], ids=["of today", "of format 1"])
def place(request, tmp_path) -> Path:
    """Where a store of either format is made."""
    (tmp_path / "records").mkdir()
    if request.param == OLD_INDEX:
        (tmp_path / "records" / OLD_INDEX).touch()
    return tmp_path


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
    assert not kept.read(ids(0), 3)[1][0]
    kept.write(ids(0), stack([7]), 7, 4)
    assert [int(kept.read(ids(0), at)[0]["n"][0]) for at in (4, 6, 7, 9)] == [4, 4, 7, 7]


def test_a_reader_is_told_when_a_run_that_goes_on_has_replaced_what_it_reads(place):
    kept = opened(place)
    kept.write(ids(0, 1), stack([3, 4]), 3, 0)
    reader = opened(place)
    kept.write(ids(0), stack([5]), 5, 3)
    assert reader.read(ids(0, 1, 2), 3)[0]["n"].tolist() == [3, 4, 0]
    kept.write(ids(0), stack([7]), 7, 5)
    with pytest.raises(UsageError, match="went on meanwhile; load it again"):
        reader.read(ids(0), 3)
    assert reader.read(ids(1, 2), 3)[1].tolist() == [True, False]


def test_a_reader_is_told_of_a_record_that_is_replaced_between_its_two_reads(tmp_path, monkeypatch):
    kept = opened(tmp_path)
    kept.write(ids(0), stack([3]), 3, 0)
    reader, entries = opened(tmp_path), RecordStore._entries

    def overtaken(store, client):
        found = entries(store, client)
        monkeypatch.undo()
        kept.write(ids(0), stack([5]), 5, 3)
        kept.write(ids(0), stack([7]), 7, 5)
        return found

    monkeypatch.setattr(RecordStore, "_entries", overtaken)
    with pytest.raises(UsageError, match="went on meanwhile; load it again"):
        reader.read(ids(0), 3)


def test_an_unwritten_record_costs_one_read(tmp_path, monkeypatch):
    kept, reads, pread = opened(tmp_path), [], os.pread
    monkeypatch.setattr(os, "pread", lambda *asked: reads.append(asked) or pread(*asked))
    assert not kept.read(ids(1), 3)[1].any()
    assert len(reads) == 1


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
def test_whatever_was_committed_survives_any_sequence_of_writes_and_crashes(place, seed):
    draw, num = np.random.default_rng(seed), 4
    kept, generation, committed = opened(place, num), 0, 0
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
            kept = opened(place, num)
            kept.discard_after(committed)
            generation, now = committed, dict(safe)
        everyone = np.arange(num)
        for at, model in ((generation, now), (committed, safe)):
            read, found = kept.read(everyone, at)
            assert found.tolist() == [client in model for client in range(num)]
            assert read["n"].tolist() == [model.get(client, 0) for client in range(num)]


def test_a_write_that_is_torn_at_any_byte_is_forgotten_for_good(place, monkeypatch):
    written = 2 * (opened(place)._bytes + 8)
    for left in range(written):
        kept = opened(place)
        kept.discard_after(0)
        kept.write(ids(0, 1), stack([1, 2]), 1, 0)
        kept.write(ids(0), stack([3]), 2, 1)
        with monkeypatch.context() as patch:
            patch.setattr(records.os, "pwrite", FullDisk(left))
            with pytest.raises(OSError, match="No space left"):
                kept.write(ids(0, 1), stack([4, 5]), 3, 2)
        kept.close()
        again = opened(place)
        assert again.read(ids(0, 1, 2), 2)[0]["n"].tolist() == [3, 2, 0]
        again.discard_after(2)
        again.write(ids(2), stack([6]), 3, 2)
        assert again.read(ids(0, 1, 2), 9)[0]["n"].tolist() == [3, 2, 6]


def test_a_generation_that_is_written_again_stays_readable_when_that_is_torn(place, monkeypatch):
    for left in range(opened(place)._bytes + 8):
        kept = opened(place)
        kept.discard_after(0)
        kept.write(ids(0), stack([1]), 1, 0)
        kept.write(ids(0), stack([2]), 2, 1)
        with monkeypatch.context() as patch:
            patch.setattr(records.os, "pwrite", FullDisk(left))
            with pytest.raises(OSError, match="No space left"):
                kept.write(ids(0), stack([2]), 2, 2)
        kept.close()
        assert opened(place).read(ids(0), 2)[0]["n"].tolist() == [2]


def test_forgetting_may_be_interrupted_at_any_byte(place, monkeypatch):
    for left in range(16):
        kept = opened(place)
        kept.discard_after(0)
        kept.write(ids(0, 1), stack([1, 2]), 1, 0)
        kept.write(ids(0, 1), stack([3, 4]), 2, 1)
        with monkeypatch.context() as patch:
            patch.setattr(records.os, "pwrite", FullDisk(left))
            with pytest.raises(OSError, match="No space left"):
                kept.discard_after(1)
        kept.close()
        again = opened(place)
        assert again.read(ids(0, 1), 1)[0]["n"].tolist() == [1, 2]
        again.discard_after(1)
        assert again.read(ids(0, 1), 9)[0]["n"].tolist() == [1, 2]


def flips(path: Path) -> Iterator[None]:
    """Bits of a file flipped, one after another: every bit of a small file, every ninth of another."""
    raw = path.read_bytes()
    for bit in range(0, 8 * len(raw), 9 if len(raw) > 100 else 1):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        yield
    path.write_bytes(raw)


@pytest.mark.parametrize("name", [INDEX, RECORDS])
def test_no_flipped_bit_brings_back_an_old_state(tmp_path, name):
    kept = opened(tmp_path, num=2)
    kept.write(ids(0), stack([1]), 1, 0)
    kept.write(ids(0), stack([2]), 2, 1)
    kept.close()
    refused = 0
    for _ in flips(tmp_path / "records" / name):
        again = opened(tmp_path, num=2)
        try:
            read, found = again.read(ids(0, 1), 2)
        except UsageError:
            refused += 1
        else:
            assert read["n"].tolist() == [2, 0]
            assert found.tolist() == [True, False]
        again.close()
    assert refused > 0


def moved(place: Path, one: int, other: int) -> None:
    """Copy the record in a slot over that in another, and nothing of the index."""
    path = place / "records" / RECORDS
    raw = path.read_bytes()
    size = len(raw) // 4
    copy = bytearray(raw)
    copy[other * size : (other + 1) * size] = raw[one * size : (one + 1) * size]
    path.write_bytes(copy)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (3, 1)], ids=["of an older round", "of another client"])
def test_a_whole_record_in_the_wrong_place_is_refused(tmp_path, one, other):
    kept = opened(tmp_path, num=2)
    kept.write(ids(0, 1), stack([1, 5]), 1, 0)
    kept.write(ids(0, 1), stack([2, 6]), 2, 1)
    moved(tmp_path, one, other)
    with pytest.raises(UsageError, match=r"Record 0 of .* does not match its checksum"):
        kept.read(ids(0), 2)


def test_a_store_of_many_clients_takes_memory_and_disk_for_those_that_were_written(tmp_path):
    tracemalloc.start()
    try:
        kept = opened(tmp_path, num=1_000_000)
        kept.write(ids(0, 999_999), stack([1, 2]), 1, 0)
        assert kept.read(ids(5, 999_999), 1)[0]["n"].tolist() == [0, 2]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "records").iterdir()) < 1 << 20


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


def test_a_short_write_is_completed(tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(records.os, "pwrite", lambda handle, raw, offset: write(handle, raw[:5], offset))
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
