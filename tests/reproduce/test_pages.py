"""Numbers and pages of a table, from cells that are written by hand."""

import json

import pytest

from priory.reproduce import definition, document, guard, pages
from priory.reproduce.cells import cells_of
from priory.reproduce.numbers import comparisons, fill
from tests.reproduce.test_document import ROOT

ENVIRONMENT = {"priory": "0", "jax": "1", "data_checksum": "2"}


def write(one, out, value) -> None:
    """Cells as if they had been run; `value(cell)` is a personal accuracy."""
    from priory.engine import manifest

    for cell in cells_of(one, out):
        run = {key: part for key, part in vars(cell.settings).items() if part is not None}
        found = {
            "manifest": {
                "method": {"name": cell.row.method, **manifest.to_table(cell.method)},
                "run": run | {"schedule": list(cell.settings.schedule)},
                "data": cell.data,
                "environment": ENVIRONMENT,
            },
            "personal": {"clients": {"mean": value(cell)}, "nll": 0.25},
            "seconds": {"train": 30.0},
        }
        cell.path.parent.mkdir(parents=True, exist_ok=True)
        cell.path.write_text(json.dumps(found))
        assert cell.kept() is not None


def test_a_number_is_the_mean_over_seeds_with_its_standard_error(tiny, tmp_path):
    write(tiny, tmp_path, lambda cell: (0.90, 0.92)[cell.seed])
    entry = fill(tiny, tmp_path).parts[0].rows["avg"][1]["personal"]
    assert str(entry) == "91.00 ± 1.00"  # sd √2, over √2
    assert entry.theirs == "99.90 ± 0.10"


def test_differences_are_paired_by_seed(tiny, tmp_path):
    write(tiny, tmp_path, lambda cell: 0.5 + 0.2 * cell.seed + (0.01 if cell.row.key == "prox" else 0.0))
    ((own, other, less),) = fill(tiny, tmp_path).parts[0].differences()
    assert (own, other) == ("prox", "avg")
    assert str(less["personal"]) == "1.00 ± 0.00"


def test_a_seed_that_only_one_method_has_is_in_no_difference(tiny, tmp_path):
    write(tiny, tmp_path, lambda cell: 0.5 + 0.2 * cell.seed + (0.01 if cell.row.key == "prox" else 0.0))
    cells_of(tiny, tmp_path)[0].path.unlink()  # avg with seed 0
    (_, _, less) = fill(tiny, tmp_path).parts[0].differences()[0]
    assert set(less["personal"].by_seed) == {1}


def test_numbers_that_are_worse_are_listed_by_outcome(tiny, table, tmp_path):
    def listed(value, **words) -> list[str]:
        one = definition.parse("digits-table-0", table | words)
        write(one, tmp_path, value)
        return [line for line in pages.lines(fill(one, tmp_path)) if "against" in line]

    where = "FedAvg, large steps, personal"
    assert listed(lambda cell: (0.90, 0.901)[cell.seed]) == [f"Missed: {where}: 90.05 ± 0.05 against 99.90 ± 0.10."]
    assert listed(lambda cell: (0.98, 0.99)[cell.seed]) == [
        f"Worse, not resolved: {where}: 98.50 ± 0.50 against 99.90 ± 0.10."
    ]
    assert listed(lambda cell: 0.5, seeds=1) == [f"Worse with one seed: {where}: 50.00 against 99.90 ± 0.10."]
    assert listed(lambda cell: (0.998, 1.0)[cell.seed]) == []


def test_a_short_form_is_not_compared(tiny, tmp_path):
    write(tiny, tmp_path, lambda cell: 0.9)
    quick = definition.read("digits-table-0", quick=True)
    write(quick, tmp_path, lambda cell: 0.9)
    assert [len(comparisons(fill(one, tmp_path))) for one in (tiny, quick)] == [1, 0]


def test_a_run_that_diverged_leaves_no_mean_of_the_others(tiny, tmp_path):
    write(tiny, tmp_path, lambda cell: float("nan") if cell.seed else 0.9)
    assert str(fill(tiny, tmp_path).parts[0].rows["avg"][1]["personal"]) == "–"


def test_pages_tell_numbers_reductions_shortfalls_and_what_is_missing(tiny, tmp_path):
    write(tiny, tmp_path, lambda cell: (0.90, 0.92)[cell.seed])
    cells_of(tiny, tmp_path)[-1].path.unlink()
    filled = fill(tiny, tmp_path)
    for page in (pages.markdown(filled), pages.html(filled)):
        for text in (
            "91.00 ± 1.00",
            "99.90 ± 0.10",
            "Reduced: Everything.",
            "Worse, not resolved: FedAvg",
            "1 of 6 cells",
        ):
            assert text in page
    assert "http" not in pages.html(filled).replace("http-equiv", "")


def test_the_guard_is_silent_on_the_same_cells_and_speaks_of_one_that_moved(tiny, tmp_path):
    write(tiny, tmp_path / "kept", lambda cell: (0.90, 0.92)[cell.seed])
    write(tiny, tmp_path / "new", lambda cell: (0.90, 0.92)[cell.seed])
    assert guard.deviations(tiny, tmp_path / "new", tmp_path / "kept") == []
    write(tiny, tmp_path / "new", lambda cell: 0.5 if cell.row.key == "prox" else 0.91)
    (line,) = guard.deviations(tiny, tmp_path / "new", tmp_path / "kept")
    assert "FedProx, personal: 50.00 where 91.00" in line


def test_the_guard_allows_what_seeds_explain(tiny, tmp_path):
    write(tiny, tmp_path / "kept", lambda cell: (0.90, 0.92)[cell.seed])
    write(tiny, tmp_path / "new", lambda cell: (0.89, 0.93)[cell.seed])
    assert guard.deviations(tiny, tmp_path / "new", tmp_path / "kept") == []


@pytest.mark.usefixtures("tiny")
def test_one_new_seed_of_a_short_form_is_held_against_all_kept_ones(tmp_path):
    new, kept = (definition.read("digits-table-0", quick=True, seeds=num) for num in (1, 3))
    write(kept, tmp_path / "kept", lambda cell: (0.90, 0.92, 0.94)[cell.seed])
    write(new, tmp_path / "new", lambda cell: 0.96)  # 2 sd from the mean
    assert guard.deviations(new, tmp_path / "new", tmp_path / "kept") == []
    write(new, tmp_path / "new", lambda cell: 0.96 if cell.row.key == "avg" else 0.79)  # 5 sd are 11.55 points
    (line,) = guard.deviations(new, tmp_path / "new", tmp_path / "kept")
    assert "FedProx, personal: 79.00 where 92.00 ± 11.55 was expected" in line


def test_the_guard_speaks_of_a_run_that_diverged_and_of_one_that_nothing_was_kept_of(tiny, tmp_path):
    write(tiny, tmp_path / "kept", lambda cell: (0.90, 0.92)[cell.seed])
    write(tiny, tmp_path / "new", lambda cell: float("nan") if cell.row.key == "prox" else 0.91)
    (line,) = guard.deviations(tiny, tmp_path / "new", tmp_path / "kept")
    assert "FedProx, personal: – where 91.00 ± 1.00 was expected" in line
    (line,) = guard.deviations(tiny, tmp_path / "kept", tmp_path / "new")
    assert "FedProx, personal: 91.00 ± 1.00 where – was expected" in line


@pytest.mark.parametrize("name", document.ordered())
def test_every_table_has_a_page_even_before_it_was_run(name, tmp_path):
    from priory.reproduce import read

    filled = fill(read(name), tmp_path)
    assert filled.done == 0
    assert "are not there yet" in pages.markdown(filled)
    assert pages.html(filled).startswith("<!doctype html>")
    assert (ROOT / "priory" / "reproduce" / "tables" / f"{name}.toml").exists()
