"""The locks fit `pyproject.toml`, every entry has hashes, and an audit that did not happen does not look clean."""

import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
OWN = PROJECT["project"]["dependencies"]
WANTED = {
    "dev.txt": [*OWN, *EXTRAS["dev"], *PROJECT["build-system"]["requires"]],
    "deploy.txt": [*OWN, *EXTRAS["flower"], *EXTRAS["privacy"]],
    "tools.txt": PROJECT["dependency-groups"]["tools"],
}
ENTRY = re.compile(r"(?P<pin>[a-z0-9.-]+(\[[a-z,-]+\])?==[^ ;]+( ; [^\\]+)?)( --hash=sha256:[0-9a-f]{64})+")
SYSTEMS = [(python, system) for python in ("3.11.7", "3.12.0", "3.13.0") for system in ("linux", "darwin")]
every_lock = pytest.mark.parametrize("lock", WANTED)


@cache
def entries(lock: str) -> list[str]:
    """The entries of a lock, each on one line, without comments."""
    lines = [line for line in (LOCKS / lock).read_text().splitlines() if not line.lstrip().startswith("#")]
    return [re.sub(r" +", " ", line) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


@cache
def versions(lock: str, python: str, system: str) -> dict[str, list[str]]:
    """What a lock installs on a machine: versions by name, more than one if entries contradict each other."""
    machine = {"python_full_version": python, "python_version": python.rpartition(".")[0], "sys_platform": system}
    machine |= {"os_name": "posix", "platform_python_implementation": "CPython", "implementation_name": "cpython"}
    found: dict[str, list[str]] = {}
    for entry in entries(lock):
        pin = Requirement(entry.partition(" --hash")[0])
        if pin.marker is None or pin.marker.evaluate(machine):
            found.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier).removeprefix("=="))
    return found


@every_lock
def test_a_lock_pins_every_requirement_at_a_version_that_it_allows(lock):
    for system in SYSTEMS:
        locked = versions(lock, *system)
        for requirement in map(Requirement, WANTED[lock]):
            (version,) = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), (requirement, version, system)


@every_lock
def test_a_lock_has_one_version_of_a_package_on_each_system(lock):
    for system in SYSTEMS:
        assert {name: found for name, found in versions(lock, *system).items() if len(found) > 1} == {}


@every_lock
def test_every_entry_of_a_lock_is_a_version_with_hashes(lock):
    assert [entry for entry in entries(lock) if not ENTRY.fullmatch(entry)] == []


@every_lock
def test_a_lock_names_no_host_and_no_path(lock):
    words = (LOCKS / lock).read_text().replace("-c requirements/dev.txt", "").split()
    assert [word for word in words if re.search(r"/|^--(?!hash=)|^-[a-z]", word)] == []


def test_a_deployment_installs_what_the_tests_ran_with():
    for system in SYSTEMS:
        tested = versions("dev.txt", *system)
        assert {
            name: found for name, found in versions("deploy.txt", *system).items() if tested.get(name) != found
        } == {}


def test_the_page_of_licences_names_every_package_and_none_under_the_gpl():
    rows = re.findall(r"^\| ([a-z0-9.-]+) \| (.+?) \|", (ROOT / "docs" / "licences.md").read_text(), re.MULTILINE)
    page = dict(rows[1:])  # without the heading
    locked = {re.split(r"[\[=]", entry)[0] for lock in ("dev.txt", "deploy.txt") for entry in entries(lock)}
    assert page.keys() == locked
    assert [name for name, licence in page.items() if "GPL" in licence.upper() or not licence.strip()] == []


FOUND = {"id": "PYSEC-1", "fix_versions": ["2.0"], "aliases": [], "description": "overflow"}
AUDITED = {"name": "one", "version": "1.0", "vulns": []}
SKIPPED = {"name": "three", "skip_reason": "Dependency not found"}
ANSWERS = {
    "clean": ([AUDITED], "", 0, 0, "1 packages checked"),
    "vulnerable": ([AUDITED | {"vulns": [FOUND]}], "", 1, 1, "one 1.0: PYSEC-1, fixed in 2.0"),
    "without a network": (None, "ConnectionError: no such host", 1, 4, "Not audited: requirements/dev.txt and"),
    "skipped by a mirror": ([AUDITED, SKIPPED], "", 0, 4, "(1 of 2 packages were skipped); run `make audit` where"),
    "vulnerable and skipped": ([AUDITED | {"vulns": [FOUND]}, SKIPPED], "", 1, 1, "Not audited"),
    "empty": ([], "", 0, 4, "Not audited"),
}


@pytest.mark.parametrize(("packages", "complaint", "code", "expected", "sentence"), ANSWERS.values(), ids=ANSWERS)
def test_only_a_complete_audit_without_a_finding_ends_with_0(packages, complaint, code, expected, sentence, tmp_path):
    report = "" if packages is None else json.dumps({"dependencies": packages, "fixes": []})
    fake = f"import sys\nprint({report!r})\nprint({complaint!r}, file=sys.stderr)\nsys.exit({code})\n"
    (tmp_path / "pip_audit.py").write_text(fake)
    command = [sys.executable, "-S", str(LOCKS / "audit.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == expected, done.stderr
    assert sentence in done.stdout
