"""The results page of the documentation, the headline table of the README and tables on other pages, made of cells.

    python -m priory.reproduce.document    writes docs/results.md, and the tables of README.md and docs/, from results/

A page has a table between two comments. The first names it and, where wanted, some of its blocks, or differences. A
page of `docs/methods/` can also have, method by method, the tables that it stands in:

    <!-- table: fedhb-table-10 1x100 differences -->
    <!-- end of table -->

    <!-- tables with: fedavg fedprox -->
    <!-- end of table -->

No number there is typed by hand: a test makes the pages again and compares.
"""

import re
from pathlib import Path

from priory.reproduce import pages
from priory.reproduce.definition import names, read
from priory.reproduce.numbers import Filled, fill, shortfalls

__all__ = ["headline", "ordered", "readme", "results", "with_tables", "write"]

PAPERS = {
    "fedhb": "FedHB",
    "pfedbayes": "pFedBayes, sFedBayes and cFedBayes",
    "fedpop": "FedPop",
    "fedvi": "FedVI",
    "fedbnn": "FedBNN",
}
INTRODUCTION = """\
# Results: the published tables again

<!-- Written by `make results` from the cells in results/; a test checks that it is. -->

Each table below is made by the command above it, from the definition of that name in `priory/reproduce/tables/` and the
runs in `results/`, a JSON file each with manifest, seed, versions, the `priory run` command that makes it again and,
where it was scored on the way, its curve. `priory reproduce --list` names them all with their data and the time that
they take; those on MNIST, Fashion-MNIST or CIFAR need the files in `PRIORY_DATA`. A command that is stopped goes on
where it was.

How to read them. ± is the standard error over seeds; a number without it is a single run with seed 0, and compares with
means over seeds only as far as seeds allow. The published ± is whatever the paper prints. Seed s is that of the
partition and of the run, so methods are paired within a seed (`priory reproduce` writes the paired differences into its
HTML page). Numbers are those of the last round, never the best one. Where ours is worse than the published one by
more than two standard errors (half a point with a single seed), the list under the table says so. With three seeds a
difference of two standard errors is weak evidence.
"""
LEFT_OUT = """\
## Left out

- Methods: BNFed, HeurFedAMP, pFedGP, FedCFL and L2GD, columns of the papers' tables, are not in the library.
- EMNIST (FedHB, table 12): there are no data, and the table is missing from the text that we have.
- pFedBayes without a server (the decentralised variant) is outside the protocol.
- CIFAR-10-C and CIFAR-100-C: our own corruptions of CIFAR-100 stand in for them, and their numbers do not compare.
"""
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
TABLE_END = "<!-- end of table -->"
HEADLINE = ("fedhb-table-11", "1x100", ("global", "personal", "personal NLL"))


def ordered() -> list[str]:
    """The definitions in the order of the page: by paper, tables before figures before what no paper has."""
    kinds = ["table", "figure"]

    def place(name: str) -> tuple[int, int, int, str]:
        paper, kind, *rest = name.split("-")
        number = int(rest[0]) if rest and rest[0].isdigit() else 0
        return list(PAPERS).index(paper), kinds.index(kind) if kind in kinds else len(kinds), number, name

    return sorted(names(), key=place)


def results(out: Path) -> str:
    """The results page."""
    filled = [fill(read(name), out) for name in ordered()]
    found = [INTRODUCTION, _overview(filled)]
    for paper, title in PAPERS.items():
        found.append(f"## {title}\n")
        found += [pages.markdown(one, level=3) for one in filled if one.definition.name.split("-")[0] == paper]
    return "\n".join([*found, LEFT_OUT])


def headline(out: Path) -> str:
    """The table of the README: one block of one table."""
    name, key, headings = HEADLINE
    filled = fill(read(name), out)
    part = next(part for part in filled.parts if part.block.key == key)
    header, rows = pages.grid(part, headings)
    what, paper = filled.definition.title.partition(": ")[2], filled.definition.paper
    told = f"{what}; {part.block.title}. ± is the standard error over seeds; without it, a number is that of one run."
    told = f"{told} Published: {paper}. `priory reproduce {name}` makes it again, with the files in `PRIORY_DATA`;"
    told = f"{told} what is smaller here than in the paper"
    told = f"{told} and how settings were chosen stands [below the whole table](docs/results.md#{name})."
    return f"{pages.markdown_table(header, rows)}\n\n{told}"


def with_tables(text: str, out: Path) -> str:
    """A page with the tables that it names in place."""

    def filled(match: re.Match[str]) -> str:
        name, *words = match[1].split()
        blocks = [word for word in words if word != "differences"]
        parts = [part for part in fill(read(name), out).parts if not blocks or part.block.key in blocks]
        made = [pages.differences(part) if "differences" in words else pages.grid(part) for part in parts]
        tables = [
            (f"**{part.block.title}**\n\n" if part.block.title and len(parts) > 1 else "") + pages.markdown_table(*one)
            for part, one in zip(parts, made, strict=True)
        ]
        return "\n".join([f"<!-- table: {match[1]} -->", "\n\n".join(tables), TABLE_END])

    made = re.sub(f"<!-- table: (.*?) -->\n.*?{TABLE_END}", filled, text, flags=re.DOTALL)
    return re.sub(f"<!-- tables with: (.*?) -->\n.*?{TABLE_END}", _places, made, flags=re.DOTALL)


def readme(text: str, out: Path) -> str:
    """The README with its headline table in place."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{headline(out)}\n{END}", text, flags=re.DOTALL)


def write(root: Path) -> None:
    """Write the pages of a working tree."""
    out, page = root / "results", root / "README.md"
    (root / "docs" / "results.md").write_text(results(out))
    page.write_text(readme(page.read_text(), out))
    for path in sorted((root / "docs").rglob("*.md")):
        text = path.read_text()
        made = with_tables(text, out)
        if made != text:
            path.write_text(made)


def _places(match: re.Match[str]) -> str:
    """The tables that methods stand in, a line each."""
    lines = []
    for method in match[1].split():
        found = [name for name in ordered() if any(row.method == method for _, row in read(name).places())]
        lines.append(f"- `{method}`: {', '.join(f'[{name}](../results.md#{name})' for name in found) or 'none'}")
    return "\n".join([f"<!-- tables with: {match[1]} -->", "", *lines, "", TABLE_END])


def _overview(filled: list[Filled]) -> str:
    rows = [
        [
            f"[{one.definition.name}](#{one.definition.name})",
            one.definition.title,
            f"{one.done} of {one.total}",
            f"{one.seconds / 60:.0f}",
            _reached(one),
        ]
        for one in filled
    ]
    return pages.markdown_table(["table", "what", "runs", "minutes", "published numbers reached"], rows, words=2) + "\n"


def _reached(filled: Filled) -> str:
    if not filled.definition.is_comparable:
        return "other data"
    compared = sum(
        entry.published is not None and bool(entry.values)
        for part in filled.parts
        for _, entries in part.rows.values()
        for entry in entries.values()
    )
    return f"{compared - len(shortfalls(filled))} of {compared}" if compared else "–"


if __name__ == "__main__":
    write(Path.cwd())
