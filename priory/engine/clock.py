"""Where the seconds of a run go: compiling, training, evaluating."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_COMPILING = 0.0


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    global _COMPILING
    if event.startswith("/jax/core/compile/"):
        _COMPILING += duration_secs


jax.monitoring.register_event_duration_secs_listener(_on_duration)


class Clock:
    """Seconds by kind of work; what JAX spends on tracing and compiling is booked as `compile`."""

    def __init__(self) -> None:
        self.seconds = {"compile": 0.0, "train": 0.0, "evaluate": 0.0}

    @contextmanager
    def booking(self, kind: str) -> Iterator[None]:
        """Book the time of a `with` block."""
        start, compiling = time.perf_counter(), _COMPILING
        try:
            yield
        finally:
            compiled = _COMPILING - compiling
            self.seconds["compile"] += compiled
            self.seconds[kind] += max(0.0, time.perf_counter() - start - compiled)
