"""Settings of the whole suite: strict JAX, two CPU devices, quick compilation, compiled code kept between runs.

Compiling takes longer than everything else, so the tests ask XLA for plain code: it compiles in a quarter of the time.
A test that runs long loops is marked `optimised`. `PRIORY_TEST_OPTIMISED=1` compiles everything as users do. Compiled
code is kept outside the working tree, next to that of the command line, so that a second clone reuses it.
"""

import gc
import os
import random

OPTIMISED = os.environ.get("PRIORY_TEST_OPTIMISED") == "1"
if not OPTIMISED:
    # In the environment, so that processes which tests start compile quickly as well; before JAX reads it.
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from priory.data import files
from priory.engine.compilation import cache_directory
from tests.budget import Budget
from tests.counts import COLLECTED

# Set on import, since JAX reads the device count once, at its first use.
jax.config.update("jax_disable_most_optimizations", not OPTIMISED)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Traces make many small objects that live long; collecting after every 700 of them takes a tenth of the time.
gc.set_threshold(50_000, 20, 50)

BUDGET = Budget()
WORTH_DROPPING = 150  # programs


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--budget` and `--shuffle`."""
    parser.addoption("--budget", action="store_true", help="fail when the suite exceeds the limits in tests/budget.py")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the test files in a random order")


def pytest_configure(config: pytest.Config) -> None:
    """Count costs."""
    config.pluginmanager.register(BUDGET)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give a file's tests to one worker, since they compile the same programs, unless they name a group."""
    config.stash[COLLECTED] = list(items)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(file_of(item)))
    seed = config.getoption("shuffle")
    if seed is not None:
        files = sorted({file_of(item) for item in items})
        random.Random(seed).shuffle(files)
        items.sort(key=lambda item: files.index(file_of(item)))
    # One group after the other in a single process too, as on workers.
    order = {group: place for place, group in enumerate(dict.fromkeys(map(group_of, items)))}
    items.sort(key=lambda item: order[group_of(item)])


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later collection."""
    gc.collect()
    gc.freeze()


def group_of(item: pytest.Item) -> str:
    """Return the group of a test, which one worker runs without a break."""
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None, "every test has been given one"
    return marker.args[0]


def file_of(item: pytest.Item) -> str:
    """Return the file of a test."""
    return item.nodeid.split("::")[0]


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Let new files and directories be open to everybody who is not kept out on purpose."""
    before = os.umask(0o000)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def optimised(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile a test that is marked so with all optimisations."""
    if request.node.get_closest_marker("optimised") is not None:
        jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", not OPTIMISED)


_dropped_at = 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drop compiled programs after a group of tests, since hardly any other group uses them.

    A process that keeps them grows by gigabytes, and everything that it does takes longer.
    """
    global _dropped_at
    is_last = nextitem is None or group_of(nextitem) != group_of(item)
    if is_last and BUDGET.compilations - _dropped_at >= WORTH_DROPPING:
        _dropped_at = BUDGET.compilations
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory of real data files; the test is skipped where there is none."""
    named = os.environ.get("PRIORY_DATA")
    if not named:
        pytest.skip("PRIORY_DATA is not set, so there are no data files to read")
    if not Path(named).is_dir():
        pytest.skip(f"PRIORY_DATA={named} is not a directory")
    return Path(named)


@pytest.fixture
def without_files(tmp_path_factory, monkeypatch) -> None:
    """Leave only the data sets that come with the package: no data directory, an empty cache, no network."""
    monkeypatch.delenv("PRIORY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(files, "fetch", _offline)


def _offline(name: str) -> None:
    raise ConnectionError(f"{name} is not here")


@pytest.fixture
def somewhere_else(tmp_path, monkeypatch) -> None:
    """Runs the command line in an empty directory."""
    jax.devices()  # settles the number of devices for the whole process, whatever the command line asks for
    monkeypatch.chdir(tmp_path)
