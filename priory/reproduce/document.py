"""The results page of the documentation, the headline table of the README, tables and counts of other pages.

    python -m priory.reproduce.document    writes docs/results.md, and the tables of README.md and docs/, from results/

A page has a table between two comments. The first names it and, where wanted, some of its blocks and rows, or
differences. A page of `docs/methods/` can also have, method by method, the tables that it stands in, and within a
sentence the count of published numbers that are reached: of the methods and tables that are named, or of `all`.

    <!-- table: fedhb-table-10 1x100 differences rows=fedprox,fedhb-niw -->
    <!-- end of table -->

    <!-- tables with: fedavg fedprox -->
    <!-- end of table -->

    <!-- reached: fedhb-niw fedhb-mixture fedhb-table-10 --><!-- end of count -->

No number there is typed by hand: a test makes the pages again and compares.
"""

import re
from dataclasses import replace
from pathlib import Path

from priory.fed.capabilities import Draws
from priory.methods import REGISTRY
from priory.reproduce import pages
from priory.reproduce.definition import names, read
from priory.reproduce.numbers import Comparison, Filled, Part, comparisons, fill, tally

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

How to read them. ± is the standard error over seeds; a number without it is a single run with seed 0. Seed s is that of
the partition and of the run, so methods are paired within a seed (`priory reproduce` writes the paired differences into
its HTML page). Numbers are those of the last round, never the best one.

A published number is

- **reached** if our mean over two or more seeds is at least as good, to the decimals that are shown. It does not mean
  better: of two equal methods, each reaches the other in half of all cases;
- **missed** if our mean is worse and the 95 % interval of the difference, by Student's t, excludes 0. The error of the
  difference is √(ours² + theirs²), with n − 1 degrees of freedom for our n seeds: with three seeds the interval is 4.3
  errors wide on either side;
- **not resolved** if our mean is worse and the interval includes 0, and whenever we have one seed, better or worse: one
  run has no error. The overview counts the numbers with one seed in its last two columns as well.

The lists under the tables name every number that is worse, by outcome.

No paper states how many seeds it has, or whether its ± is a standard deviation or a standard error. We take ± as a
standard error; if it is a standard deviation, numbers that count as not resolved may be missed. A number without ±
is taken as exact. n − 1 degrees of freedom are at most those of Welch and Satterthwaite if the paper has as many seeds.
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
COUNT_END = "<!-- end of count -->"
COLUMNS = ("published", "reached", "missed", "not resolved", "one seed, at least as good", "one seed, worse")
HEADLINE = ("fedhb-table-11", "1x100", ("global", "personal", "personal NLL"))
OURS = ("fedhb-niw", "fedhb-mixture")  # rows of the headline; the best point estimate is put next to them


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
    every = [one for table in filled for one in comparisons(table)]
    found = [INTRODUCTION, f"All tables: {_count(every)}.\n", _overview(filled)]
    for paper, title in PAPERS.items():
        found.append(f"## {title}\n")
        found += [pages.markdown(one, level=3) for one in filled if one.definition.name.split("-")[0] == paper]
    return "\n".join([*found, LEFT_OUT])


def headline(out: Path) -> str:
    """Return the table of the README: FedHB in one block of one table, next to the best point estimate there."""
    name, key, headings = HEADLINE
    filled = fill(read(name), out)
    part = next(part for part in filled.parts if part.block.key == key)
    baseline = _best_point_estimate(part)
    chosen = {row: part.rows[row] for row in (baseline, *OURS)}
    header, rows = pages.grid(replace(part, rows=chosen), headings)
    what, paper = filled.definition.title.partition(": ")[2], filled.definition.paper
    told = f"{what}; {part.block.title}. ± is the standard error over {part.num_seeds} seeds."
    told += f" {part.rows[baseline][0].label} has the best personal NLL of the point estimates with as many seeds."
    told = f"{told} Published: {paper}. `priory reproduce {name}` makes it again, with the files in `PRIORY_DATA`;"
    told = f"{told} what is smaller here than in the paper"
    told = f"{told} and how settings were chosen stands [below the whole table](docs/results.md#{name})."
    counted = f"All tables: {_count(_of([], out))}. [Results](docs/results.md) defines the three outcomes."
    return f"{pages.markdown_table(header, rows)}\n\n{told}\n\n{counted}"


def _best_point_estimate(part: Part) -> str:
    """Return the row with the least personal NLL among methods without a posterior that have all seeds."""
    scores = {
        key: entries["personal NLL"].mean
        for key, (row, entries) in part.rows.items()
        if not issubclass(REGISTRY[row.method], Draws) and len(entries["personal NLL"].values) == part.num_seeds
    }
    return min(scores, key=lambda key: scores[key])


def with_tables(text: str, out: Path) -> str:
    """A page with the tables and counts that it names in place."""

    def filled(match: re.Match[str]) -> str:
        name, *words = match[1].split()
        rows = [row for word in words if word.startswith("rows=") for row in word.removeprefix("rows=").split(",")]
        blocks = [word for word in words if word != "differences" and not word.startswith("rows=")]
        parts = [part for part in fill(read(name), out).parts if not blocks or part.block.key in blocks]
        parts = [replace(part, rows={row: part.rows[row] for row in rows}) if rows else part for part in parts]
        made = [pages.differences(part) if "differences" in words else pages.grid(part) for part in parts]
        tables = [
            (f"**{part.block.title}**\n\n" if part.block.title and len(parts) > 1 else "") + pages.markdown_table(*one)
            for part, one in zip(parts, made, strict=True)
        ]
        return "\n".join([f"<!-- table: {match[1]} -->", "\n\n".join(tables), TABLE_END])

    def counted(match: re.Match[str]) -> str:
        return f"<!-- reached: {match[1]} -->{_count(_of(match[1].split(), out))}{COUNT_END}"

    made = re.sub(f"<!-- table: (.*?) -->\n.*?{TABLE_END}", filled, text, flags=re.DOTALL)
    made = re.sub(f"<!-- reached: (.*?) -->.*?{COUNT_END}", counted, made, flags=re.DOTALL)
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


def _of(words: list[str], out: Path) -> list[Comparison]:
    """The comparisons of the methods and tables that are named; of all where no method, or no table, is."""
    tables = [name for name in ordered() if name in words]
    chosen = set(words).difference(tables, ["all"])
    unknown = chosen.difference(REGISTRY)
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is neither a table nor a method; correct the comment.")
    every = [one for name in tables or ordered() for one in comparisons(fill(read(name), out))]
    return [one for one in every if not chosen or one.row.method in chosen]


def _count(found: list[Comparison]) -> str:
    """The outcomes of comparisons in words."""
    count = tally(found)
    told = f"{count['reached']} of {count['published']} published numbers reached, {count['missed']} missed, "
    told += f"{count['not resolved']} not resolved"
    good, worse = count["one seed, at least as good"], count["one seed, worse"]
    return f"{told} ({good + worse} with one seed: {good} at least as good, {worse} worse)" if good + worse else told


def _overview(filled: list[Filled]) -> str:
    rows = [
        [
            f"[{one.definition.name}](#{one.definition.name})",
            one.definition.title,
            f"{one.done} of {one.total}",
            f"{one.seconds / 60:.0f}",
            *_outcomes(one),
        ]
        for one in filled
    ]
    header = ["table", "title", "runs", "minutes", *COLUMNS]
    return pages.markdown_table(header, rows, words=2) + "\n"


def _outcomes(filled: Filled) -> list[str]:
    if not filled.definition.is_comparable:
        return ["other data", *["–"] * (len(COLUMNS) - 1)]
    count = tally(comparisons(filled))
    return [str(count[name]) if count["published"] else "–" for name in COLUMNS]


if __name__ == "__main__":
    write(Path.cwd())
