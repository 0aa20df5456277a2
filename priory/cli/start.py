"""What the command line sets before JAX is first used: host devices and the compilation cache."""

import os
import sys
from pathlib import Path
from typing import Any

import jax

from priory import methods
from priory.core.errors import UsageError
from priory.engine.compilation import keep_compiled
from priory.fed.method import Method
from priory.models.model import code_named

MOST_DEVICES = 4096


def start_jax(devices: int | None, recorded: int | None = None) -> None:
    """Give JAX one host device a core (or as many as asked for, or as a manifest records) and a cache on disk."""
    if devices is not None and devices < 1:
        raise UsageError(f"devices={devices} is too small; choose 1 or more.")
    if devices is not None and devices > MOST_DEVICES:
        raise UsageError(f"devices={devices} is too large, since each is a thread; choose at most {MOST_DEVICES}.")
    wanted = devices or recorded or _num_cores()
    keep_compiled()
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:  # `main` was called from a program that has used JAX already
        if devices is not None and devices != len(jax.devices()):
            raise UsageError(
                f"devices={devices} cannot be set, since JAX already runs on {len(jax.devices())}; "
                "give it in a fresh process."
            ) from None


def import_typed(run: dict[str, Any]) -> None:
    """Let `--model mynet:make` find mynet.py in the current directory, if the flags of a run name such a model."""
    if code_named(run["model"], run["models"]) is not None:
        import_from_here()


def typed_method(name: str) -> Method:
    """Return the method that the user typed, with its default settings; a module may be in the current directory."""
    if methods.is_code(name):
        import_from_here()
    return methods.make(name)


def import_from_here() -> None:
    """Let modules be imported from the current directory, as `python -m` does.

    Only for names that the user typed or trusts: libraries look for optional packages, and would find files of these
    names here. The directory comes last, so that a file with the name of an installed library does not hide it.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _num_cores() -> int:
    """The cores that this process may use, fewer than the machine has in many containers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
