from pathlib import Path

import pytest

from priory.core import memory
from priory.core.errors import UsageError


@pytest.fixture
def cgroup(tmp_path, monkeypatch) -> Path:
    """The root of the cgroups in the place of the machine's own."""
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "self")
    return tmp_path


def fill(place: Path, version: int, limit: int, used: int, stat: str = "") -> None:
    """Write the files of a cgroup."""
    place.mkdir(parents=True, exist_ok=True)
    limits, usage = memory.VERSION_1 if version == 1 else memory.VERSION_2
    (place / limits).write_text(f"{limit}\n")
    (place / usage).write_text(f"{used}\n")
    (place / "memory.stat").write_text(stat)


def test_a_limit_of_the_container_counts(cgroup):
    free = memory.total()
    (cgroup / "memory.max").write_text("1048576\n")
    assert memory.total() == 1048576 + (memory._meminfo("SwapTotal") or 0) < free


@pytest.mark.parametrize("text", ["max\n", "", "-1"])
def test_no_limit_of_the_container_leaves_that_of_the_machine(cgroup, text):
    free = memory.total()
    (cgroup / "memory.max").write_text(text)
    assert memory.total() == free


def test_what_fits_exactly_is_not_refused():
    memory.check("x=1", 1024, "choose less", available=1024)


def test_what_does_not_fit_is_refused_with_value_need_limit_and_remedy():
    with pytest.raises(UsageError) as caught:
        memory.check("x=1", 3 << 30, "choose less", available=1 << 30)
    assert str(caught.value) == "x=1 needs at least 3 GiB of memory, and 1 GiB is available; choose less."


def test_files_that_the_kernel_keeps_in_memory_are_free(cgroup):
    fill(cgroup, 2, 1000, 990, "anon 100\ninactive_file 500\nactive_file 300\nunevictable 90\n")
    assert memory.free() == 1000 - (990 - 500 - 300)


@pytest.mark.parametrize(("version", "line", "place"), [(2, "0::/a/b", "a/b"), (1, "4:cpu,memory:/a", "memory/a")])
def test_the_cgroup_inside_others_counts(cgroup, version, line, place):
    (cgroup / "self").write_text(f"1:name=systemd:/x\n{line}\n")
    fill(cgroup / place, version, 1000, 400)
    assert memory.free() == 600
    assert memory.total() == 1000 + (memory._meminfo("SwapTotal") or 0)


def test_version_1_counts_the_files_of_cgroups_inside(cgroup):
    stat = "inactive_file 1\nactive_file 2\ntotal_inactive_file 30\ntotal_active_file 40\n"
    fill(cgroup / "memory", 1, 1000, 400, stat)
    assert memory.free() == 1000 - (400 - 70)


@pytest.mark.parametrize("stat", ["", "inactive_file", "inactive_file many"])
def test_a_count_that_cannot_be_read_is_none(cgroup, stat):
    fill(cgroup, 2, 1000, 1400, stat)
    assert memory.free() == 0
