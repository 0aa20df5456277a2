"""The section of a report on single clients: size against score, and a table that sorts and filters."""

from collections.abc import Sequence
from typing import Any

from priory.report import figures
from priory.report.markup import Html, element, join, note, table
from priory.report.markup import figures as drawn
from priory.report.numbers import Group
from priory.report.sections import FIRST_SEED, Section, missing
from priory.report.tables import PARTS
from priory.report.vega import finite

MOST_ROWS = 3000  # of the table: with more, a browser takes long to open the page
COLUMNS = {
    "train": "training rows",
    "test": "test rows",
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "global": "global model",
    "nll": "NLL",
    "brier": "Brier",
    "coverage_90": "coverage of 90 %",
    "entropy": "entropy",
    "sharpness": "sd",
    "epistemic": "epistemic",
    "set_size": "set size",
    "interval_width": "interval width",
    "cluster": "cluster",
}
WHOLE = ("train", "test", "cluster")
RENAMED = {"count": "test", "uncertainty": "entropy"}  # of clients.json


def clients(groups: Sequence[Group], regression: bool) -> Section:
    """Size against score, and every client in a table."""
    shown = figures.sizes(groups, regression)
    rows = [row for group in groups for row in _rows(group, regression)]
    if not rows:
        return Section("clients", "Clients", note("No client has test examples.", "missing"))
    score = "rmse" if regression else "accuracy"
    several = len({row["model"] for row in rows}) > 1
    # The worst off come first: they are why one looks here, and those that are left out are the best off.
    rows.sort(key=lambda row: _standing(row, score))
    left_out, rows = len(rows) - MOST_ROWS, rows[:MOST_ROWS]
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    header = ["client", "run", *(["model"] if several else []), *(COLUMNS[name] for name in names)]
    body = [
        [row["client"], row["run"], *([row["model"]] if several else []), *(row.get(n) for n in names)] for row in rows
    ]
    made = table(header, body, "Every client", class_="sortable", id="clients-table")
    pieces = [*missing(groups), drawn(shown), _filter(groups, len(rows)), made]
    if left_out > 0:
        pieces.append(note(f"Left out, to keep the page light: {left_out} rows, those with the best scores."))
    pieces.append(note(f"The worst of many small clients is bad by chance too: look at its test rows. {FIRST_SEED}"))
    return Section("clients", "Clients", join(pieces), tuple(shown))


def _standing(row: dict[str, Any], score: str) -> tuple[int, float]:
    """Sorts clients: scores that are not finite, then the others from the worst on, then who has no test rows."""
    if row[score] is None:
        return (0 if row.get("test") else 2), 0.0
    return 1, row[score] if score == "accuracy" else -row[score]


def _filter(groups: Sequence[Group], num: int) -> Html:
    """Fields that narrow the table down; the page's script shows and serves them."""
    text = element("label", "Client: ", element("input", type="search", id="filter-client", autocomplete="off"))
    options = [element("option", group.label, value=group.label) for group in groups]
    choice = element("select", element("option", "all runs", value=""), *options, id="filter-run")
    run = element("label", "Run: ", choice) if len(groups) > 1 else Html("")
    told = element("output", f"{num} of {num} rows", id="filter-count")
    return element("form", text, " ", run, " ", told, id="filter", hidden=True)


def _rows(group: Group, regression: bool) -> list[dict[str, Any]]:
    """A row for each client and kind of model, by name of column."""
    record, score = group.first, "rmse" if regression else "accuracy"
    general = record.clients.get("global", {})
    population = dict(zip(general.get("client", []), general.get(score, []), strict=False))
    clusters = record.summary["extra"].get("clusters", {})
    found = []
    for part, title in PARTS.items():
        if part == "global":
            continue
        for row in _of_part(group, part):
            known = {"global": population.get(row["client"]), "cluster": clusters.get(row["client"])}
            found.append({"run": group.label, "model": title, score: None, **known, **row})
    return found


def _of_part(group: Group, part: str) -> list[dict[str, Any]]:
    """What is known of each client, from its uncertainty where it was measured, else from its scores."""
    measured = group.first.uncertainty
    if measured is not None and part in measured.parts:
        columns = {name: column.tolist() for name, column in measured.parts[part].clients.items()}
    else:
        columns = {RENAMED.get(name, name): column for name, column in group.first.clients.get(part, {}).items()}
    names = ["client", *(name for name in COLUMNS if name in columns)]
    return [
        {name: _value(name, value) for name, value in zip(names, row, strict=True)}
        for row in zip(*(columns.get(name, []) for name in names), strict=True)
    ]


def _value(name: str, value: Any) -> Any:
    if name == "client":
        return str(value)
    known = finite(value)
    return int(known) if known is not None and name in WHOLE else known
