"""Do posteriors mean what they say? Every method that claims one, where the truth is known; prints docs' table.

    python bench/calibration.py             runs what is missing, then prints
    python bench/calibration.py --estimate  only says what is missing and how long it would take

Every finished cell is a JSON file of its own with the command that makes it again. A cell holds the setting that was
asked for and, where it fails and the method names another, that one too.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from priory.calibration.ranks import LEVELS
from priory.cli import check, main

CELLS = Path("docs") / "calibration"  # from the root of the repository
SECONDS = 45  # a cell, on one core
ROWS = {
    "pfedbayes": "pfedbayes",
    "pfedbayes-momentum": "pfedbayes --zeta 1 --step-size 0.03 --momentum 0.9",
    "pfedbayes-adam": "pfedbayes --zeta 1 --optimiser adam --step-size 0.005",
    "pfedbayes-moments": "pfedbayes --zeta 1 --optimiser adam --step-size 0.005 --average moments",
    "sfedbayes": "sfedbayes",
    "sfedbayes-momentum": "sfedbayes --zeta 1 --stateful --step-size 0.03 --momentum 0.9",
    "cfedbayes": "cfedbayes",
    "cfedbayes-two": "cfedbayes --zeta 1",
    "fedhb-niw": "fedhb-niw",
    "fedhb-niw-draws": "fedhb-niw --personal-samples 30",
    "fedhb-mixture": "fedhb-mixture",
    "fedpop": "fedpop",
    "fedvi": "fedvi --rounds 50",
    "fedvi-inputs": "fedvi --rounds 50 --tau 1",
    "fedbnn": "fedbnn --rounds 50",
    "fedbnn-prior": "fedbnn --rounds 50 --prior-sd 0.7071",
    "fedbnn-widths": "fedbnn --rounds 50 --prior-sd 0.7071 --rho -0.5",
}


def path_of(row: str) -> Path:
    return CELLS / f"{row}.json"


def is_current(row: str) -> bool:
    """Whether the cell was made with the settings that the method has today."""
    if not path_of(row).exists():
        return False
    kept = json.loads(path_of(row).read_text())["verdicts"][0]["method"]
    return bool(kept == repr(check.read(ROWS[row].split()).method))


def shown(verdict: dict[str, Any] | None) -> str:
    """Coverage of each level, the width and the verdict, as cells of the table."""
    if verdict is None:
        return "– | – | –"
    held = ", ".join(f"{100 * verdict['coverage'][f'{level:g}']['held']:.0f}" for level in LEVELS)
    width = "–" if verdict["width"] is None else f"{verdict['width']:.2g}"
    return f"{held} | {width} | {'passes' if verdict['passes'] else '**fails**'}"


def table() -> str:
    held = "/".join(f"{100 * level:.0f}" for level in LEVELS)
    head = f"| setting | true: {held} % hold | width | verdict | plug-in: {held} % hold | width | verdict |"
    lines = [head, "|---" * 7 + "|"]
    seen = set()
    for row in ROWS:
        cell = json.loads(path_of(row).read_text())
        for one in cell["verdicts"]:
            name = f"`{cell['method']} {one['settings']}`".replace(" `", "`")
            if name not in seen:
                lines.append(f"| {name} | {shown(one['at_true_hyper_parameters'])} | {shown(one['plug_in'])} |")
            seen.add(name)
    return "\n".join(lines)


if __name__ == "__main__":
    missing = [row for row in ROWS if not is_current(row)]
    print(f"{len(missing)} cells to run, about {len(missing) * SECONDS / 60:.0f} minutes on one core", flush=True)
    for row in [] if "--estimate" in sys.argv else missing:
        started = time.perf_counter()
        main(["check", *ROWS[row].split(), "--out", str(path_of(row))])
        print(f"{row}  {time.perf_counter() - started:.0f} s", flush=True)
    if all(path_of(row).exists() for row in ROWS):
        print(table())
