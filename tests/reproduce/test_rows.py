"""Words of a definition that few tables use: rows of other rows, columns where less is better, other data."""

import json
from pathlib import Path
from typing import Any

from priory.engine import manifest
from priory.reproduce import pages
from priory.reproduce.cells import Cell, cells_of
from priory.reproduce.definition import Definition, parse
from priory.reproduce.numbers import comparisons, fill

ROWS = [
    {"key": "tuned", "method": "fedavg", "set": {"step_size": 0.05}, "published": {"all": {"ECE": 0.1}}},
    {"key": "plain", "of": "tuned", "columns": {"accuracy": "global.accuracy"}, "published": {"all": {"accuracy": 80}}},
]


def test_a_row_of_another_has_its_runs_and_reads_them_elsewhere(tmp_path: Path) -> None:
    definition = _definition()
    tuned, plain = cells_of(definition, tmp_path)
    assert tuned.path == plain.path
    assert tuned.method == plain.method
    _keep(tuned, {"personal": {"accuracy": 0.9, "ece": 0.1}, "global": {"accuracy": 0.7}})
    filled = fill(definition, tmp_path)
    assert (filled.done, filled.total, filled.seconds) == (1, 1, 3.0)
    rows = filled.parts[0].rows
    assert [rows[key][1]["accuracy"].mean for key in ("tuned", "plain")] == [90.0, 70.0]


def test_a_number_is_short_on_the_side_that_is_worse(tmp_path: Path) -> None:
    definition = _definition()
    cell = cells_of(definition, tmp_path)[0]
    _keep(cell, {"personal": {"accuracy": 0.9, "ece": 0.2}, "global": {"accuracy": 0.79}})
    worse = [str(one).split(":")[0] for one in comparisons(fill(definition, tmp_path)) if one.is_worse]
    assert worse == ["tuned, ECE", "plain, accuracy"]
    _keep(cell, {"personal": {"accuracy": 0.9, "ece": 0.05}, "global": {"accuracy": 0.81}})
    assert not any(one.is_worse for one in comparisons(fill(definition, tmp_path)))


def test_numbers_of_other_data_are_shown_and_not_held_against_ours(tmp_path: Path) -> None:
    for word, is_told in (({}, True), ({"comparable": False}, False)):
        definition = _definition(**word)
        _keep(
            cells_of(definition, tmp_path)[0], {"personal": {"accuracy": 0.9, "ece": 0.1}, "global": {"accuracy": 0.7}}
        )
        page = pages.markdown(fill(definition, tmp_path))
        assert "80.00" in page
        assert ("Worse" in page) == is_told


def test_data_sets_are_those_of_examples_and_of_alignment_inputs() -> None:
    data = {"data": "synthetic:linear:seed={seed}", "partition": "natural", "align": "digits:20"}
    assert _definition(data=data).data_sets == ("synthetic:linear", "digits")


def test_time_and_rounds_of_a_short_form_are_its_own(tmp_path: Path) -> None:
    slow = [ROWS[0] | {"seconds": 500, "run": {"rounds": 300, "cohort": 2}}]
    full, quick = _definition(row=slow), _definition({"seconds": 5, "run": {"rounds": 2}}, row=slow)
    assert (full.rows[0].seconds, quick.rows[0].seconds) == (500, None)
    settings = [cells_of(one, tmp_path)[0].settings for one in (full, quick)]
    assert [(one.rounds, one.cohort) for one in settings] == [(300, 2), (2, 2)]


def test_a_row_can_have_fewer_seeds_than_its_table_unless_they_are_asked_for(tmp_path: Path) -> None:
    rows = [ROWS[0], {"key": "dear", "method": "fedprox", "seeds": 1}]
    for asked, expected in ((None, [0, 1, 2, 0]), (2, [0, 1, 0, 1])):
        cells = cells_of(_definition(seeds_asked=asked, row=rows, seeds=3), tmp_path)
        assert [cell.seed for key in ("tuned", "dear") for cell in cells if cell.row.key == key] == expected


def _definition(quick: dict[str, Any] | None = None, seeds_asked: int | None = None, **words: Any) -> Definition:
    columns = {"accuracy": "personal.accuracy", "ECE": {"at": "personal.ece", "lower": True}}
    data = {"data": "digits", "partition": "iid", "clients": 4}
    table = {"paper": "A paper", "title": "A table", "columns": columns, "data": data, "row": ROWS}
    return parse("some", table | words, quick, seeds_asked)


def _keep(cell: Cell, scores: dict[str, Any]) -> None:
    method = {"name": cell.row.method, **manifest.to_table(cell.method)}
    there = {"method": method, "run": {"seed": 0, "eval_every": 0}, "data": cell.data, "environment": {}}
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    cell.path.write_text(json.dumps({"manifest": there, "seconds": {"train": 3.0}, **scores}))
