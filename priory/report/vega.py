"""The pieces that all figures are made of: Vega-Lite encodings in which colour is never the only cue."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
HEIGHT = 240
# Okabe and Ito's palette without its yellow and black, which vanish on white and on dark paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A")
# One fewer than the colours, so that no pair of the two comes back before 42 runs.
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
FADED = {"condition": {"param": "chosen", "value": 1}, "value": 0.12}  # a click in the legend fades the others
DIAGONAL = {
    "data": {"values": [{"at": 0}, {"at": 1}]},
    "mark": {"type": "line", "color": "currentColor", "strokeDash": [2, 3], "strokeWidth": 1},
    "encoding": {"x": {"field": "at", "type": "quantitative"}, "y": {"field": "at", "type": "quantitative"}},
}


@dataclass(frozen=True)
class Figure:
    """One drawing.

    Attributes:
        name: Unique on a page; letters, digits and dashes.
        title: What it shows, in a few words.
        text: The sentence under it.
        alt: What is to be seen, for who cannot see it.
        spec: Vega-Lite.
    """

    name: str
    title: str
    text: str
    alt: str
    spec: dict[str, Any]


def chart(alt: str, rows: Sequence[Row], layers: Sequence[dict[str, Any]], height: int = HEIGHT) -> dict[str, Any]:
    """A specification of the rows, drawn in these layers, as wide as the page allows."""
    return {
        "description": alt,
        "width": "container",
        "height": height,
        "data": {"values": list(rows)},
        "layer": list(layers),
    }


def axis(field: str, title: str, **options: Any) -> dict[str, Any]:
    """The encoding of a number along an axis; `options` are Vega-Lite's, `zero` is whether the axis has 0."""
    scale = {"zero": options.pop("zero", False), **options.pop("scale", {})}
    if scale.get("type") == "log":
        del scale["zero"]
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, **options}


def rule(value: float, channel: str) -> dict[str, Any]:
    """A thin dashed line at a value of x or y."""
    mark = {"type": "rule", "color": "currentColor", "strokeDash": [2, 3]}
    return {"data": {"values": [{}]}, "mark": mark, "encoding": {channel: {"datum": value}}}


def of_runs(labels: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """How runs are told apart: encodings for lines (colour), for points (colour and shape), and the legend's click."""
    legend = {"title": None, "orient": "bottom"} if len(labels) > 1 else None

    def scale(values: Sequence[str]) -> dict[str, Any]:
        return {"domain": list(labels), "range": [values[i % len(values)] for i in range(len(labels))]}

    colour = {"field": "run", "type": "nominal", "scale": scale(COLOURS), "legend": legend}
    shape = {"field": "run", "type": "nominal", "scale": scale(SHAPES), "legend": legend}
    if legend is None:
        return {"color": colour}, {"color": colour, "shape": shape}, {}
    click = {"params": [{"name": "chosen", "select": {"type": "point", "fields": ["run"]}, "bind": "legend"}]}
    lines = {"color": colour, "opacity": FADED}
    return lines, {**lines, "shape": shape}, click


def finite(value: Any) -> float | None:
    """The number, or None where it is not known."""
    return None if value is None or not math.isfinite(value) else float(value)


def number(value: float | None) -> str:
    """The number in words: three decimals, fewer where it is large."""
    if value is None or not math.isfinite(value):
        return "unknown"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def ending(told: Iterable[tuple[str, str]]) -> str:
    """Runs and what they come to, as the end of a sentence."""
    return "; ".join(f"{label} {what}" for label, what in told)
