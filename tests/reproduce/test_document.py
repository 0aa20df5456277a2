"""The results page and the README's table are what the cells say, to the letter."""

from pathlib import Path

from priory.reproduce import document

ROOT = Path(__file__).parents[2]


def test_the_results_page_is_made_of_the_cells():
    assert (ROOT / "docs" / "results.md").read_text() == document.results(ROOT / "results"), "run `make results`"


def test_the_table_of_the_readme_is_made_of_the_cells():
    text = (ROOT / "README.md").read_text()
    assert document.BEGIN in text
    assert text == document.readme(text, ROOT / "results"), "run `make results`"


def test_every_kept_cell_belongs_to_a_table():
    from priory.reproduce import read
    from priory.reproduce.cells import cells_of

    out = ROOT / "results"
    known = set()
    for name in document.ordered():
        known |= {cell.path for cell in cells_of(read(name), out) if cell.kept() is not None}
        if read(name).has_quick:
            known |= {cell.path for cell in cells_of(read(name, quick=True, seeds=5), out) if cell.kept() is not None}
    assert [str(path.relative_to(out)) for path in sorted(out.rglob("*.json")) if path not in known] == []
