"""What a report tells of several runs: which belong together, how they are named, and means with standard errors."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from priory.core.errors import UsageError
from priory.report.records import Record
from priory.report.tables import PARTS, is_regression, value_at
from priory.stats import Estimate, estimate, paired

MOST_WORDS = 3  # settings that a label names


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in nothing but their seed, in the order of the seeds.

    Attributes:
        label: Name of the method, with the settings that tell it from others of that name.
    """

    label: str
    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        """The run that figures of single clients show."""
        return self.records[0]

    @property
    def personal(self) -> Any:
        """The uncertainty of the personal models; None where it was not measured."""
        found = self.first.uncertainty
        return None if found is None else found.parts.get("personal")


def group(records: Sequence[Record]) -> list[Group]:
    """The records by what they share, in the order of their first; raises `UsageError` if they do not go together."""
    found: dict[str, list[Record]] = {}
    for record in records:
        alike = found.setdefault(json.dumps(_settings(record), sort_keys=True, default=str), [])
        for other in alike:
            if other.seed == record.seed:
                raise UsageError(
                    f"{other.path} and {record.path} hold the same settings with the same seed, so that one says no "
                    "more than the other; name one of them."
                )
        alike.append(record)
    kinds = {is_regression([record.summary]): record.path for record in records if _has_scores(record)}
    if len(kinds) > 1:
        raise UsageError(f"{kinds[False]} predicts classes and {kinds[True]} a number; write a report for each.")
    rows = [tuple(sorted(alike, key=lambda record: record.seed)) for alike in found.values()]
    return [Group(label, alike) for label, alike in zip(_labels(rows), rows, strict=True)]


def score(of: Group, part: str, name: str) -> Estimate:
    """Return the mean of a score over seeds; its error is that over seeds, for one seed by bootstrap over clients."""
    values = [value_at(record.summary, f"{part}.{name}") for record in of.records]
    if len(values) > 1:
        return estimate(values)
    known = of.first.uncertainty
    pooled = known.parts[part].pooled.get(name) if known is not None and part in known.parts else None
    error = None if pooled is None or not math.isfinite(pooled.standard_error) else pooled.standard_error
    return Estimate(values[0], error if values[0] is not None else None)


def difference(of: Group, base: Group, part: str, name: str) -> Estimate | None:
    """The mean difference over the seeds that both have, with its standard error; None for fewer than two of them."""
    there = {record.seed: record for record in base.records}
    pairs = [(record, there[record.seed]) for record in of.records if record.seed in there]
    if len(pairs) < 2:
        return None
    return paired(*([value_at(one.summary, f"{part}.{name}") for one in some] for some in zip(*pairs, strict=True)))


def by_round(of: Group, name: str) -> list[tuple[int, Estimate]]:
    """A number at a dotted name of the metrics after each round in which all seeds have it."""
    told = [{line["round"]: value_at(line, name) for line in record.lines} for record in of.records]
    rounds = sorted(set(told[0]).intersection(*told[1:]))
    means = [(number, estimate([one[number] for one in told])) for number in rounds]
    return [(number, mean) for number, mean in means if mean.value is not None]


def _has_scores(record: Record) -> bool:
    return any(record.summary.get(part) for part in PARTS)


def _settings(record: Record) -> dict[str, Any]:
    """What decides a run, but for its seed."""
    manifest = record.manifest
    tables = {part: manifest.get(part, {}) for part in ("method", "data", "given")}
    run = {name: value for name, value in manifest["run"].items() if name != "seed"}
    return {**tables, "run": run, "checksum": manifest.get("environment", {}).get("data_checksum", "")}


def _labels(rows: Sequence[Sequence[Record]]) -> list[str]:
    """The method's name; where two share it, with the settings in which these differ."""
    names = [row[0].method for row in rows]
    flat = [_flat(_settings(row[0])) for row in rows]
    labels = []
    for name, own in zip(names, flat, strict=True):
        rivals = [other for other, rival in zip(flat, names, strict=True) if rival == name]
        keys = [
            key for key in dict.fromkeys(k for some in rivals for k in some) if len({r.get(key) for r in rivals}) > 1
        ]
        words = [f"{key.split('.')[-1].replace('_', '-')}={own.get(key, 'none')[:24]}" for key in keys[:MOST_WORDS]]
        labels.append(f"{name}: {', '.join(words)}" if words else name)
    return [
        label if labels.count(label) == 1 else f"{label} ({row[0].path})"
        for label, row in zip(labels, rows, strict=True)
    ]


def _flat(table: dict[str, Any], before: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in table.items():
        here = f"{before}.{name}" if before else name
        found |= _flat(value, here) if isinstance(value, dict) else {here: str(value)}
    return found
