"""The pieces that all figures are made of: Vega-Lite encodings in which colour is never the only cue."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Layer = dict[str, Any]
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


def figure(name: str, title: str, text: str, alt: str, rows: Sequence[Row], layers: Sequence[Layer]) -> Figure:
    """Return the figure of the rows, drawn in these layers, as wide as the page allows."""
    spec = {
        "description": alt,
        "width": "container",
        "height": HEIGHT,
        "data": {"values": list(rows)},
        "layer": list(layers),
    }
    return Figure(name, title, text, alt, spec)


def tooltip(words: Sequence[str], numbers: Sequence[str], form: str = ".3f") -> list[Layer]:
    """Return the encoding of what is shown of a mark under the pointer."""
    return [*({"field": field} for field in words), *({"field": field, "format": form} for field in numbers)]


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


class Cues:
    """How runs are told apart: lines by colour, points by colour and shape; a click in the legend chooses one."""

    def __init__(self, labels: Sequence[str]) -> None:
        legend = {"title": None, "orient": "bottom"} if len(labels) > 1 else None

        def cue(values: Sequence[str]) -> Layer:
            scale = {"domain": list(labels), "range": [values[i % len(values)] for i in range(len(labels))]}
            return {"field": "run", "type": "nominal", "scale": scale, "legend": legend}

        self.colour, self.shape = {"color": cue(COLOURS)}, {"shape": cue(SHAPES)}
        self.lines: Layer = self.colour if legend is None else {**self.colour, "opacity": FADED}
        click = {"name": "chosen", "select": {"type": "point", "fields": ["run"]}, "bind": "legend"}
        self._click: Layer = {} if legend is None else {"params": [click]}

    def line(self, where: Layer, mark: Any = "line") -> Layer:
        """Return a layer of lines, or of another mark that has no shape."""
        return {"mark": mark, "encoding": {**where, **self.lines}}

    def points(self, where: Layer, tip: list[Layer], **mark: Any) -> Layer:
        """Return a layer of points."""
        encoding = {**self.lines, **self.shape, **where, "tooltip": tip}
        return {"mark": {"type": "point", **mark}, "encoding": encoding, **self._click}


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
