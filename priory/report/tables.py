"""Text tables from the records of runs: one run, a comparison, a tuning, the methods, the data sets."""

import statistics
import sys
from collections.abc import Container, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from priory import methods
from priory.core.errors import UsageError
from priory.core.text import one_line, printable
from priory.data import Entry
from priory.stats import estimate, paired

PLAIN_WIDTH = 100
PARTS = {
    "personal": "personal",
    "global": "global",
    "newcomers": "newcomers",
    "newcomers_unlabelled": "newcomers, unlabelled",
    "newcomers_global": "newcomers, no data",
}
CLASS_COLUMNS = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "brier": "Brier"}
REGRESSION_COLUMNS = {"rmse": "RMSE", "nll": "NLL", "coverage_90": "coverage of 90 %"}
SPREAD_COLUMNS = {"clients.mean": "client mean", "clients.worst": "worst client"}
MOST_COLUMNS = 9  # of numbers next to each other in 100 columns
REFERENCE = "reference"  # marks a method that is not federated, since it needs all data in one place


class PlainConsole(Console):
    """A console that shows text as it is, whatever data or files have put into it: no markup, no escape sequences."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of a line or of a cell."""
        return super().render_str(printable(text), **options)


def console(stderr: bool = False) -> Console:
    """Where tables go: as wide as the terminal, or plain and 100 columns wide when piped."""
    if stderr or sys.stdout.isatty():
        return PlainConsole(stderr=stderr)
    return PlainConsole(width=PLAIN_WIDTH, color_system=None)


def say(*lines: str) -> None:
    """Print lines that stay lines however long they are, so that they can be copied."""
    for line in lines:
        console().print(line, soft_wrap=True)


def value_at(record: dict[str, Any], name: str) -> float | None:
    """The number at a dotted name of a summary; None where the method has no such score."""
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def score_line(line: dict[str, Any], short: bool = False) -> str:
    """The most telling scores of an evaluation in a few words; fewer where a bar stands beside them."""
    words = []
    for part in ("personal", "global"):
        scores = line.get(part)
        if scores:
            first = "accuracy" if "accuracy" in scores else "rmse"
            value, nll = _number(scores[first]), _number(scores["nll"])
            words.append(f"{part} {value}" if short else f"{part} {first} {value} nll {nll}")
    return "  ".join(words) or "no test examples"


def run_table(summary: dict[str, Any]) -> Table:
    """The scores of a run, a row each for personal models, the global one and the ways in of newcomers."""
    columns = score_columns(is_regression([summary]))
    table = plain_table("", *columns.values())
    for part, name_of_part in PARTS.items():
        if summary.get(part):
            table.add_row(name_of_part, *(_number(value_at(summary[part], name)) for name in columns))
    return table if table.row_count else plain_table("no test examples")


def architectures_table(found: dict[str, dict[str, float | None]]) -> Table:
    """The mean score of the clients of each model, federated and trained alone."""
    name = "rmse" if "rmse" in next(iter(found.values())) else "accuracy"
    headed = {"clients": "clients", name: name, "alone": f"{name} alone", "gain": "gain"}
    columns = [column for column in headed if column in next(iter(found.values()))]
    table = plain_table("model", *(headed[column] for column in columns))
    for model, row in found.items():
        table.add_row(model, str(row["clients"]), *(_number(row[column]) for column in columns[1:]))
    return table


def ways_table(scores: dict[str, dict[str, Any]]) -> Table:
    """The scores of one newcomer, a row for each way in."""
    columns = REGRESSION_COLUMNS if "rmse" in next(iter(scores.values())) else CLASS_COLUMNS
    table = plain_table("", *columns.values())
    for way, found in scores.items():
        table.add_row(way, *(_number(found[name]) for name in columns))
    return table


def run_lines(summary: dict[str, Any]) -> list[str]:
    """What else a run ends with: communication, time, and clients that were left out."""
    sent, seconds = summary["communication"], summary["seconds"]
    lines = []
    if sent["down_bytes"] is None:
        lines.append("all data in one place, so no model travels")
    else:
        down, up = byte_count(sent["down_bytes"]), byte_count(sent["up_bytes"])
        lines.append(f"{down} down and {up} up per client and round")
    lines.append(", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))
    scored = [summary[part] for part in PARTS if summary.get(part)]
    if any(scores["nll"] is None for scores in scored):
        explained = "diverged" in summary.get("extra", {}).get("advice", {})  # by a sentence of its own
        why = "" if explained else ": training diverged, and a lower --step-size may help"
        lines.append(f"a score that is missing (–) was not finite{why}")
    rejected = summary.get("extra", {}).get("rejected", {})
    if rejected:
        named = ", ".join(f"{one_line(client)} ({count} rounds)" for client, count in list(rejected.items())[:5])
        more = f" and {len(rejected) - 5} more" if len(rejected) > 5 else ""
        why = _reasons(summary["extra"].get("reasons", {}))
        lines.append(f"left out of rounds, since their updates were {why}: {named}{more}")
    if "privacy" in summary.get("extra", {}):
        lines += _privacy_lines(summary["extra"]["privacy"], summary["rounds"])
    return lines


def _reasons(reasons: dict[str, int]) -> str:
    """Why updates were rejected, each reason with its count; runs that kept no reasons knew only one."""
    words = {"weight": "of an impossible weight", "norm": "larger than max-norm"}
    told = [f"{words.get(reason, reason)} ({count})" for reason, count in reasons.items()]
    return ", ".join(told) or "not finite"


def _privacy_lines(told: dict[str, Any], rounds: int) -> list[str]:
    """What a run says of its differential privacy."""
    noise = f"noise {told['noise_multiplier']:.4g} x sensitivity {told['sensitivity']:.4g} ({told['sensitivity_from']})"
    claim = f"epsilon {told['epsilon']:.4g} at delta {told['delta']:g}"
    lines = [f"{told['mode']} differential privacy: {claim}, {told['relation']}, {noise}; {told['not_covered']}"]
    if rounds == told["rounds_allowed"] < told["rounds_planned"]:
        lines.append(
            f"ended after round {rounds} of {told['rounds_planned']}: one more would exceed the budget of epsilon "
            f"{told['budget']:g}"
        )
    return lines


def compared_columns(regression: bool, newcomers: bool) -> dict[str, str]:
    """Return the headings of what is compared by their dotted names."""
    name, title = ("rmse", "RMSE") if regression else ("accuracy", "accuracy")
    other = {"personal.coverage_90": "coverage of 90 %"} if regression else {"personal.ece": "ECE"}
    columns = {f"personal.{name}": f"personal {title}", f"global.{name}": f"global {title}", "personal.nll": "NLL"}
    columns |= other | {"personal.clients.worst": "worst client"}
    return columns | {f"newcomers.{name}": "newcomers"} if newcomers else columns


def compare(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The record of each method from its summaries, in the same order of seeds: means, errors, paired differences.

    The difference is that of a method to the first one with the same seed, so what a seed does to both cancels;
    errors are standard errors of the mean over seeds, None for a single one.
    """
    first = next(iter(runs.values()))
    names = compared_columns(is_regression(first), any(summary.get("newcomers") for summary in first))
    records = []
    for label, summaries in runs.items():
        scores = {}
        for name in names:
            own, base = ([value_at(summary, name) for summary in some] for some in (summaries, first))
            scores[name] = {**estimate(own).to_json(), "difference": paired(own, base).to_json()}
        seconds = {kind: statistics.fmean([s["seconds"][kind] for s in summaries]) for kind in summaries[0]["seconds"]}
        records.append(
            {
                "label": label,
                "method": summaries[0]["method"],
                "scores": scores,
                "communication": summaries[0]["communication"],
                "seconds": seconds,
            }
        )
    return records


def comparison_tables(records: list[dict[str, Any]], num_seeds: int, width: int = PLAIN_WIDTH) -> list[Table]:
    """The comparison, and for several seeds the paired differences to the first method.

    Where `width` is below 100 columns, or newcomers have a column, bytes and seconds get a table of their own, so that
    no number is cut.
    """
    scores = records[0]["scores"]
    names = compared_columns("personal.rmse" in scores, any(name.startswith("newcomers.") for name in scores))
    costs = ("bytes down", "bytes up", "run s", "compile s")
    tables = [plain_table("method", *names.values(), *costs)]
    if width < PLAIN_WIDTH or len(names) + len(costs) > MOST_COLUMNS:
        tables = [plain_table("method", *names.values()), plain_table("method", *costs)]
    for record in records:
        cells = [_with_error(record["scores"][name], "\n") for name in names]
        sent, seconds = record["communication"], record["seconds"]
        label = record["label"].replace(":", ":\n").replace(",", "\n")
        label += f"\n({REFERENCE})" if sent["down_bytes"] is None else ""
        spent = [
            byte_count(sent["down_bytes"]),
            byte_count(sent["up_bytes"]),
            f"{seconds['train'] + seconds['evaluate']:.1f}",
            f"{seconds['compile']:.1f}",
        ]
        for table, row in zip(tables, [[*cells, *spent]] if len(tables) == 1 else [cells, spent], strict=True):
            table.add_row(label, *row)
    if num_seeds < 2 or len(records) < 2:
        return tables
    paired = plain_table(f"less {records[0]['label']}", *names.values())
    for record in records[1:]:
        cells = [_with_error(record["scores"][name]["difference"], " ", signed=True) for name in names]
        paired.add_row(record["label"].replace(":", ":\n").replace(",", "\n"), *cells)
    return [*tables, paired]


def tuning_table(settings: Sequence[dict[str, Any]], by: str, most: int) -> Table:
    """The best settings of a tuning, best first."""
    swept = list(settings[0]["values"])
    others = [name for name in settings[0]["scores"] if name != by]
    table = plain_table(*(name.replace("_", "-") for name in swept), by, *others)
    for setting in settings[:most]:
        cells = [_with_error(setting["scores"][name], " ") for name in (by, *others)]
        table.add_row(
            *(f"{value:g}" if isinstance(value, float) else str(value) for value in setting["values"].values()), *cells
        )
    return table


def methods_table() -> Table:
    """Every installed method: its paper, what a client keeps and what it sends."""
    words = ("paper", "client keeps", "client sends")
    table = plain_table("method", *words, left=words)
    table.columns[1].no_wrap = True  # two lines, broken below, so that no citation is cut in a narrow terminal
    for name, cls in methods.installed():
        if isinstance(cls, UsageError):
            table.add_row(name, "cannot be used:", str(cls), "")
            continue
        about = cls.about
        table.add_row(name, str(about.paper).replace(", ", ",\n", 1), about.keeps, about.sends)
    return table


def datasets_table(entries: Iterable[Entry]) -> Table:
    """The catalogue of data sets; `sources_table` has the rest of it."""
    words = ("examples", "shape", "classes", "clients", "here")
    table = plain_table("data", *words, left=words)
    for entry in entries:
        table.add_row(
            entry.name,
            "as asked" if entry.examples is None else str(entry.examples),
            entry.shape,
            "regression" if entry.classes is None else str(entry.classes),
            entry.clients,
            "yes" if entry.available else "no",
        )
    return table


def sources_table(entries: Iterable[Entry]) -> Table:
    """The licence and the source of every data set."""
    table = plain_table("data", "licence", "source", left=("licence", "source"))
    for entry in entries:
        table.add_row(entry.name, entry.licence, entry.source)
    return table


def plain_table(first: str, *others: str, left: Container[str] = ()) -> Table:
    """Return an empty table without lines, whose columns after the first are of numbers except for some of words."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table


def is_regression(summaries: Iterable[dict[str, Any]]) -> bool:
    """Return whether the runs of these summaries predict a number."""
    return any("rmse" in (summary.get(part) or {}) for summary in summaries for part in PARTS)


def score_columns(regression: bool) -> dict[str, str]:
    """Return the headings of the scores of a run by their dotted names."""
    columns = (REGRESSION_COLUMNS if regression else CLASS_COLUMNS) | SPREAD_COLUMNS
    return columns | {"clients.p10": "90th percentile" if regression else "10th percentile"}


def _with_error(score: dict[str, Any], between: str, signed: bool = False) -> str:
    mean, error = score["mean"], score["standard_error"]
    text = f"{mean:+.3f}" if signed and mean is not None else _number(mean)
    return text if mean is None or error is None else f"{text}{between}±{_number(error)}"


def _number(value: float | None) -> str:
    """Three decimals, or fewer digits for what is large."""
    if value is None:
        return "–"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def byte_count(count: float | None) -> str:
    """Return a number of bytes in the largest unit that it fills; a dash where it is not known."""
    if count is None:
        return "–"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
