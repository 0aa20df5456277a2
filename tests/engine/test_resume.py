"""Exact resume: a run that died at any moment ends with the same bits as one that never did."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import priory
from priory import store
from priory.engine import runner
from priory.fed.channel import TopK
from priory.store import RunDirectory
from tests.older import edit_manifest

METHOD = priory.Ditto(lam=0.5)
CHANNEL = TopK(fraction=0.5)
HOMES = {"resident": 1 << 30, "stored": 0}


class Killed(BaseException):
    """Stands for SIGKILL."""


@contextmanager
def dying_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[None]:
    """A block in which the process dies when a function is called."""

    def dies(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies)
        with pytest.raises(Killed):
            yield


class Killer:
    """Lets a process die in its n-th system call that touches the disk, half of what it wrote being written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
        self.left = left
        write = os.pwrite
        monkeypatch.setattr(store.os, "pwrite", lambda h, raw, at: self.half(write, h, raw, at))
        for owner, name in ((store.os, "fsync"), (store.os, "ftruncate"), (Path, "replace")):
            monkeypatch.setattr(owner, name, self.wrapped(getattr(owner, name)))

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.count()
            done = call(*args)
            self.count()  # and once after it took effect
            return done

        return run

    def half(self, write: Callable[..., int], handle: int, raw: bytes, at: int) -> int:
        try:
            self.count()
        except Killed:
            write(handle, raw[: len(raw) // 2], at)
            raise
        return write(handle, raw, at)

    def count(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise Killed


@pytest.fixture(scope="module")
def start(federation, simulate):
    """A run that writes its directory."""

    def run(out: Path, home: str, **more: Any) -> Any:
        options = {"rounds": 6, "eval_every": 2, "resident_bytes": HOMES[home], "channel": CHANNEL} | more
        return simulate(METHOD, out=out, **options)

    return run


@pytest.fixture(scope="module")
def resume(federation):
    """The run in a directory, gone on with."""

    def run(out: Path, **more: Any) -> Any:
        return priory.resume(out, **({"federation": federation, "channel": CHANNEL} | more))

    return run


@pytest.fixture(scope="module")
def unbroken(start, tmp_path_factory):
    """The run that never stopped, for each home."""
    return {home: start(tmp_path_factory.mktemp(home) / "run", home) for home in HOMES}


@pytest.fixture
def many_commits(monkeypatch):
    """A commit after every round, whatever the clock says; the unbroken run commits at evaluations only."""
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(runner, "COMMIT_SECONDS", -1.0)


def lines(run: Any) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    found = RunDirectory(run.path).metrics()
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def summary(run: Any) -> dict[str, Any]:
    """summary.json without what depends on the machine."""
    found = RunDirectory(run.path).summary()
    return {name: value for name, value in found.items() if name not in ("seconds", "peak_rss_bytes")}


def assert_same_end(one: Any, other: Any, assert_same_bits: Callable[[Any, Any], None]) -> None:
    assert_same_bits(one, other)
    assert lines(one) == lines(other)
    assert summary(one) == summary(other)
    assert RunDirectory(one.path).per_client() == RunDirectory(other.path).per_client()


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_dies_in_any_write_and_is_resumed_ends_with_the_same_bits(
    unbroken, start, resume, tmp_path, monkeypatch, many_commits, assert_same_bits, home, seed
):
    draw, deaths, run = np.random.default_rng(seed), 0, None
    while run is None:
        begin = resume if (tmp_path / "run" / "manifest.toml").exists() else start
        with monkeypatch.context() as patch:
            Killer(patch, int(draw.integers(1, 80)))
            try:
                run = begin(tmp_path / "run") if begin is resume else begin(tmp_path / "run", home)
            except Killed:
                deaths += 1
    assert deaths >= 3
    assert_same_end(unbroken[home], run, assert_same_bits)


@pytest.mark.parametrize("home", HOMES)
def test_a_run_killed_before_its_first_commit_starts_again(
    unbroken, start, resume, tmp_path, monkeypatch, assert_same_bits, home
):
    with dying_in(monkeypatch, store.Checkpoint, "commit"):
        start(tmp_path / "run", home)
    assert not (tmp_path / "run" / "checkpoint" / "commit.json").exists()
    assert_same_end(unbroken[home], resume(tmp_path / "run"), assert_same_bits)


def test_a_run_of_which_only_the_manifest_was_written_can_be_resumed(
    unbroken, start, resume, tmp_path, monkeypatch, assert_same_bits
):
    with dying_in(monkeypatch, runner.Checkpoint, "__init__"):
        start(tmp_path / "run", "resident")
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert_same_end(unbroken["resident"], resume(tmp_path / "run"), assert_same_bits)


def test_a_run_killed_in_its_last_evaluation_writes_the_same_last_line(
    unbroken, start, resume, tmp_path, monkeypatch, assert_same_bits
):
    with dying_in(monkeypatch, runner.Runner, "_finished"):
        start(tmp_path / "run", "resident")
    assert_same_end(unbroken["resident"], resume(tmp_path / "run"), assert_same_bits)


@pytest.mark.parametrize("home", HOMES)
def test_a_run_that_was_told_to_stop_goes_on_where_it_was(
    unbroken, start, resume, tmp_path, many_commits, assert_same_bits, home
):
    asked = iter([False, False, False, True])
    half = start(tmp_path / "run", home, stop=lambda: next(asked))
    assert half.completed == 3
    assert half.personal is None
    assert RunDirectory(tmp_path / "run").summary() is None
    assert_same_end(unbroken[home], resume(tmp_path / "run"), assert_same_bits)


def test_a_stop_before_the_first_round_is_a_commit_of_the_first_server(
    unbroken, start, resume, tmp_path, assert_same_bits
):
    assert start(tmp_path / "run", "resident", stop=lambda: True).completed == 0
    assert_same_end(unbroken["resident"], resume(tmp_path / "run"), assert_same_bits)


def test_resuming_a_finished_run_computes_nothing(unbroken, resume, monkeypatch, assert_same_bits):
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(runner.Runner, "run", never)
    again = resume(unbroken["resident"].path)
    assert again.personal.accuracy == unbroken["resident"].personal.accuracy
    assert_same_bits(unbroken["resident"], again)


def test_a_commit_after_many_rounds_holds_every_client_that_ran_in_one_of_them(
    start, federation, tmp_path, monkeypatch, assert_same_bits
):
    monkeypatch.setattr(runner, "LOOK_SECONDS", 1e9)  # one round, then all the others in one block
    run = start(tmp_path / "run", "resident", eval_every=0)
    assert_same_bits(run, priory.load(tmp_path / "run", federation=federation, channel=CHANNEL))


def test_a_line_that_was_not_committed_is_cut_when_the_run_goes_on(start, resume, tmp_path, monkeypatch, many_commits):
    with dying_in(monkeypatch, runner.Runner, "_commit"):
        start(tmp_path / "run", "resident", eval_every=1)
    assert len(RunDirectory(tmp_path / "run").metrics()) == 1
    assert resume(tmp_path / "run", stop=lambda: True).history == []
    assert RunDirectory(tmp_path / "run").metrics() == []


def test_loading_a_run_that_is_under_way_changes_nothing_on_disk(
    federation, start, tmp_path, many_commits, monkeypatch
):
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    asked = iter([False, False, False, True])
    start(tmp_path / "run", "stored", stop=lambda: next(asked))
    with dying_in(monkeypatch, runner.Runner, "_note"):  # the fourth round is on disk and not committed
        priory.resume(tmp_path / "run", federation=federation, channel=CHANNEL)
    before = files()
    assert priory.load(tmp_path / "run", federation=federation, channel=CHANNEL).completed == 3
    assert files() == before


def test_a_resumed_run_on_other_devices_says_that_bits_will_differ(start, federation, tmp_path):
    start(tmp_path / "run", "resident", rounds=0)
    edit_manifest(tmp_path / "run" / "manifest.toml", "devices = 2", "devices = 3")
    with pytest.warns(UserWarning, match="made on 3 devices and goes on with 2"):
        priory.load(tmp_path / "run", federation=federation, channel=CHANNEL)


def test_a_channel_that_a_manifest_cannot_hold_has_to_be_given_again(unbroken, federation):
    with pytest.raises(priory.UsageError, match=r"was given channel=TopK\(fraction=0.5\).*pass it again"):
        priory.resume(unbroken["resident"].path, federation=federation)


def test_a_directory_that_holds_a_run_is_not_overwritten(unbroken, start):
    with pytest.raises(priory.UsageError, match="holds a run already"):
        start(unbroken["resident"].path, "resident")


def test_a_checkpoint_of_another_model_is_refused(start, federation, tmp_path):
    start(tmp_path / "run", "resident", rounds=0)
    edit_manifest(tmp_path / "run" / "manifest.toml", 'model = "linear"', 'model = "mlp:4"')
    with pytest.raises(priory.UsageError, match=r"belongs to another run|holds another method"):
        priory.resume(tmp_path / "run", federation=federation, channel=CHANNEL)


CHILD = """
    import sys
    from pathlib import Path
    import jax
    import numpy as np
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", sys.argv[3])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import priory
    from priory.engine import runner
    from priory.fed.channel import TopK
    runner.LOOK_SECONDS = 0.01
    runner.COMMIT_SECONDS = -1.0
    data, out = np.load(sys.argv[1]), Path(sys.argv[2])
    federation = priory.data.from_arrays(**data, test=0.2, seed=0)
    channel = TopK(fraction=0.5)
    print("ready", flush=True)
    if (out / "manifest.toml").exists():
        priory.resume(out, federation=federation, channel=channel)
    else:
        priory.simulate(priory.Ditto(lam=0.5), federation, model="linear", rounds=300, cohort=3, seed=0,
                        eval_every=20, channel=channel, out=out)
"""


@pytest.mark.slow  # three processes; the tests above interrupt every single write
def test_a_process_killed_again_and_again_ends_with_the_same_bits(
    arrays, start, resume, tmp_path, assert_same_bits, pytestconfig
):
    np.savez(tmp_path / "data.npz", **arrays)
    cache = jax.config.jax_compilation_cache_dir
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(CHILD),
        *map(str, (tmp_path / "data.npz", tmp_path / "run", cache)),
    ]
    draw, kills, code = np.random.default_rng(0), 0, None
    reached = [0]
    while code != 0:
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=pytestconfig.rootpath) as child:
            assert child.stdout.readline() == b"ready\n"
            if kills < 2:
                wait_for_more(tmp_path / "run", reached[-1], child)
                time.sleep(draw.uniform(0, 0.2))
                child.send_signal(signal.SIGKILL)
            code = child.wait(timeout=120)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        reached.append(rounds_done(tmp_path / "run"))
    assert kills == 2
    assert 0 < reached[-2] < 300
    resumed = resume(tmp_path / "run")
    whole = start(tmp_path / "whole", "resident", rounds=300, eval_every=20)
    assert_same_end(whole, resumed, assert_same_bits)


def rounds_done(out: Path) -> int:
    commit = out / "checkpoint" / "commit.json"
    return json.loads(commit.read_text())["round"] if commit.exists() else 0


def wait_for_more(out: Path, reached: int, child: subprocess.Popen) -> None:
    """Return when a child has committed a round that no child before it had."""
    deadline = time.monotonic() + 120
    while rounds_done(out) <= reached and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
