from pathlib import Path

import pytest

from priory.core import memory
from priory.core.errors import UsageError


@pytest.fixture
def cgroup(tmp_path, monkeypatch) -> Path:
    """The place of a cgroup in the stead of the machine's own."""
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    return tmp_path


def test_a_limit_of_the_container_counts(cgroup):
    free = memory.total()
    (cgroup / "memory.max").write_text("1048576\n")
    assert memory.total() == 1048576 + memory._swap() < free


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
    assert str(caught.value) == "x=1 needs at least 3 GiB of memory, and there are 1 GiB for this process; choose less."
