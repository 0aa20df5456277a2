"""Tables as Markdown and HTML, ours beside the published one, with reductions and comparisons."""

from collections.abc import Sequence
from pathlib import Path

from priory.report.markup import Html, element
from priory.report.markup import table as html_table
from priory.report.page import document
from priory.reproduce.cells import Cell, cells_of
from priory.reproduce.definition import Definition
from priory.reproduce.numbers import Filled, Outcome, Part, comparisons

Grid = tuple[list[str], list[list[str]]]


def grid(part: Part, headings: Sequence[str] | None = None) -> Grid:
    """Heading and rows of a block, or of some of its columns; a column with published numbers has them beside it."""
    header = ["method"]
    columns = [column for column in part.columns if headings is None or column.heading in headings]
    for column in columns:
        header += [column.heading, "published"] if column.heading in part.published else [column.heading]
    rows = []
    for row, entries in part.rows.values():
        words = [row.label]
        for column in columns:
            entry = entries[column.heading]
            words += [str(entry), entry.theirs] if column.heading in part.published else [str(entry)]
        rows.append(words)
    return header, rows


def lines(filled: Filled) -> list[str]:
    """The lines below the numbers: reductions, numbers that are worse than published, notes, cost."""
    definition = filled.definition
    found = []
    if not filled.is_whole:
        found.append(f"{filled.total - filled.done} of {filled.total} cells are not there yet.")
    if definition.is_quick:
        found.append("This is the short form: it guards against regressions and is not comparable with the paper.")
    if definition.reduced:
        found.append(f"Reduced: {definition.reduced}")
    worse = [one for one in comparisons(filled) if one.is_worse]
    for title, group in (
        ("Missed", [one for one in worse if one.outcome is Outcome.MISSED]),
        ("Worse, not resolved", [one for one in worse if one.outcome is Outcome.OPEN and not one.has_one_seed]),
        ("Worse with one seed", [one for one in worse if one.has_one_seed]),
    ):
        if group:
            found.append(f"{title}: {'; '.join(map(str, group))}.")
    found += definition.notes
    found.append(cost(filled))
    return found


def cost(filled: Filled) -> str:
    """What the cells took, and with what."""
    made = f", with {'; '.join(filled.versions)}" if filled.versions else ""
    return f"{filled.done} runs, {filled.seconds / 60:.0f} minutes in all{made}."


def markdown(filled: Filled, level: int = 1) -> str:
    """The table as Markdown, under a heading of that level."""
    definition = filled.definition
    found = [f"{'#' * level} {definition.name}", "", f"{definition.title}. {definition.paper}.", ""]
    found += ["```console", f"$ priory reproduce {definition.name}", "```", ""]
    for part in filled.parts:
        if part.block.title:
            found += [f"**{part.block.title}**", ""]
        found += [markdown_table(*grid(part)), ""]
    found += ["", *(f"- {line}" for line in lines(filled))]
    return "\n".join(found).replace("\n\n\n", "\n\n") + "\n"


def html(filled: Filled) -> str:
    """The table as a page that asks the network for nothing."""
    definition = filled.definition
    body = []
    for part in filled.parts:
        header, rows = grid(part)
        body.append(html_table(header, rows, part.block.title or definition.title))
        if part.num_seeds > 1 and len(part.rows) > 1:
            body.append(_differences(part))
    told = element("ul", *(element("li", line) for line in lines(filled)))
    asked = element("pre", "\n".join(dict.fromkeys(cell.command for cell in _first_seeds(definition))))
    settings = element("details", element("summary", "Commands of the runs with seed 0"), asked)
    return document(f"{definition.name}: {definition.title}", [element("p", definition.paper), *body, told, settings])


def differences(part: Part) -> Grid:
    """Heading and rows of the differences of a block, paired by seed."""
    rows = [
        [f"{part.rows[own][0].label} − {part.rows[other][0].label}", *(str(entries[c.heading]) for c in part.columns)]
        for own, other, entries in part.differences()
    ]
    return ["less", *(column.heading for column in part.columns)], rows


def _differences(part: Part) -> Html:
    header, rows = differences(part)
    return element(
        "details", element("summary", "Differences, paired by seed"), html_table(header, rows, "Differences")
    )


def _first_seeds(definition: Definition) -> Sequence[Cell]:
    return [cell for cell in cells_of(definition, Path()) if cell.seed == 0]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table; all columns but the first few are numbers."""
    marks = ["---" if place < words else "---:" for place in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, marks, *rows))
