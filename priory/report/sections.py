"""The sections of a report that every run has: scores, convergence, calibration, clients, doubt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from priory.report import figures, rounds
from priory.report.markup import Html, join, note, table
from priory.report.markup import figures as drawn
from priory.report.numbers import Group, difference, score
from priory.report.tables import PARTS, run_lines, score_columns
from priory.report.vega import Figure
from priory.stats import Estimate
from priory.uncertainty import Metric

FIRST_SEED = "Where a run has several seeds, the first one is shown."
CALIBRATION = {
    "nll": "NLL",
    "brier": "Brier",
    "brier_reliability": "its reliability",
    "brier_resolution": "its resolution",
    "ece": "ECE",
    "ece_mass": "ECE, equal mass",
    "ece_classwise": "ECE, classwise",
    "sharpness": "mean confidence",
    "accuracy": "accuracy",
}
SPREAD = {
    "nll": "NLL",
    "coverage_50": "50 %",
    "coverage_80": "80 %",
    "coverage_90": "90 %",
    "coverage_95": "95 %",
    "interval_score_90": "interval score, 90 %",
    "sharpness": "mean sd",
}


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: Where a link leads.
        title: Its heading.
        body: What stands under it.
        figures: Drawn in it.
    """

    name: str
    title: str
    body: Html
    figures: tuple[Figure, ...] = ()


def headline(groups: Sequence[Group], regression: bool) -> Section:
    """The scores of all runs, with standard errors and, over seeds, the paired differences to the first."""
    columns = score_columns(regression)
    parts = [(group, part) for group in groups for part in PARTS if group.first.summary.get(part)]
    header = ["run", "model", *columns.values()]
    rows = [[group.label, PARTS[part], *(score(group, part, name) for name in columns)] for group, part in parts]
    if not rows:
        return Section("scores", "Scores", note("No client has test examples, so nothing was scored.", "missing"))
    pieces = [*_advice(groups), table(header, rows, "Scores on the test rows of the clients"), *_errors(groups)]
    base = groups[0]
    paired = [
        [group.label, PARTS[part], *(difference(group, base, part, name) or Estimate(None) for name in columns)]
        for group, part in parts
        if group is not base and base.first.summary.get(part) and difference(group, base, part, "nll") is not None
    ]
    if paired:
        pieces.append(table(header, paired, f"Difference to {base.label}, paired by seed"))
        pieces.append(note("What a seed does to both runs cancels; ± is the standard error of the mean difference."))
    lower = "RMSE and NLL are better when smaller" if regression else "NLL, ECE and Brier are better when smaller"
    pieces.append(note(f"{lower}; the client columns count every client once. A dash is a score that is not finite."))
    return Section("scores", "Scores", join(pieces))


def _errors(groups: Sequence[Group]) -> list[Html]:
    """What ± means, and what it leaves out."""
    seeds = [f"{group.label} ({len(group.records)})" for group in groups if len(group.records) > 1]
    single = [group for group in groups if len(group.records) == 1]
    told = []
    if seeds:
        told.append(note(f"± is the standard error of the mean over seeds for {', '.join(seeds)}."))
    if any(group.first.uncertainty for group in single):
        told.append(
            note(
                "± is a bootstrap standard error over clients for runs with one seed: it holds what other clients "
                "would change, not the spread between training runs."
            )
        )
    return told


def _advice(groups: Sequence[Group]) -> list[Html]:
    """What a run warned of: advice of its method, and clients that were left out."""
    found = []
    for group in groups:
        for record in group.records:
            extra, who = record.summary["extra"], group.label
            who = f"{who}, seed {record.seed}" if len(group.records) > 1 else who
            told = [text for text in extra.get("advice", {}).values() if isinstance(text, str)]
            rejected = {name: extra.get(name, {}) for name in ("rejected", "reasons", "advice")}
            told += run_lines({**record.summary, "extra": rejected})[2:]
            found += [note(f"{who}: {text}", "warning") for text in told]
    return found


def convergence(groups: Sequence[Group], regression: bool) -> Section:
    """Scores over rounds."""
    found = rounds.convergence(groups, regression)
    body = drawn(found) or note("The runs were evaluated at no round; give --eval-every.", "missing")
    return Section("rounds", "Convergence", body, tuple(found))


def calibration(groups: Sequence[Group], regression: bool) -> Section:
    """Whether probabilities, or intervals, mean what they say."""
    found = figures.coverage(groups) if regression else figures.reliability(groups)
    pieces = [*missing(groups), drawn(found)]
    columns = SPREAD if regression else CALIBRATION
    rows = [[label, *(_metric(pooled.get(name)) for name in columns)] for label, pooled in _pooled(groups)]
    if rows:
        caption = "Personal models on all test rows, ± bootstrap standard error over clients"
        pieces.append(table(["run", *columns.values()], rows, caption))
    pieces.append(_conformal(groups, regression))
    if rows and not regression:
        text = "Brier = reliability − resolution + a constant: reliability is the price of probabilities that are off."
        pieces.append(note(text))
    if rows:
        pieces.append(note(FIRST_SEED))
    return Section("calibration", "Calibration", join(pieces), tuple(found))


def _conformal(groups: Sequence[Group], regression: bool) -> Html:
    """What prediction sets cover, with the assumption under which they should; or why there are none."""
    rows: list[list[Any]] = []
    said: dict[str, None] = {}
    for group in groups:
        part: Any = group.personal
        if part is None:
            continue
        sets = part.intervals if regression else part.sets
        if sets is None:
            said[part.intervals_missing if regression else part.sets_missing] = None
            continue
        said[f"Assumed: {sets.assumption}"] = None
        reached, size = _metric(sets.coverage), _metric(sets.width if regression else sets.size)
        counts = (sets.calibration, sets.without, sets.too_few)
        rows.append([group.label, sets.level, reached, _verdict(reached, sets.level), size, *counts])
    kind, unit = ("intervals", "mean width") if regression else ("sets", "mean classes in a set")
    header = ["run", "asked", "reached", "verdict", unit, "validation rows", "clients without", "clients with too few"]
    made = [table(header, rows, f"Conformal prediction {kind}, calibrated on each client's validation rows")]
    return join([*(made if rows else []), *(note(text) for text in said if text)])


def _verdict(reached: Estimate, level: float) -> str:
    if reached.value is None:
        return "unknown"
    below = reached.value + 2 * (reached.error or 0.0) < level
    return "FAILS: below what was asked" if below else "holds, within two standard errors"


def doubt(groups: Sequence[Group], regression: bool) -> Section:
    """What the models do not know: its parts, foreign inputs, and what to leave to a person."""
    found = [figures.spread(group, str(place), regression) for place, group in enumerate(groups)]
    shown = [figure for figure in found if figure is not None] + figures.rejection(groups)
    pieces = [*missing(groups), drawn(shown)]
    names = ("aleatoric", "epistemic") if regression else ("entropy", "aleatoric", "epistemic", "rejection_area")
    rows = [[label, *(_metric(pooled.get(name)) for name in names)] for label, pooled in _pooled(groups)]
    if rows:
        unit = "standard deviations of y" if regression else "nats"
        caption = f"Uncertainty of the personal models on test rows, in {unit}, ± bootstrap standard error"
        pieces.append(table(["run", *(name.replace("_", " ") for name in names)], rows, caption))
    silent = [group.label for group, figure in zip(groups, found, strict=True) if figure is None and group.personal]
    if silent:
        text = f"{', '.join(silent)}: every input has an epistemic part of 0. That is not certainty: a model without "
        pieces.append(note(text + "several draws does not say."))
    pieces.append(_foreign(groups))
    if rows:
        pieces.append(
            note(f"The split is the model's own opinion, right only as far as its posterior is. {FIRST_SEED}")
        )
    return Section("doubt", "What the models do not know", join(pieces), tuple(shown))


def _foreign(groups: Sequence[Group]) -> Html:
    rows = []
    for group in groups:
        ood = None if group.first.uncertainty is None else group.first.uncertainty.ood
        if ood is not None:
            both, part, passed = (_metric(one) for one in (ood.auroc, ood.auroc_epistemic, ood.fpr95))
            rows.append([group.label, ood.data, ood.examples, both, _apart(both), part, _apart(part), passed])
    if not rows:
        text = "No foreign inputs were given, so this says nothing of inputs from elsewhere; give some with --ood DATA."
        return note(text, "missing")
    header = ["run", "foreign inputs", "number", "AUROC", "verdict", "by the epistemic part", "verdict", "FPR95"]
    caption = "Foreign inputs against the test rows of each client"
    text = (
        "AUROC is the probability that a model is less certain of a foreign input than of a test row of its client: "
        "0.5 is a guess. A verdict allows for two standard errors. It is the answer for these foreign inputs and no "
        "others."
    )
    return join([table(header, rows, caption), note(text)])


def _apart(auroc: Estimate) -> str:
    if auroc.value is None:
        return "unknown"
    reach = 2 * (auroc.error or 0.0)
    if auroc.value - reach > 0.5:
        return "told apart"
    return "FAILS: surer of foreign inputs" if auroc.value + reach < 0.5 else "FAILS: no better than a guess"


def missing(groups: Sequence[Group]) -> list[Html]:
    """A sentence for each run whose uncertainty is not known."""
    return [
        note(f"{group.label}: uncertainty was not measured. {group.first.missing or ''}", "missing")
        for group in groups
        if group.first.uncertainty is None
    ]


def _pooled(groups: Sequence[Group]) -> list[tuple[str, dict[str, Metric]]]:
    return [(group.label, part.pooled) for group in groups if (part := group.personal) is not None]


def _metric(one: Metric | None) -> Estimate:
    if one is None or not np.isfinite(one.value):
        return Estimate(None)
    return Estimate(one.value, one.standard_error if np.isfinite(one.standard_error) else None)
