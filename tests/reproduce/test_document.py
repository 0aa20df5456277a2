"""The results page and the README's table are what the cells say, to the letter."""

from pathlib import Path

import pytest
from scipy import stats

from priory.reproduce import document, read
from priory.reproduce.numbers import fill

ROOT = Path(__file__).parents[2]


def test_the_results_page_is_made_of_the_cells():
    assert (ROOT / "docs" / "results.md").read_text() == document.results(ROOT / "results"), "run `make results`"


def test_the_table_of_the_readme_is_made_of_the_cells():
    text = (ROOT / "README.md").read_text()
    assert document.BEGIN in text
    assert text == document.readme(text, ROOT / "results"), "run `make results`"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_tables_on_other_pages_are_made_of_the_cells(page):
    assert page.read_text() == document.with_tables(page.read_text(), ROOT / "results"), "run `make results`"


def test_a_page_gets_the_block_that_it_names():
    text = "before\n<!-- table: fedhb-table-10 5x20 -->\nold\n<!-- end of table -->\nafter"
    made = document.with_tables(text, ROOT / "results")
    assert made.startswith("before\n<!-- table: fedhb-table-10 5x20 -->\n| method | global |")
    assert "old" not in made
    assert made.endswith("\n<!-- end of table -->\nafter")


def test_a_page_gets_the_titles_of_several_blocks():
    text = "<!-- table: fedhb-table-10 1x100 5x20 -->\n<!-- end of table -->"
    made = document.with_tables(text, ROOT / "results")
    assert "**τ = 1, 100 rounds**\n\n| method |" in made
    assert "**τ = 5, 20 rounds**\n\n| method |" in made


def test_a_page_gets_the_tables_that_a_method_stands_in():
    text = "<!-- tables with: random-groups skeleton -->\nold\n<!-- end of table -->\nafter"
    made = document.with_tables(text, ROOT / "results")
    assert "- `random-groups`: [fedhb-figure-3](../results.md#fedhb-figure-3)\n- `skeleton`: none\n" in made
    assert "old" not in made
    assert made.endswith("\n<!-- end of table -->\nafter")


def test_every_kept_cell_belongs_to_a_table():
    from priory.reproduce import guard, read
    from priory.reproduce.cells import RUNNING, cells_of

    out = ROOT / "results"
    known = set()
    for name in document.ordered():
        known |= {cell.path for cell in cells_of(read(name), out) if cell.kept() is not None}
        if read(name).has_quick:
            short = read(name, quick=True, seeds=guard.MOST_KEPT)
            known |= {cell.path for cell in cells_of(short, out) if cell.kept() is not None}
    there = {path for path in out.rglob("*.json") if RUNNING not in path.parts}  # those are not cells yet
    assert sorted(str(path.relative_to(out)) for path in there - known) == []


def test_counts_in_a_sentence_are_of_the_methods_and_tables_that_are_named():
    def counted(words: str) -> int:
        text = f"so <!-- reached: {words} -->0 of 0<!-- end of count -->, as it is"
        made = document.with_tables(text, ROOT / "results")
        assert made.startswith(f"so <!-- reached: {words} -->")
        assert made.endswith("<!-- end of count -->, as it is")
        return int(made.split("-->")[1].split(" of ")[1].split()[0])

    tables = ("fedhb-table-10", "fedhb-table-11")
    assert counted("fedhb-niw fedhb-table-10") == 4
    assert counted("fedhb-niw fedhb-mixture fedhb-table-10 fedhb-table-11") == 16
    assert counted("fedhb-niw fedhb-mixture") == 16
    assert counted(" ".join(tables)) == sum(counted(name) for name in tables)
    assert counted("all") == sum(counted(name) for name in document.ordered())
    with pytest.raises(ValueError, match="fedhb-nwi is neither a table nor a method"):
        counted("fedhb-nwi")


def test_the_readme_and_the_results_page_have_the_same_count():
    line = next(
        line for line in (ROOT / "docs" / "results.md").read_text().splitlines() if line.startswith("All tables")
    )
    assert line.removesuffix(".") in (ROOT / "README.md").read_text()


def test_intervals_of_fedpop_averaged_over_its_prior_cover_as_often_as_exact_ones():
    """As its page says: at 95 %, Student's t of differences that are paired by seed."""
    for part in fill(read("fedpop-coverage"), ROOT / "results").parts:
        (less,) = (less for own, other, less in part.differences() if (own, other) == ("exact", "averaged"))
        found = less["clients covered, %"]
        assert abs(found.mean) < stats.t.ppf(0.975, df=len(found.values) - 1) * found.error
