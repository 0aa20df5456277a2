"""Figures of what a run ended with, from numbers to Vega-Lite; a function returns those that there are numbers for."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from priory.report.numbers import Group
from priory.report.vega import DIAGONAL, Cues, Figure, Layer, Row, axis, ending, figure, finite, number, rule, tooltip

CURVES = {
    "pooled": "all clients together",
    "best": "the most accurate client",
    "median": "the median client",
    "worst": "the least accurate client",
}
MOST_POINTS = 2000  # of a scatter plot: a browser draws each as an element
UNIT = {"scale": {"domain": [0, 1]}}
THIN = {"type": "line", "strokeWidth": 1}


def reliability(groups: Sequence[Group]) -> list[Figure]:
    """Accuracy against confidence of the personal models: pooled, and of the best, the median and the worst client."""
    figures = []
    cues = _cues(groups)
    for name, title in CURVES.items():
        rows: list[Row] = []
        told = []
        for group in groups:
            curve = _personal(group, "reliability").get(name)
            if curve is None or not np.sum(curve.count):
                continue
            who = {} if curve.client is None else {"client": curve.client}
            bins = zip(curve.confidence.tolist(), curve.accuracy.tolist(), curve.count.tolist(), strict=True)
            found = [
                {"run": group.label, **who, "confidence": c, "accuracy": a, "rows": n} for c, a, n in bins if n > 0
            ]
            rows += found
            gap = sum(row["rows"] * (row["confidence"] - row["accuracy"]) for row in found) / np.sum(curve.count)
            whose = f" (client {curve.client})" if who else ""
            words = "too sure" if gap > 0 else "not sure enough"
            told.append((f"{group.label}{whose}", f"is {words} by {abs(gap):.3f} on average"))
        if not rows:
            continue
        where = {"x": axis("confidence", "confidence", **UNIT), "y": axis("accuracy", "accuracy", **UNIT)}
        size = {"field": "rows", "type": "quantitative", "scale": {"range": [8, 220]}, "legend": None}
        tip = tooltip(["run", *(["client"] if "client" in rows[0] else []), "rows"], ["confidence", "accuracy"])
        layers = [DIAGONAL, cues.line(where, THIN), cues.points({**where, "size": size}, tip, filled=True)]
        alt = f"Reliability diagram of {title}. {ending(told)}."
        text = "Below the dotted line a model is too sure of itself; a larger mark stands for more rows."
        figures.append(figure(f"reliability-{name}", f"Reliability, {title}", text, alt, rows, layers))
    return figures


def coverage(groups: Sequence[Group]) -> list[Figure]:
    """Share of the targets in the central intervals of a regression, against what it should be."""
    rows: list[Row] = []
    told = []
    for group in groups:
        found = _personal(group, "coverage")
        if not found:
            continue
        errors = np.nan_to_num(found.standard_error)
        for level, reached, error in zip(found.level.tolist(), found.reached.tolist(), errors.tolist(), strict=True):
            ends = {"low": reached - error, "high": reached + error}
            rows.append({"run": group.label, "level": level, "reached": reached, **ends})
            told.append((group.label, f"covers {reached:.3f} where {level:g} is asked"))
    rows = [row for row in rows if finite(row["reached"]) is not None]
    if not rows:
        return []
    cues = _cues(groups)
    where = {"x": axis("level", "level of the interval", **UNIT), "y": axis("reached", "share inside", **UNIT)}
    bars = {**where, "y": axis("low", "share inside", **UNIT), "y2": {"field": "high"}}
    marks = cues.points(where, tooltip(["run", "level"], ["reached"]), filled=True, size=60)
    layers = [DIAGONAL, cues.line(bars, "rule"), cues.line(where, THIN), marks]
    alt = f"Coverage of central intervals. {ending(told)}."
    text = "Below the dotted line intervals are too narrow; bars are ± one standard error over clients."
    return [figure("coverage", "Coverage of intervals", text, alt, rows, layers)]


def sizes(groups: Sequence[Group], regression: bool) -> list[Figure]:
    """The score of each client against its training rows, and of the clients in groups of like size."""
    name = "rmse" if regression else "accuracy"
    return [*_by_client(groups, name), *_by_band(groups, name)]


def _by_client(groups: Sequence[Group], name: str) -> list[Figure]:
    rows: list[Row] = []
    told = []
    for group in groups:
        columns = _personal(group, "clients")
        if not columns:
            continue
        table = zip(*(columns[key].tolist() for key in ("client", "train", "test", name)), strict=True)
        found = [
            {"run": group.label, "client": who, "train": train, "test": test, name: score}
            for who, train, test, score in table
            if finite(score) is not None and train > 0
        ]
        rows += found
        if found:
            scores = [row[name] for row in found]
            told.append((group.label, f"has clients from {min(scores):.3f} to {max(scores):.3f}"))
    if not rows:
        return []
    counts = [row["train"] for row in rows]
    kind = {"scale": {"type": "log", "nice": False, "padding": 10}} if max(counts) > 20 * min(counts) else {}
    where = {"x": axis("train", "training rows of the client", **kind), "y": axis(name, _title(name))}
    layer = _cues(groups).points(where, tooltip(["run", "client", "train", "test"], [name]), size=50)
    alt = f"Scatter plot of {_title(name)} against the size of a client. {ending(told)}."
    rows, thinned = _thinned(rows, "train")
    text = (
        f"{_title(name)} of each client's own model on its test rows; of few test rows it is a rough number.{thinned}"
    )
    return [figure("sizes-clients", f"{_title(name)} and size", text, alt, rows, [layer])]


def _by_band(groups: Sequence[Group], name: str) -> list[Figure]:
    rows: list[Row] = []
    for group in groups:
        for place, band in enumerate(_personal(group, "by_size") or ()):
            score = band.scores[name]
            error = finite(score.standard_error) or 0.0
            ends = {"low": score.value - error, "high": score.value + error}
            size = f"{band.least} to {band.most}" if band.least != band.most else f"{band.least}"
            known = {"rows": size, "place": place, "clients": band.clients, "test": band.test}
            rows.append({"run": group.label, **known, name: score.value, **ends})
    rows = [row for row in rows if finite(row[name]) is not None]
    if not rows:
        return []
    cues = _cues(groups)
    bands = {"field": "rows", "type": "nominal", "title": "training rows of a client", "axis": {"labelAngle": 0}}
    ordered = {**bands, "sort": {"field": "place"}}
    beside = {"xOffset": {"field": "run"}} if len(groups) > 1 else {}
    where = {"x": ordered, "y": axis(name, _title(name)), **beside}
    bars = {**where, "y": axis("low", _title(name)), "y2": {"field": "high"}}
    tip = tooltip(["run", "rows", "clients", "test"], [name])
    layers = [cues.line(bars, {"type": "rule", "strokeWidth": 2}), cues.points(where, tip, filled=True, size=60)]
    told = [(f"{row['run']}, {row['rows']} rows", number(row[name])) for row in rows]
    alt = f"{_title(name)} of clients in groups of like size. {ending(told)}."
    text = "All test rows of the clients in a group together; bars are ± one standard error over its clients."
    return [figure("sizes-bands", f"{_title(name)} of small and large clients", text, alt, rows, layers)]


def spread(group: Group, name: str, regression: bool) -> Figure | None:
    """How uncertain a run's personal models are of test rows and of foreign inputs: the epistemic part.

    None where nothing is epistemic, as for point estimates.
    """
    own, found = _personal(group, "epistemic"), group.first.uncertainty
    if not own or found is None:
        return None
    kinds = {"test rows": own} | ({f"foreign: {found.ood.data}": found.ood.epistemic} if found.ood else {})
    if not any(np.sum(one.count[1:]) for one in kinds.values()):
        return None
    rows: list[Row] = []
    told = []
    for kind, one in kinds.items():
        total, edges = max(float(np.sum(one.count)), 1.0), one.edges.tolist()
        shares = [count / total for count in one.count.tolist()]
        ends = zip(edges[:-1], edges[1:], shares, strict=True)
        rows += [{"of": kind, "from": low, "to": high, "share": share} for low, high, share in ends]
        rows.append({"of": kind, "from": edges[-1], "to": edges[-1], "share": 0.0})  # where the outline comes down
        middles = (one.edges[:-1] + one.edges[1:]) / 2
        told.append((kind, f"have a mean of about {number(float(np.sum(middles * shares)))}"))
    unit = "epistemic standard deviation" if regression else "epistemic uncertainty (nats)"
    legend = {"title": None, "orient": "bottom"} if len(kinds) > 1 else None
    colour: dict[str, Any] = {
        "field": "of",
        "type": "nominal",
        "scale": {"domain": list(kinds), "range": ["#0072B2", "#D55E00"][: len(kinds)]},
        "legend": legend,
    }
    dash = {**colour, "scale": {"domain": list(kinds), "range": [[1, 0], [5, 3]][: len(kinds)]}}
    where = {"x": axis("from", unit, zero=True), "y": axis("share", "share of the rows", zero=True)}
    tip = tooltip(["of"], ["from", "to", "share"], ".3g")
    outline = {"type": "line", "interpolate": "step-after", "strokeWidth": 2}
    bars: dict[str, Any] = {**where, "x2": {"field": "to"}, "y2": {"datum": 0}, "color": colour, "tooltip": tip}
    layers: list[Layer] = [
        {"mark": {"type": "rect", "opacity": 0.25}, "encoding": bars},
        {"mark": outline, "encoding": {**where, "color": colour, "strokeDash": dash}},
    ]
    alt = f"Histogram of the {unit} of {group.label}. {ending(told)}."
    text = "Further right, the draws of the posterior disagree more" + (
        "; a model that knows what is foreign has the dashed outline right of the solid one." if found.ood else "."
    )
    return figure(f"epistemic-{name}", f"What {group.label} does not know", text, alt, rows, layers)


def rejection(groups: Sequence[Group]) -> list[Figure]:
    """Accuracy when the least certain rows are left to a person."""
    rows: list[Row] = []
    told = []
    for group in groups:
        curve = _personal(group, "rejection")
        if not curve:
            continue
        found = [
            {"run": group.label, "kept": kept, "accuracy": accuracy}
            for kept, accuracy in zip(curve.kept.tolist(), curve.accuracy.tolist(), strict=True)
            if finite(accuracy) is not None
        ]
        rows += found
        if found:
            half = min(found, key=lambda row: abs(row["kept"] - 0.5))["accuracy"]
            told.append((group.label, f"reaches {half:.3f} when it decides half of the rows"))
    if not rows:
        return []
    cues = _cues(groups)
    share = axis("kept", "share of the rows that it decides", axis={"format": "%"}, **UNIT)
    where = {"x": share, "y": axis("accuracy", "accuracy")}
    marks = cues.points(where, tooltip(["run"], ["kept", "accuracy"]), filled=True, size=30)
    alt = f"Accuracy against the share of rows that the model decides. {ending(told)}."
    text = "Rows of the lowest entropy are decided first, the rest go to a person."
    return [figure("rejection", "Leaving the least certain to a person", text, alt, rows, [cues.line(where), marks])]


def mixing(groups: Sequence[Group]) -> list[Figure]:
    """R-hat and effective sample size of every client's random effects, of methods that have chains."""
    rows: list[Row] = []
    some = [group for group in groups if group.first.effects is not None]
    for group in some:
        found = group.first.effects
        assert found is not None
        for k, client in enumerate(found.clients):
            for i, effect in enumerate(found.names):
                rhat, ess = finite(found.rhat[k, i]), finite(found.ess[k, i])
                if rhat is not None and ess is not None:
                    rows.append({"run": group.label, "client": client, "effect": effect, "R-hat": rhat, "ESS": ess})
    if not rows:
        return []
    where = {"x": axis("ESS", "effective sample size", zero=True), "y": axis("R-hat", "R-hat")}
    tip = [*tooltip(["run", "client", "effect"], ["R-hat"], ".4f"), *tooltip([], ["ESS"], ".0f")]
    layers = [rule(1.01, "y"), rule(400, "x"), _cues(some).points(where, tip, size=40)]
    most, least = max(row["R-hat"] for row in rows), min(row["ESS"] for row in rows)
    alt = f"R-hat against effective sample size: the largest R-hat is {most:.3f}, the smallest sample size {least:.0f}."
    text = (
        "Chains that mixed lie below 1.01 and right of 400 (dotted lines); a mark is one random effect of one client."
    )
    return [figure("mixing", "Did the chains mix?", text, alt, rows, layers)]


def _thinned(rows: list[Row], name: str) -> tuple[list[Row], str]:
    """At most `MOST_POINTS` of the rows, evenly along a column with both ends, and the words that say so."""
    if len(rows) <= MOST_POINTS:
        return rows, ""
    rows = sorted(rows, key=lambda row: row[name])
    chosen = np.linspace(0, len(rows) - 1, MOST_POINTS).round().astype(int)
    return [rows[i] for i in chosen], f" Of {len(rows)} marks {MOST_POINTS} are drawn, evenly chosen."


def _personal(group: Group, name: str) -> Any:
    """Return a table of the personal models' uncertainty; an empty one where there is none."""
    return getattr(group.personal, name, {})


def _cues(groups: Sequence[Group]) -> Cues:
    return Cues([group.label for group in groups])


def _title(name: str) -> str:
    return {"rmse": "RMSE", "accuracy": "Accuracy"}[name]
