"""What every measurement here shares: the machine, how busy it is, results as JSON files, alternating two sides."""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
LAUNCHES = 3
IDLE = 0.2  # of the cores may be busy with other things


def machine() -> dict[str, Any]:
    """The machine and how many of its cores others use now, measured over a moment in which this process sleeps."""
    from importlib.metadata import version

    return {
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "jax": version("jax"),
        "busy_cores_before": round(busy_cores(), 2),
        "date": date.today().isoformat(),
    }


def describe(told: dict[str, Any]) -> str:
    """One sentence on the machine that something was measured on."""
    words = [f"{told['cores']} cores"]
    if told.get("cpu"):
        words[0] += f" ({told['cpu']})"
    if told.get("memory_gb"):
        words.append(f"{told['memory_gb']:.0f} GB")
    words.append(f"JAX {told['jax']}")
    busy = told.get("busy_cores_before")
    words.append("load not recorded" if busy is None else f"{busy:.1f} cores busy before the start")
    if told.get("date"):
        words.append(told["date"])
    return ", ".join(words)


def is_idle(told: dict[str, Any]) -> bool:
    """Whether others left the machine alone, as far as is known; a ratio from a busy one is worth nothing."""
    return (told.get("busy_cores_before") or 0.0) <= IDLE


def busy_cores(seconds: float = 2.0) -> float:
    """How many cores others use."""
    if not Path("/proc/stat").exists():
        return os.getloadavg()[0]

    def idle() -> float:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
        return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")

    before = idle()
    time.sleep(seconds)
    return max(0.0, (os.cpu_count() or 1) - (idle() - before) / seconds)


def save(name: str, told: dict[str, Any], **content: Any) -> Path:
    """Write the results of one family, with the machine, to `bench/results/`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": told, **content}, indent=2, ensure_ascii=False) + "\n")
    return path


def load(name: str) -> dict[str, Any] | None:
    """The results of one family; None where it was never measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def alternate(ours: Callable[[], float], theirs: Callable[[], float], launches: int = LAUNCHES) -> tuple[float, float]:
    """The best of both sides, measured in turn after a warm-up."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(launches)]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log value over log size by least squares, on the upper half of the sizes (the middle one included).

    >>> round(exponent([1, 10, 100, 1000], [5.0, 5.0, 7.0, 700.0]), 3)
    2.0
    """
    points = sorted(zip(sizes, values, strict=True))[len(sizes) // 2 :]
    if len(points) < 2:
        points = sorted(zip(sizes, values, strict=True))[-2:]
    x, y = ([math.log(point[axis]) for point in points] for axis in (0, 1))
    centre_x, centre_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - centre_x) * (b - centre_y) for a, b in zip(x, y, strict=True))
    return slope / sum((a - centre_x) ** 2 for a in x)


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
