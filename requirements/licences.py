"""Write the table of `docs/licences.md`, the licence of every locked package by its metadata; `make licences`."""

import re
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "licences.md"
START, END = "<!-- written by `make licences` -->\n", "<!-- end -->\n"
PIN = re.compile(r"^([a-z0-9.-]+)(?:\[[a-z,-]+\])?==", re.MULTILINE)
# Only Windows installs these, so their metadata are not at hand.
NOT_INSTALLED = {"colorama": "BSD-3-Clause", "nest-asyncio": "BSD-2-Clause"}
# SPDX identifiers of what older metadata say in words; "BSD License" does not say which one.
IDENTIFIERS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD",
    "BSD 3-Clause License": "BSD-3-Clause",
    "BSD License": "BSD",
    "BSD, Public Domain": "BSD-2-Clause AND public domain",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}


def main() -> None:
    """Replace the table of the page."""
    head, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{head}{START}\n{table()}\n{END}{rest.partition(END)[2]}")


def table() -> str:
    """Return the table: a row for each package of the locks."""
    deployed = names_in("deploy.txt")
    rows = [
        f"| {name} | {licence_of(name)} | {'deployment' if name in deployed else 'development'} |"
        for name in sorted(deployed | names_in("dev.txt"))
    ]
    return "\n".join(["| package | licence | needed for |", "|---|---|---|", *rows, ""])


def names_in(lock: str) -> set[str]:
    """Return the names of the packages in a lock."""
    return set(PIN.findall((HERE / lock).read_text()))


def licence_of(name: str) -> str:
    """Return the licence that the metadata of a package state: an SPDX expression, a short text, or classifiers."""
    if name in NOT_INSTALLED:
        return NOT_INSTALLED[name]
    about = metadata.metadata(name)
    if expression := about.get("License-Expression"):
        return expression
    text = (about.get("License") or "").strip()
    if text and "\n" not in text and text != "UNKNOWN":
        return IDENTIFIERS.get(text, text)
    classifiers = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier", []) if line.startswith("License")]
    if not classifiers:
        raise SystemExit(f"The metadata of {name} state no licence; look it up and name it in {Path(__file__).name}.")
    return " OR ".join(IDENTIFIERS[line] for line in classifiers)


if __name__ == "__main__":
    main()
