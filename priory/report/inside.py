"""The sections of a report on how a run went: what its method tells, what it cost, and its settings."""

from collections.abc import Sequence
from typing import Any

from priory.report import figures, rounds
from priory.report.markup import Html, element, join, note, table
from priory.report.markup import figures as drawn
from priory.report.numbers import Group
from priory.report.records import Record
from priory.report.sections import Section
from priory.report.tables import byte_count, value_at
from priory.report.vega import finite
from priory.stats import Estimate, estimate

MOST_NAMES = 20  # clients of a cluster that are named
POOLED = "all data in one place"


def inside(groups: Sequence[Group], regression: bool) -> Section:
    """Clusters, sparsity, privacy, chains and architectures, where a run has them."""
    shown = [*rounds.density(groups), *rounds.budget(groups), *figures.mixing(groups)]
    pieces = [drawn(shown)]
    for group in groups:
        made = [
            *_clusters(group, regression),
            *_density(group),
            *_privacy(group),
            *_chains(group),
            *_architectures(group),
            *_told(group),
        ]
        pieces += [element("h3", group.label), *made] if made else []
    return Section("inside", "Inside the methods", join(pieces), tuple(shown))


def _clusters(group: Group, regression: bool) -> list[Html]:
    extra = group.first.summary["extra"]
    if not extra.get("clusters"):
        return []
    name = "rmse" if regression else "accuracy"
    personal = group.first.clients.get("personal", {})
    scores = dict(zip(personal.get("client", []), personal.get(name, []), strict=False))
    members: dict[str, list[str]] = {}
    for client, number in extra["clusters"].items():
        members.setdefault("none" if number is None else str(number), []).append(client)
    rows: list[list[Any]] = []
    for number, some in sorted(members.items(), key=lambda one: (one[0] == "none", len(one[0]), one[0])):
        known = [value for client in some if (value := finite(scores.get(client))) is not None]
        more = f" and {len(some) - MOST_NAMES} more" if len(some) > MOST_NAMES else ""
        rows.append([number, len(some), Estimate(estimate(known).value), ", ".join(some[:MOST_NAMES]) + more])
    made = [table(["cluster", "clients", f"mean {name}", "who"], rows, f"Clusters of {group.label}")]
    index = finite(extra.get("adjusted_rand_index"))
    if index is not None:
        made.append(
            note(f"Agreement with the true clusters (adjusted Rand index): {index:.3f}; 1 is the same, 0 chance.")
        )
    return made


def _density(group: Group) -> list[Html]:
    last = group.first.lines[-1].get("info", {}) if group.first.lines else {}
    density = finite(last.get("density"))
    if density is None:
        return []
    return [
        note(f"Sparsity {1 - density:.3f}: in the last round {density:.3f} of the posterior's weights were not zero.")
    ]


def _privacy(group: Group) -> list[Html]:
    """The claim of differential privacy with what it assumes and leaves out."""
    found = []
    for record in group.records:
        told = record.summary["extra"].get("privacy")
        if told:
            rows = [[name.replace("_", " "), _plain(value)] for name, value in told.items()]
            found.append(table(["", "value"], rows, f"Differential privacy of {group.label}, seed {record.seed}"))
    return found[:1] if len({str(one) for one in found}) == 1 else found


def _chains(group: Group) -> list[Html]:
    found, missing = group.first.effects, group.first.missing
    if found is None:
        # Without uncertainty either, the sections above have said it.
        is_said = missing is None or group.first.uncertainty is None
        return [] if is_said else [note(f"Chains were not looked at. {missing}", "missing")]
    num = f"{len(found.clients)} clients with {len(found.names)} random effects each"
    if found.warning is not None:
        return [note(f"FAILS for {num}: {found.warning}", "warning")]
    return [note(f"Every R-hat is at most 1.01 and every effective sample size at least 400, for {num}.")]


def _architectures(group: Group) -> list[Html]:
    found = group.first.architectures
    if not found:
        return []
    columns = list(next(iter(found.values())))
    rows = [[model, *(row.get(column) for column in columns)] for model, row in found.items()]
    return [table(["model", *columns], rows, f"Models of the clients of {group.label}, and the same clients alone")]


def _told(group: Group) -> list[Html]:
    """The figures of the last round as the method tells them, folded away."""
    last = group.first.lines[-1].get("info", {}) if group.first.lines else {}
    rows = [[name.replace("_", " "), finite(value)] for name, value in last.items() if name != "bits"]
    if not rows:
        return []
    caption = f"Means over the clients of round {group.first.lines[-1]['round']}"
    return [
        element("details", element("summary", "Figures of the last round"), table(["figure", "value"], rows, caption))
    ]


def cost(groups: Sequence[Group]) -> Section:
    """Communication, time and memory."""
    rows = []
    for group in groups:
        sent, records = group.first.summary["communication"], group.records
        spent = [_mean(records, f"seconds.{name}") for name in ("train", "evaluate", "compile")]
        memory = _mean(records, "peak_rss_bytes")
        traffic = [POOLED if sent[name] is None else byte_count(sent[name]) for name in ("down_bytes", "up_bytes")]
        rows.append([group.label, group.first.summary["rounds"], *traffic, *spent, byte_count(memory.value)])
    header = ["run", "rounds", "down", "up", "training s", "evaluation s", "compilation s", "peak memory"]
    text = "Seconds are of this machine and in simulation, and none of a network; several seeds give their mean."
    made = table(header, rows, "Down and up are bytes for each client and round")
    return Section("cost", "Communication and time", join([made, note(text)]))


def settings(groups: Sequence[Group]) -> Section:
    """The manifest of every run, by which it can be run again."""
    pieces: list[Html] = [note("To run one again: priory run manifest.toml. The same devices give the same numbers.")]
    for group in groups:
        others = [f"seed {record.seed} in {record.path}" for record in group.records[1:]]
        alike = [note(f"The same but for the seed: {', '.join(others)}.")] if others else []
        title = f"{group.label}, seed {group.first.seed} in {group.first.path}"
        pieces.append(element("details", element("summary", title), element("pre", group.first.text), *alike))
    return Section("settings", "Settings", join(pieces))


def _mean(records: Sequence[Record], name: str) -> Estimate:
    """Return the mean of what is known, without an error."""
    values = [value_at(record.summary, name) for record in records]
    known = [finite(value) for value in values if isinstance(value, int | float)]
    return Estimate(estimate([value for value in known if value is not None]).value)


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
