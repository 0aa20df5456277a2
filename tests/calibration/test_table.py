"""The table of docs/calibration.md is that of its cells, and every method that claims a posterior is in it."""

import importlib.util
import json
from pathlib import Path

from priory.fed.capabilities import Draws
from priory.methods import REGISTRY

ROOT = Path(__file__).parents[2]


def bench():
    spec = importlib.util.spec_from_file_location("bench_calibration", ROOT / "bench" / "calibration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_says_what_the_cells_say(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert bench().table() in (ROOT / "docs" / "calibration.md").read_text()


def test_every_method_with_a_posterior_has_a_row():
    claimed = {name for name, kind in REGISTRY.items() if isinstance(kind(), Draws)}
    assert claimed == {row.split()[0] for row in bench().ROWS.values()}


def test_the_papers_settings_that_must_fail_are_shown_failing_beside_one_that_passes():
    for name, setting in (("pfedbayes", "--zeta 10"), ("fedhb-niw", "--epsilon 0.0001")):
        first, second = json.loads((ROOT / "docs" / "calibration" / f"{name}.json").read_text())["verdicts"]
        assert first["settings"] == setting
        assert (first["passes"], second["passes"]) == (False, True)
