"""How much memory there is, and the error for a value that needs more.

An estimate counts only what is certain to exist at the same time. It is compared with all the memory of the machine,
however much of it is in use, so that a value is refused only if it cannot work.
"""

import os
import resource
from contextlib import suppress
from pathlib import Path

from priory.core.errors import UsageError

CGROUPS = Path("/sys/fs/cgroup")
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def total() -> int:
    """Return the most bytes that this process can have: of the machine with its swap, its cgroup, or `ulimit -v`."""
    swap = _swap()
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + swap]
    limits += [limit + swap for limit in _cgroup_limits()]
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min([*limits, own] if own != resource.RLIM_INFINITY else limits)


def free() -> int:
    """Return the bytes that this process may still take, as far as the system tells."""
    limits = [total()]
    with suppress(OSError, ValueError, IndexError):
        limits.append(int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024)
    with suppress(OSError, ValueError):  # in a container
        used = int((CGROUPS / "memory.current").read_text())
        limits.append(int((CGROUPS / "memory.max").read_text()) - used)
    return min(limits)


def check(value: str, num_bytes: int, remedy: str, available: int | None = None) -> None:
    """Raise if a value needs more bytes than there are.

    Args:
        value: The value with its name, such as "batch-size=1000".
        available: Bytes that there are; `total()` by default.
    """
    available = total() if available is None else available
    if num_bytes > available:
        raise UsageError(
            f"{value} needs at least {shown(num_bytes)} of memory, and there are {shown(available)} for this process; "
            f"{remedy}."
        )


def shown(num_bytes: int) -> str:
    """Return a number of bytes in the unit that suits it.

    >>> shown(3 << 40), shown(1536), shown(10**30)
    ('3 TiB', '1.5 KiB', '867361737988 EiB')
    """
    power = min(max(0, num_bytes.bit_length() - 1) // 10, len(UNITS) - 1)
    value = num_bytes / 1024**power
    return f"{value:.3g} {UNITS[power]}" if value < 1000 else f"{value:.0f} {UNITS[power]}"


def _cgroup_limits() -> list[int]:
    """Return the limits of the cgroups that hold this process, as far as they can be read."""
    try:
        entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    files = [CGROUPS / "memory.max", CGROUPS / "memory/memory.limit_in_bytes"]
    for _, controllers, path in entries:
        version_1 = "memory" in controllers.split(",")
        if version_1 or not controllers:
            place = CGROUPS / ("memory" if version_1 else "") / path.lstrip("/")
            files.append(place / ("memory.limit_in_bytes" if version_1 else "memory.max"))
    return [limit for limit in map(_number_in, files) if limit is not None]


def _number_in(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _swap() -> int:
    """Return the bytes of swap space, where the system says how much there is."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:")), 0)
