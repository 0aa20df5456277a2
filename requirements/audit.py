"""Ask the OSV database for known vulnerabilities of every locked package; `make audit` runs this.

The exit code is 0 if none is known, 1 if some are, and 4 if a package could not be checked. pip-audit itself ends with
1 for a vulnerability and for a failure alike, and with 0 after it has skipped packages that a database does not list.
PyPI's own database is not used: where a mirror of PyPI answers in its place, every package is skipped.

The lock of a deployment is a part of `dev.txt`. Packages that only another version of Python installs are left out.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

LOCKS = [Path(__file__).with_name(name) for name in ("dev.txt", "tools.txt")]
CLEAN, VULNERABLE, NOT_AUDITED = 0, 1, 4
OPTIONS = ["--vulnerability-service", "osv", "--require-hashes", "--disable-pip", "--progress-spinner", "off"]


def main() -> int:
    """Audit the locks, print what is known of them, and return the exit code."""
    found, failures = 0, {}
    for lock in LOCKS:
        name = f"{lock.parent.name}/{lock.name}"
        packages, failure = ask(lock)
        found += sum(print_vulnerabilities(package) for package in packages)
        if failure:
            failures[name] = failure
        else:
            print(f"{name}: {len(packages)} packages checked.")
    if failures:
        names, reason = " and ".join(failures), next(iter(failures.values()))
        print(f"Not audited: {names} ({reason}); run `make audit` where the OSV database can be reached.")
    if found:
        return VULNERABLE
    return NOT_AUDITED if failures else CLEAN


def ask(lock: Path) -> tuple[list[dict], str]:
    """Return what pip-audit reports of each package, and why the report is missing or has gaps."""
    command = [sys.executable, "-m", "pip_audit", *OPTIONS, "--format", "json", "--requirement", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines() or [f"pip-audit ended with {done.returncode}"]
        return [], textwrap.shorten(lines[-1], 100, placeholder=" ...")
    skipped = sum("vulns" not in package for package in packages)
    return packages, f"{skipped} of {len(packages)} packages were skipped" if skipped or not packages else ""


def print_vulnerabilities(package: dict) -> int:
    """Print a line per known vulnerability of a package, and return their number."""
    known = package.get("vulns", [])
    for vulnerability in known:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}")
    return len(known)


if __name__ == "__main__":
    sys.exit(main())
