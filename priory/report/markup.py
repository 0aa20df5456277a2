"""Pieces of HTML: whatever is not marked as HTML already is escaped."""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from priory.core.text import printable
from priory.report.vega import Figure, finite
from priory.stats import Estimate

EMPTY = frozenset({"meta", "input", "br"})


class Html(str):
    """Text that is HTML, and safe; any other text is escaped when it is put into an element."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: Any) -> Html:
    """An element; `class_` stands for class and `data_value` for data-value, None leaves an attribute out."""
    words = [tag]
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words.append(f'{name}="{escaped(value)}"')
    opening = Html(f"<{' '.join(words)}>")
    return opening if tag in EMPTY else Html(f"{opening}{join(children)}</{tag}>")


def join(children: Iterable[str]) -> Html:
    """The pieces one after another."""
    return Html("".join(child if isinstance(child, Html) else escaped(child) for child in children))


def escaped(value: Any) -> str:
    """The text of a value: it is never markup, and control characters and changes of direction are visible."""
    return html.escape(printable(str(value)))


def note(text: str, kind: str = "note") -> Html:
    """A paragraph beside the numbers: `note`, `missing` (what is not there) or `warning`."""
    return element("p", text, class_=kind)


def number(value: int | float | None) -> str:
    """Three decimals, fewer where the number is large or whole; a dash where it is not known."""
    known = finite(value)
    if known is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{known:.3f}" if abs(known) < 1000 else f"{known:.3g}"


def cell(value: Any) -> Html:
    """A cell of a table: text, a number, or an estimate with its standard error; numbers sort as numbers."""
    if isinstance(value, str):
        return element("td", value)
    if isinstance(value, Estimate):
        shown = number(value.value)
        if value.error is not None:
            shown = f"{shown} ± {number(value.error)}"
        return element("td", shown, class_="number", data_value=finite(value.value))
    return element("td", number(value), class_="number", data_value=finite(value))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], caption: str, **attributes: Any) -> Html:
    """A table that scrolls sideways where it is wider than the page; the first cell of a row is its name."""
    filled = list(rows)
    words = {0, *(place for row in filled for place, value in enumerate(row) if isinstance(value, str))}
    heads = [
        element("th", title, scope="col", class_=None if i in words else "number") for i, title in enumerate(header)
    ]
    head = element("tr", *heads)
    body = [element("tr", element("th", row[0], scope="row"), *(cell(value) for value in row[1:])) for row in filled]
    made = element("table", element("caption", caption), element("thead", head), element("tbody", *body), **attributes)
    return element("div", made, class_="wide", tabindex="0", role="region", aria_label=caption)


def figures(drawn: Sequence[Figure]) -> Html:
    """Figures side by side."""
    return element("div", *map(figure, drawn), class_="figures") if drawn else Html("")


def figure(drawn: Figure) -> Html:
    """The place of a figure: the page's script draws it, and its text stands there without one."""
    plot = element("div", class_="plot", id=f"plot-{drawn.name}", role="img", aria_label=drawn.alt)
    caption = element("figcaption", element("strong", drawn.title), " ", drawn.text)
    return element("figure", plot, caption)


def embedded(name: str, value: Any) -> Html:
    """A value as JSON that the page's script reads; nothing in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return element("script", Html(text.replace("<", "\\u003c")), type="application/json", id=name)


def script(code: str) -> Html:
    """JavaScript in the page; a closing tag in one of its strings is written so that it closes nothing."""
    return element("script", Html(code.replace("</script", "<\\/script").replace("<!--", "<\\!--")))
