"""The results page of the documentation and the headline table of the README, both made of cells.

    python -m priory.reproduce.document       writes docs/results.md and the table of README.md, from results/

No number on either page is typed by hand: a test makes them again and compares.
"""

import re
from pathlib import Path

from priory.reproduce import pages
from priory.reproduce.definition import names, read
from priory.reproduce.numbers import Filled, fill, shortfalls

__all__ = ["headline", "ordered", "readme", "results", "write"]

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
runs in `results/`, a JSON file each with manifest, seed, versions, curve and the `priory run` command that makes it
again. `priory reproduce --list` names them all with the time that they take; a command that is stopped goes on where it
was.

How to read them. ± is the standard error over seeds, where there are several; the published ± is whatever the paper
prints. Seed s is that of the partition and of the run, so methods are paired within a seed (`priory reproduce` writes
the paired differences into its HTML page). Numbers are those of the last round, never the best one. Where one of ours
is worse than the published one by more than two standard errors (half a point with a single seed), the list under the
table says so. With three seeds a difference of two standard errors is weak evidence.
"""
LEFT_OUT = """\
## Left out

- Methods: BNFed, HeurFedAMP, pFedGP, FedCFL and L2GD, columns of the papers' tables, are not in the library.
- EMNIST (FedHB, table 12): there are no data, and the table is missing from the text that we have.
- pFedBayes without a server (the decentralised variant) is outside the protocol.
- CIFAR-10-C and CIFAR-100-C: our own corruptions of CIFAR-100 stand in for them, and their numbers do not compare.
"""
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
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
    told = f"{what}; {part.block.title}. Published: {paper}. `priory reproduce {name}` makes it again."
    return f"{pages.markdown_table(header, rows)}\n\n{told}"


def readme(text: str, out: Path) -> str:
    """The README with its headline table in place."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{headline(out)}\n{END}", text, flags=re.DOTALL)


def write(root: Path) -> None:
    """Write both pages of a working tree."""
    out, page = root / "results", root / "README.md"
    (root / "docs" / "results.md").write_text(results(out))
    page.write_text(readme(page.read_text(), out))


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
    return pages.markdown_table(["table", "what", "runs", "minutes", "published numbers reached"], rows) + "\n"


def _reached(filled: Filled) -> str:
    compared = sum(
        entry.published is not None and bool(entry.values)
        for part in filled.parts
        for _, entries in part.rows.values()
        for entry in entries.values()
    )
    return f"{compared - len(shortfalls(filled))} of {compared}" if compared else "–"


if __name__ == "__main__":
    write(Path.cwd())
