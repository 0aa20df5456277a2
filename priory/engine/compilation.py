"""Compiled programs kept on disk between processes: compiling takes longer than most rounds."""

import os
from pathlib import Path

import jax


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
