"""Settings of the whole suite: strict JAX, two CPU devices, compiled code kept between runs.

It is kept with the command line's, outside the working tree: compiling takes longer than all else, and a second clone
need not do it again.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from priory.engine.compilation import cache_directory, let_go_of_programs

# Set on import, since JAX reads the device count once, at its first use.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """Lets go of compiled programs after any test, since a module such as that of the laws compiles more than fit."""
    yield
    let_go_of_programs()


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
def somewhere_else(tmp_path, monkeypatch) -> None:
    """Runs the command line in an empty directory."""
    jax.devices()  # settles the number of devices for the whole process, whatever the command line asks for
    monkeypatch.chdir(tmp_path)
