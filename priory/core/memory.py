"""How much memory there is, and the error for a value that needs more.

An estimate counts only what is certain to exist at the same time. It is compared with all the memory of the machine,
however much of it is in use, so that a value is refused only if it cannot work.
"""

import os
import resource
from contextlib import suppress
from pathlib import Path

from priory.core.errors import UsageError

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
VERSION_2 = ("memory.max", "memory.current")
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def total() -> int:
    """Return the most bytes that this process can have: of the machine with its swap, its cgroup, or `ulimit -v`."""
    swap = _meminfo("SwapTotal") or 0
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + swap]
    limits += [limit + swap for file, _ in _cgroups() if (limit := _number_in(file)) is not None]
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min([*limits, own] if own != resource.RLIM_INFINITY else limits)


def free() -> int:
    """Return the bytes that this process may still take, as far as the system tells."""
    found = [total(), _meminfo("MemAvailable")]
    for limit, usage in _cgroups():
        most, used = _number_in(limit), _number_in(usage)
        if most is not None and used is not None:
            # The kernel drops its copies of files when the memory of a cgroup runs short.
            found.append(max(0, most - max(0, used - _cached(limit.with_name("memory.stat")))))
    return min(number for number in found if number is not None)


def check(value: str, num_bytes: int, remedy: str, available: int | None = None) -> None:
    """Raise if a value needs more bytes than there are.

    Args:
        value: The value with its name, such as "batch-size=1000".
        available: Bytes that there are; `total()` by default.
    """
    available = total() if available is None else available
    if num_bytes > available:
        raise UsageError(
            f"{value} needs at least {shown(num_bytes)} of memory, and {shown(available)} is available; {remedy}."
        )


def shown(num_bytes: int) -> str:
    """Return a number of bytes in the unit that suits it.

    >>> shown(3 << 40), shown(1536), shown(10**30)
    ('3 TiB', '1.5 KiB', '867361737988 EiB')
    """
    power = min(max(0, num_bytes.bit_length() - 1) // 10, len(UNITS) - 1)
    value = num_bytes / 1024**power
    return f"{value:.3g} {UNITS[power]}" if value < 1000 else f"{value:.0f} {UNITS[power]}"


def _cgroups() -> list[tuple[Path, Path]]:
    """Return the files with limit and usage of the cgroups that may hold this process."""
    folders = [(CGROUPS, VERSION_2), (CGROUPS / "memory", VERSION_1)]
    with suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                folders.append((CGROUPS / path.lstrip("/"), VERSION_2))
            elif "memory" in controllers.split(","):
                folders.append((CGROUPS / "memory" / path.lstrip("/"), VERSION_1))
    return [(folder / limit, folder / usage) for folder, (limit, usage) in folders]


def _number_in(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _cached(file: Path) -> int:
    """Return the bytes of files that a cgroup holds in memory and that its `memory.stat` counts."""
    with suppress(OSError, ValueError):
        counts = dict(line.split() for line in file.read_text().splitlines())
        whole = "total_" if "total_active_file" in counts else ""  # version 1: with the cgroups inside
        return sum(int(counts.get(f"{whole}{kind}_file", 0)) for kind in ("inactive", "active"))
    return 0


def _meminfo(name: str) -> int | None:
    """Return the bytes that the system gives for a name; None where it does not."""
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
    return None
