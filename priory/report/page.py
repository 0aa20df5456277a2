"""The page: sections, figures, styles and scripts in one HTML file that asks the network for nothing."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from priory.core.errors import UsageError
from priory.core.files import write_atomically
from priory.engine import Run
from priory.report import records
from priory.report.clients import clients
from priory.report.inside import cost, inside, settings
from priory.report.markup import Html, element, embedded, note, script
from priory.report.measure import foreign, measured
from priory.report.newcomers import certificates
from priory.report.numbers import Group, group
from priory.report.sections import Section, calibration, convergence, doubt, headline
from priory.report.tables import is_regression

# Nothing may be loaded, whatever the page holds; Vega compiles its expressions, hence 'unsafe-eval'.
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
LICENCE = (
    "Figures are drawn by Vega, Vega-Lite and Vega-Embed (University of Washington Interactive Data Lab, BSD 3-clause)."
)

MOST_TITLE = 80  # characters


def write(
    places: Sequence[Path | str],
    out: Path | str,
    ood: str | None = None,
    runs: Mapping[Path, Run] | None = None,
    told: Callable[[str], None] = lambda line: None,
    trust_code: bool = False,
) -> Path:
    """The file, after a report of the runs was written to it; one that is there stays until the new one is whole.

    Args:
        places: Run directories, or directories that hold some, such as a comparison.
        ood: Foreign inputs that the personal models are asked about: a data set, a .npz or a .csv file.
        runs: Those that are at hand, by directory, and need not be loaded to measure what their directory lacks.
        told: Given a line about what takes time or is left out.
        trust_code: As for `priory.load`, where a run has to be loaded; one that is not trusted is not measured.
    """
    path = Path(out)
    check_drawing()
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a directory" if path.is_dir() else "lies in no directory that exists"
        raise UsageError(f"out={path} {what}; name a file such as report.html.")
    found, unfinished = records.find(places)
    groups = group([records.read(place) for place in found])
    inputs = None if ood is None else foreign(ood)
    left_out = [
        f"{place} is not finished and is left out; end it with `priory resume {place}`." for place in unfinished
    ]
    for line in left_out:
        told(line)
    known = {} if runs is None else {place.resolve(): run for place, run in runs.items()}
    ready = []
    for one in groups:
        first = measured(one.first, known.get(one.first.path.resolve()), inputs, told, trust_code)
        ready.append(Group(one.label, (first, *one.records[1:])))
    try:
        write_atomically(path, render(ready, left_out))
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another file with --out.") from None
    return path


def check_drawing() -> None:
    """Raises `UsageError` where the library that figures need is not installed."""
    if find_spec("vl_convert") is None:
        raise UsageError(
            "A report needs vl-convert-python to draw its figures; install it with: pip install 'priory[report]'."
        )


def render(groups: Sequence[Group], notices: Sequence[str] = ()) -> str:
    """The HTML of a report."""
    regression = is_regression([record.summary for one in groups for record in one.records])
    sections = [
        headline(groups, regression),
        convergence(groups, regression),
        calibration(groups, regression),
        clients(groups, regression),
        doubt(groups, regression),
        certificates(groups),
        inside(groups, regression),
        cost(groups),
        settings(groups),
    ]
    sections = [section for section in sections if section.body]
    title = ", ".join(one.label for one in groups)
    title = title if len(title) <= MOST_TITLE else f"{len(groups)} kinds of run"
    specs = {figure.name: figure.spec for section in sections for figure in section.figures}
    return _whole(
        f"Priory: {title}",
        element(
            "header", element("h1", f"Priory: {title}"), *_about(groups), *(note(one, "warning") for one in notices)
        ),
        element(
            "nav",
            *(element("a", section.title, href=f"#{section.name}") for section in sections),
            aria_label="Sections",
        ),
        element("noscript", note("Figures and sorting need JavaScript; all numbers of the tables are here without.")),
        element("main", *map(_section, sections)),
        element("footer", note(LICENCE)),
        embedded("specs", specs),
        script(_vega()),
        script(_resource("page.js")),
    )


def document(title: str, body: Sequence[Html]) -> str:
    """The HTML of a page in the dress of a report, without figures."""
    return _whole(title, element("header", element("h1", title)), element("main", *body))


def _whole(title: str, *body: Html) -> str:
    """A page that loads nothing."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(_resource("page.css"))),
    )
    return f"<!doctype html>\n{element('html', head, element('body', *body), lang='en')}\n"


def _section(section: Section) -> Html:
    return element("section", element("h2", section.title), section.body, id=section.name)


def _about(groups: Sequence[Group]) -> list[Html]:
    """What the runs were made of, and a warning where their scores do not compare."""
    data: dict[str, None] = {}
    for one in groups:
        spec = one.first.manifest["data"]
        words = [str(spec.get("data", "own data"))]
        words += [f"partition {spec['partition']}"] if "partition" in spec else []
        words += [f"{spec['clients']} clients"] if "clients" in spec else []
        data[", ".join(words)] = None
    versions = {str(one.first.manifest.get("environment", {}).get("priory", "unknown")): None for one in groups}
    num = sum(len(one.records) for one in groups)
    runs = f"{num} run{'' if num == 1 else 's'}"
    text = f"{'; '.join(data)}. {runs}, made with priory {', '.join(versions)}."
    sums = {one.first.manifest.get("environment", {}).get("data_checksum") for one in groups}
    found = [element("p", text)]
    if len(sums) > 1:
        found.append(
            note("These runs were made on different data or splits, so their scores do not compare.", "warning")
        )
    return found


@cache
def _resource(name: str) -> str:
    return files("priory.report").joinpath(name).read_text()


@cache
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
