"""Count the tests and write the counts into `docs/testing.md`; `make counts` runs this.

Numbers from 100 on are rounded down to two digits, and a test fails when the page is off by more than a quarter
(`tests/test_counts.py`), so that few commits have to touch the page.
"""

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "testing.md"
START, END = "<!-- written by `make counts` -->\n", "<!-- end -->\n"
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # all tests, those included that the command line leaves out
LAWS, DOCSTRINGS, TOP = "tests/methods/test_laws.py", "examples in docstrings", "tests/*.py"
# Tests that hand the program something wrong or hostile, by the start of their path.
HOSTILE = {
    "damaged, foreign and unfinished run directories": ("tests/test_bad_runs.py",),
    "wrong arguments and files on the command line": ("tests/test_cli_errors.py",),
    "faults, damaged files and dishonest replies in a federation": (
        "tests/deploy/test_accept.py",
        "tests/deploy/test_adversaries.py",
        "tests/deploy/test_fault",
        "tests/deploy/test_fuzz.py",
    ),
    "bad files, foreign code, planted links and files that vanish": ("tests/test_hostile", "tests/test_trust.py"),
    "flipped bits, torn writes and files of older versions": (
        "tests/test_bit_flips.py",
        "tests/test_records.py",
        "tests/test_older_formats.py",
    ),
    "random flags, and values that no machine can hold": ("tests/cli/test_any_flags.py", "tests/cli/test_limits.py"),
    "attacks on real Flower and nginx": ("tests/deploy/test_attacks", "tests/deploy/test_gateway.py"),
}
Table = dict[str, tuple[int, ...]]


def main() -> None:
    """Collect the tests and replace the tables of the page."""
    collector = Collector()
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        pytest.main(["--collect-only", "-qq", "--rootdir", str(ROOT)], plugins=[collector])
    if not is_whole(collector.items):
        raise SystemExit("Not all test files could be collected; run `make test` for the reason.")
    head, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{head}{START}\n{render(count(collector.items))}\n{END}{rest.partition(END)[2]}")


class Collector:
    """Keeps the tests that pytest collects."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take the tests of the session."""
        self.items = session.items


def is_whole(items: Iterable[pytest.Item]) -> bool:
    """Return whether the tests are those of all files, and not only of some that the command line names."""
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    return files <= {_path(item) for item in items}


def count(items: list[pytest.Item]) -> dict[str, Table]:
    """Return the tables: numbers by the label of their row, by the heading of the table."""
    folders = sorted({_folder(item) for item in items})
    laws = Counter(_name(item) for item in items if _path(item) == LAWS)
    properties = {(_path(item), _name(item)) for item in items if hasattr(getattr(item, "obj", None), "hypothesis")}
    return {
        "tests in | fast | slow": {
            "all": _by_tier(items),
            **{folder: _by_tier(item for item in items if _folder(item) == folder) for folder in folders},
        },
        "law, for every registered method that it concerns | methods": {
            law.removeprefix("test_").replace("_", " "): (methods,) for law, methods in laws.items()
        },
        "what else is counted | number": {
            **{
                f"tests of {subject}": (sum(_path(item).startswith(paths) for item in items),)
                for subject, paths in HOSTILE.items()
            },
            "property-based tests, each with many random inputs": (len(properties),),
            "runs whose digests `make digests` compares": (
                len(json.loads((ROOT / "tests/digests/digests.json").read_text())["runs"]),
            ),
            "faults that `make mutants` applies": (
                len((ROOT / "tests/mutants/mutants.jsonl").read_text().splitlines()),
            ),
        },
    }


def render(tables: dict[str, Table]) -> str:
    """Return the tables in Markdown."""
    blocks = []
    for heading, table in tables.items():
        rule = "|---" + "|---:" * heading.count("|") + "|"
        rows = [f"| {label} | {' | '.join(map(rounded, numbers))} |" for label, numbers in table.items()]
        blocks.append("\n".join([f"| {heading} |", rule, *rows, ""]))
    return "\n".join(blocks)


def parse(text: str) -> Table:
    """Return the numbers of all rows of Markdown tables, by the label of the row."""
    rows = re.findall(r"^\| (.+?)((?: \| [\d,]+)+) \|$", text, re.MULTILINE)
    return {label: tuple(int(one.replace(",", "")) for one in numbers.split(" | ")[1:]) for label, numbers in rows}


def rounded(number: int) -> str:
    """Return a number as text, from 100 on rounded down to two digits."""
    unit = 10 ** max(len(str(number)) - 2, 0)
    return f"{number // unit * unit:,}"


def is_close(stated: int, counted: int) -> bool:
    """Return whether a number on the page is still true enough: off by at most a quarter, or by five."""
    return abs(stated - counted) <= max(5, counted / 4)


def _by_tier(items: Iterable[pytest.Item]) -> tuple[int, int]:
    slow = [item.get_closest_marker("slow") is not None for item in items]
    return len(slow) - sum(slow), sum(slow)


def _path(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _name(item: pytest.Item) -> str:
    return getattr(item, "originalname", None) or item.name


def _folder(item: pytest.Item) -> str:
    top, *rest = _path(item).split("/")
    if top != "tests":
        return DOCSTRINGS
    return f"{top}/{rest[0]}/" if len(rest) > 1 else TOP


if __name__ == "__main__":
    main()
