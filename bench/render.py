"""Writes the tables of `docs/benchmarks.md` from `bench/results/`, and draws the figure of growth.

    python bench/render.py            rewrite the document and docs/scaling.svg
    python bench/render.py --check    say whether both are what the results make of them

A table stands between `<!-- name -->` and `<!-- /name -->`; everything else in the document is left alone. A family
that was never measured says so in its place.
"""

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from measure import describe, is_idle, load

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
FIGURE = DOCUMENT.with_name("scaling.svg")
RACES = ("fedavg", "cnn", "overhead", "fedhb", "pfedbayes", "sfedbayes", "langevin", "fedvi", "clients")
SIMULATORS = ("flower", "fedjax", "pfl")
SCALING = (
    "clients", "clients-stateful", "cohort", "parameters", "samples", "clusters-cfedbayes", "clusters-fedhb-mixture",
    "devices",
)  # fmt: skip
SLACK = 0.1  # of an exponent
MISSING = "not measured yet"
PICTURE = "![Time of a round over size, both relative to the smallest, on logarithmic axes](scaling.svg)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = rendered(DOCUMENT.read_text())
    if options.check:
        same = text == DOCUMENT.read_text() and figure_is_current()
        raise SystemExit(0 if same else "the document is not what the results make of it; run python bench/render.py")
    DOCUMENT.write_text(text)
    if not figure_is_current():
        draw(FIGURE)


def rendered(text: str) -> str:
    """The document with every table as the results have it."""
    for name, table in TABLES.items():
        text, times = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda match, table=table: f"{match[1]}\n{table()}\n\n{match[2]}",
            text,
            flags=re.DOTALL,
        )
        if times != 1:
            raise SystemExit(f"{DOCUMENT} has {times} places <!-- {name} --> … <!-- /{name} -->, and needs one")
    return text


def races() -> str:
    """Figures against the aims."""
    return _ratios(RACES, with_aim=True)


def simulators() -> str:
    """Figures against other simulators."""
    return _ratios(SIMULATORS, with_aim=False)


def _ratios(names: tuple[str, ...], with_aim: bool) -> str:
    found = {name: load(name) for name in names}
    lines = ["| work | figure | aim |", "|---|---|---|"] if with_aim else ["| work | figure |", "|---|---|"]
    for name, kept in found.items():
        if kept is None:
            lines.append(f"| {name} | {MISSING} |" + (" |" if with_aim else ""))
        for row in kept["rows"] if kept else ():
            figure = f"**{row['ratio']:.2f} times** {row['words']}{_times(row)}"
            lines.append(f"| {row['work']} | {figure} |" + (f" {row['aim']} |" if with_aim else ""))
    return _blocks(lines, _machines(found))


def _times(row: dict[str, Any]) -> str:
    ours, theirs, note = row["ours_seconds"], row["theirs_seconds"], row.get("note")
    times = [f"{_seconds(ours)} against {_seconds(theirs)}"] if ours is not None else []
    return f" ({'; '.join([*times, *([note] if note else [])])})" if times or note else ""


def scaling() -> str:
    """One row a family: sizes, times, exponent, memory."""
    lines = ["| grows | fixed | ms a round | exponent | peak RSS, GB |", "|---|---|---|---|---|"]
    found = {name: load(f"scaling-{name}") for name in SCALING}
    for name, kept in found.items():
        if kept is None:
            lines.append(f"| {name} | {MISSING} | | | |")
            continue
        points = kept["points"]
        sizes = f"{kept['what']} = {', '.join(_count(point['size']) for point in points)}"
        times = ", ".join(f"{1e3 * point['seconds']:.3g}" for point in points)
        peaks = [point["peak_rss_bytes"] / 1e9 for point in points]
        memory = f"{min(peaks):.2f} to {max(peaks):.2f}"
        if kept["limit_gb"] is not None and max(peaks) > kept["limit_gb"]:
            memory = f"**{memory}**, at most {kept['limit_gb']:g} wanted"
        slope = f"{kept['exponent']:.2f}"
        if kept["exponent"] > kept["at_most"] + SLACK:
            slope = f"**{slope}**, {kept['at_most']:.0f} would do"
        lines.append(f"| {sizes} | {kept['fixed']} | {times} | {slope} | {memory} |")
    beside = [
        f"With {_count(kept['points'][-1]['size'])} clients ({kept['fixed'].partition(',')[0]}) the federation is "
        f"built in {kept['points'][-1]['build_seconds']:.1f} s and everybody evaluated in "
        f"{kept['points'][-1]['evaluate_seconds']:.1f} s."
        for name, kept in found.items()
        if kept is not None and name.startswith("clients")
    ]
    return _blocks(lines, "\n".join(beside), PICTURE if figure_rows() else "", _machines(found))


def floor() -> str:
    """One row a method: the share of products, and the three largest others."""
    kept = load("floor")
    if kept is None:
        return MISSING.capitalize() + "."
    lines = ["| method | products | GFLOP/s in them | the three largest other shares |", "|---|---|---|---|"]
    for row in kept["rows"]:
        if "failed" in row:
            lines.append(f"| `{row['method']}` | not measured | | {row['failed']} |")
            continue
        others = "; ".join(f"{share:.0%} {label}" for label, share in row["others"])
        lines.append(f"| `{row['method']}` | {row['products']:.0%} | {row['gflops']:.0f} | {others} |")
    text = f"{kept['work']}; a 512x512 product runs at {kept['gemm_gflops']:.0f} GFLOP/s on a core."
    return _blocks(lines, text[0].upper() + text[1:], _machines({"floor": kept}))


def startup() -> str:
    """Seconds until the command line answers."""
    kept = load("startup")
    if kept is None:
        return MISSING.capitalize() + "."
    rows = [f"| {row['work']} | {row['seconds']:.2f} s |" for row in kept["rows"]]
    return _blocks(["| command | time |", "|---|---|", *rows], _machines({"startup": kept}))


TABLES = {"races": races, "simulators": simulators, "scaling": scaling, "floor": floor, "startup": startup}


def _machines(found: dict[str, dict[str, Any] | None]) -> str:
    """What was measured where, a sentence for each machine, and which of it was busy."""
    by_words: dict[str, list[str]] = {}
    for name, kept in found.items():
        if kept is not None:
            busy = "" if is_idle(kept["machine"]) else "; **the machine was busy, so times are not to be trusted**"
            by_words.setdefault(describe(kept["machine"]) + busy, []).append(name)
    return "\n".join(
        f"Measured on {words}{f': {_listing(names)}' if len(by_words) > 1 else ''}."
        for words, names in by_words.items()
    )


def _blocks(table: list[str], *paragraphs: str) -> str:
    """A table and what is said below it, without what is empty."""
    return "\n\n".join(["\n".join(table), *filter(None, paragraphs)])


def _listing(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _seconds(value: float) -> str:
    return f"{1e6 * value:.1f} µs" if value < 1e-3 else f"{1e3 * value:.1f} ms" if value < 10 else f"{value:.1f} s"


def _count(size: int) -> str:
    power = len(str(size)) - 1
    return (
        f"10{str(power).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
        if size == 10**power >= 1000
        else str(size)
    )


def figure_rows() -> list[dict[str, Any]]:
    """What is drawn: time of a round over size, both as multiples of the smallest."""
    rows = []
    for name in SCALING:
        kept = load(f"scaling-{name}")
        if kept is not None and name != "devices":
            first = kept["points"][0]
            title = f"{name}, exponent {kept['exponent']:.2f}"
            rows += [
                {"family": title, "size": point["size"] / first["size"], "time": point["seconds"] / first["seconds"]}
                for point in kept["points"]
            ]
    return rows


def figure_is_current() -> bool:
    """Whether the figure was drawn from these results."""
    return not figure_rows() or (FIGURE.exists() and _mark() in FIGURE.read_text())


def _mark() -> str:
    return f"<!-- {hashlib.sha256(json.dumps(figure_rows()).encode()).hexdigest()[:16]} -->"


def draw(path: Path) -> None:
    """Write the figure: log over log, so that a power is a line; grey is linear growth."""
    import vl_convert

    rows = figure_rows()
    end = min(max(row["size"] for row in rows), max(row["time"] for row in rows))

    def along(field: str, title: str) -> dict[str, Any]:
        return {"field": field, "type": "quantitative", "scale": {"type": "log"}, "title": title}

    axes = {"x": along("size", "size, smallest = 1"), "y": along("time", "time of a round, first = 1")}
    legend = {"orient": "bottom", "columns": 2, "labelLimit": 0}
    by_family = {"field": "family", "type": "nominal", "title": None, "sort": None, "legend": legend}
    spec = {
        "width": 560,
        "height": 320,
        "background": "white",
        "layer": [
            {
                "data": {"values": [{"size": 1, "time": 1}, {"size": end, "time": end}]},
                "mark": {"type": "line", "color": "#8A8A8A", "strokeDash": [4, 4]},
                "encoding": axes,
            },
            {"data": {"values": rows}, "mark": "line", "encoding": {**axes, "color": by_family}},
            {
                "data": {"values": rows},
                "mark": {"type": "point", "filled": True, "size": 60},
                "encoding": {**axes, "color": by_family, "shape": {**by_family, "legend": None}},
            },
        ],
    }
    path.write_text(vl_convert.vegalite_to_svg(spec, vl_version="5.20") + f"\n{_mark()}\n")


if __name__ == "__main__":
    main()
