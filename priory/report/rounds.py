"""Figures of how a run went, round by round, from numbers to Vega-Lite."""

from collections.abc import Sequence

from priory.report.numbers import Group, by_round
from priory.report.vega import Cues, Figure, Row, axis, ending, figure, number, tooltip

DASHES = {"personal": [1, 0], "global": [6, 3]}


def convergence(groups: Sequence[Group], regression: bool) -> list[Figure]:
    """Scores of the personal and the global models over rounds: accuracy (or RMSE) and NLL."""
    first = ("rmse", "RMSE") if regression else ("accuracy", "Accuracy")
    found = [_over_rounds(groups, name, title) for name, title in (first, ("nll", "NLL"))]
    return [figure for figure in found if figure is not None]


def _over_rounds(groups: Sequence[Group], name: str, title: str) -> Figure | None:
    rows: list[Row] = []
    told = []
    for group in groups:
        for part in DASHES:
            values = by_round(group, f"{part}.{name}")
            for at, mean in values:
                assert mean.value is not None
                reach = mean.error or 0.0
                ends = {"low": mean.value - reach, "high": mean.value + reach}
                rows.append({"run": group.label, "model": part, "round": at, "value": mean.value, **ends})
            if values:
                told.append((f"{group.label}, {part}", f"ends at {number(values[-1][1].value)}"))
    if not rows:
        return None
    return _lines(f"rounds-{name}", f"{title} over rounds", rows, [group.label for group in groups], title, told)


def density(groups: Sequence[Group]) -> list[Figure]:
    """The share of weights that are not zero, over rounds, of methods that tell it."""
    return _told_over_rounds(groups, "info.density", "density", "Density of the weights", "share of weights not zero")


def budget(groups: Sequence[Group]) -> list[Figure]:
    """The ε of differential privacy that was spent, over rounds."""
    return _told_over_rounds(groups, "epsilon", "epsilon", "Privacy spent", "ε")


def _told_over_rounds(groups: Sequence[Group], field: str, name: str, title: str, unit: str) -> list[Figure]:
    some = {group.label: by_round(group, field) for group in groups}
    some = {label: values for label, values in some.items() if values}
    rows = [
        {"run": label, "model": "personal", "round": at, "value": mean.value, "low": mean.value, "high": mean.value}
        for label, values in some.items()
        for at, mean in values
    ]
    told = [(label, f"ends at {number(values[-1][1].value)}") for label, values in some.items()]
    return [_lines(f"rounds-{name}", title, rows, list(some), unit, told)] if rows else []


def _lines(
    name: str, title: str, rows: Sequence[Row], labels: Sequence[str], unit: str, told: Sequence[tuple[str, str]]
) -> Figure:
    """Lines over rounds, a colour a run and a dash a kind of model, with a band where there are several seeds."""
    cues = Cues(labels)
    models = [part for part in DASHES if any(row["model"] == part for row in rows)]
    dash = {
        "field": "model",
        "type": "nominal",
        "scale": {"domain": models, "range": [DASHES[part] for part in models]},
        "legend": {"title": None, "orient": "bottom"} if len(models) > 1 else None,
    }
    where = {"x": axis("round", "round", axis={"tickMinStep": 1}), "y": axis("value", unit)}
    tip = tooltip(["run", "model", "round"], ["value"], ".4g")
    layers = [cues.line({**where, "strokeDash": dash}), cues.points(where, tip, filled=True, size=40)]
    has_band = any(row["high"] > row["low"] for row in rows)
    if has_band:
        ends = {**where, "y": axis("low", unit), "y2": {"field": "high"}, "detail": {"field": "model"}}
        layers.insert(0, {"mark": {"type": "area", "opacity": 0.18}, "encoding": {**ends, **cues.colour}})
    kinds = "; a solid line is of the clients' own models, a dashed one of the global model" if len(models) > 1 else ""
    band = "; the band is ± one standard error over seeds" if has_band else ""
    text = f"{unit} after each evaluated round{kinds}{band}."
    alt = f"Line chart of {title}. {ending(told)}."
    return figure(name, title, text, alt, rows, layers)
