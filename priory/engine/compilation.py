"""Compiled programs: kept on disk between processes, since compiling takes longer than most rounds; not too many."""

import gc
import os
from pathlib import Path

import jax

MOST_MAPPINGS = 30_000  # of memory; Linux allows a process 65,530


def keep_compiled(directory: Path | None = None) -> None:
    """Let JAX keep what it compiles, unless it has been told where already; for programs, not for a library."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(directory or cache_directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_directory() -> Path:
    """Where compiled programs are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "priory" / "xla"


def let_go_of_programs() -> None:
    """Drop what this process has compiled once it is much; what is used again is compiled, or read from disk, again.

    Every program maps memory, and at the kernel's limit XLA ends the process: some hundred different runs are enough.
    """
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
