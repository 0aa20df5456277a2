"""The table of docs/deploy.md is that of its cells."""

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_says_what_the_cells_say(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    robust = importlib.import_module("robust")
    assert robust.table() in (ROOT / "docs" / "deploy.md").read_text()


def test_every_cell_is_that_of_its_settings(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    robust = importlib.import_module("robust")
    assert [cell.name for cell in robust.cells() if not cell.is_current] == []
