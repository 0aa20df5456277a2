"""Apply each mutant to a copy of the tree and run the tests of its module, then the laws, until one fails.

    python tests/mutants/run.py --out build/outcomes.jsonl [--only 3 17] [--jobs 2]

A mutant of a method runs the laws of that method; a mutant of anything else runs the laws of all. A finished mutant in
`--out` is not run again, so that a run can go on where it was stopped. `caught.jsonl` has the outcomes of an earlier
suite: a mutant that was caught then and is missed now ends the run with code 1.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("mutants.jsonl")
BEFORE = Path(__file__).with_name("caught.jsonl")
LAWS = "tests/methods/test_laws.py"
MINUTES = 20  # a mutant that takes longer counts as caught: it never ends


def main() -> int:
    """Run the mutants and print a table."""
    parser = argparse.ArgumentParser(description="Count the mutants that the tests catch.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.jsonl", help="file of outcomes")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants, from 1")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    asked = parser.parse_args()
    mutants = [json.loads(line) for line in FILE.read_text().splitlines()]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    kept = asked.out.read_text().splitlines() if asked.out.exists() else []
    outcomes = {line["number"]: line for line in map(json.loads, kept)}
    numbers = [n for n in range(1, len(mutants) + 1) if n not in outcomes and (not asked.only or n in asked.only)]

    def judge(number: int) -> None:
        outcome = {"number": number, **judged(mutants[number - 1])}
        outcomes[number] = outcome
        with asked.out.open("a") as file:
            file.write(json.dumps(outcome) + "\n")
        print(described(outcome, mutants[number - 1]), flush=True)

    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(judge, numbers))
    caught = sum(outcome["caught"] for outcome in outcomes.values())
    stale = sum(outcome["by"] == "stale" for outcome in outcomes.values())
    print(f"{caught} of {len(outcomes) - stale} mutants caught, {stale} no longer apply")
    before = [json.loads(line) for line in BEFORE.read_text().splitlines()]
    lost = [one["number"] for one in before if one["caught"] and outcomes.get(one["number"], one)["by"] == "nothing"]
    if lost:
        print(f"Mutants {', '.join(map(str, lost))} were caught by an earlier suite and are missed now.")
    return int(bool(lost))


def judged(mutant: dict[str, Any]) -> dict[str, Any]:
    """Return whether the tests catch a mutant, and by what."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        tree = Path(place) / "tree"
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in names.splitlines():
            if (ROOT / name).exists():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        if not applied(mutant, tree / mutant["file"]):
            return {"caught": False, "by": "stale", "seconds": 0.0}
        by = failure(tests_of(mutant["file"]), tree) or failure(laws_of(mutant["file"]), tree)
    return {"caught": by is not None, "by": by or "nothing", "seconds": round(time.monotonic() - started, 1)}


def failure(selection: list[str], tree: Path) -> str | None:
    """Return the first test of a selection that fails, or another sign of a fault; None if all pass."""
    if not selection:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *selection]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=60 * MINUTES)
    except subprocess.TimeoutExpired:
        return "time"
    if done.returncode in (0, 5):  # all passed, or the selection is empty
        return None
    if done.returncode == -signal.SIGKILL:
        raise RuntimeError("The tests of a mutant were killed, probably for lack of memory; run again with --jobs 1.")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit code {done.returncode}"


def applied(mutant: dict[str, Any], path: Path) -> bool:
    """Change the line, wherever it is now; false if the file no longer has it."""
    lines = path.read_text().split("\n") if path.exists() else []
    places = [number for number, line in enumerate(lines) if line == mutant["old"]]
    if not places:
        return False
    nearest = min(places, key=lambda number: abs(number + 1 - mutant["line"]))
    lines[nearest] = mutant["new"]
    path.write_text("\n".join(lines))
    return True


def tests_of(file: str) -> list[str]:
    """Return the test files of a module: those named after it, or else those of its folder that name it.

    Mathematics that methods share is tested by their tests too.
    """
    module = Path(file).relative_to("priory")
    folder, stem = ROOT / "tests" / module.parent, module.stem
    found = sorted(folder.glob(f"test_{stem}.py")) + sorted(folder.glob(f"test_{stem}_*.py"))
    if not found:
        import priory.methods as methods

        words = [stem]
        if is_method(module):
            words = [methods.get(method_name(stem)).__name__, method_name(stem)]
        pattern = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in words))
        found = [path for path in sorted(folder.glob("test_*.py")) if pattern.search(path.read_text())]
    names = [str(path.relative_to(ROOT)) for path in found if str(path.relative_to(ROOT)) != LAWS]
    if module.parent == Path("methods/_blocks"):
        files = [path for path in sorted((ROOT / "priory/methods").glob("*.py")) if not path.name.startswith("_")]
        users = [path for path in files if re.search(rf"\b{module.stem}\b", path.read_text())]
        names += [name for path in users for name in tests_of(str(path.relative_to(ROOT)))]
    return names


def laws_of(file: str) -> list[str]:
    """Return the laws that a module can break."""
    module = Path(file).relative_to("priory")
    if not is_method(module):
        return [LAWS]
    return [LAWS, "-k", f"{method_name(module.stem)}]"]


def is_method(module: Path) -> bool:
    """Return whether a module of the package is the file of a method."""
    return module.parent == Path("methods")


def method_name(stem: str) -> str:
    """Return the registered name of a method's file."""
    return stem.replace("_", "-")


def described(outcome: dict[str, Any], mutant: dict[str, Any]) -> str:
    """Return one line for a person."""
    verdict = "caught " if outcome["caught"] else "MISSED "
    where = f"{mutant['file'].removeprefix('priory/')}:{mutant['line']}"
    return (
        f"{outcome['number']:3} {verdict} {where:32} {mutant['kind']:10} {outcome['seconds']:6.0f} s  {outcome['by']}"
    )


if __name__ == "__main__":
    sys.exit(main())
