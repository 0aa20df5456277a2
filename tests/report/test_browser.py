"""The report in a real browser: drawn, silent, alone, sorted and filtered."""

import json
import os

import pytest

from priory import report
from tests.browser import CHROMIUM, browser

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; Debian has it as the package chromium"),
    pytest.mark.xdist_group("command line"),
]
HOSTILE = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"
ROWS = "[...document.querySelectorAll('#clients-table tbody tr')]"


@pytest.fixture(scope="module")
def tab():
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def real(comparison, tmp_path_factory):
    return report.write([comparison], tmp_path_factory.mktemp("report") / "report.html")


def test_ci_does_not_skip_this():
    assert CHROMIUM or "CI" not in os.environ


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_figure_is_drawn_in_silence_and_without_the_network(tab, real, dark):
    tab.open(real, dark=dark)
    num = len(json.loads(tab.run("document.getElementById('specs').textContent")))
    assert tab.run("document.documentElement.dataset.drawn") == f"{num} of {num}"
    assert tab.run("document.querySelectorAll('.plot svg.marks').length") == num
    # A figure has marks, and no coordinate in it went wrong.
    drawn = ".mark-symbol.role-mark path, .mark-line.role-mark path"
    empty = f"[...document.querySelectorAll('.plot svg.marks')].filter(svg => !svg.querySelector('{drawn}'))"
    assert tab.run(f"{empty}.map(svg => svg.closest('.plot').id)") == []
    assert not tab.run("document.querySelector('main').innerHTML.includes('NaN')")
    assert tab.run("[...document.querySelectorAll('svg.marks')].every(svg => svg.getAttribute('aria-label'))")
    assert tab.complaints() == []
    assert tab.requests() == [real.resolve().as_uri()]


def test_text_of_figures_can_be_read_on_light_and_on_dark_paper(tab, real):
    def contrast(dark: bool) -> float:
        tab.open(real, dark=dark)
        of = "getComputedStyle(document.querySelector('{}')).{}"
        inks = [of.format(".plot .role-axis-label text", "fill"), of.format("body", "backgroundColor")]
        ink, paper = (luminance(tab.run(one)) for one in inks)
        return (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05)

    assert contrast(dark=False) > 7  # WCAG 2, level AAA
    assert contrast(dark=True) > 7


def luminance(colour: str) -> float:
    """Of an rgb(...) colour, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def column(tab, name: str) -> int:
    heads = tab.run("[...document.querySelectorAll('#clients-table thead th')].map(th => th.textContent)")
    return heads.index(name)


def test_the_table_of_clients_sorts_numbers_as_numbers_both_ways_with_the_unknown_last(tab, real):
    tab.open(real)
    place = column(tab, "global model")  # a newcomer has none
    values = f"{ROWS}.map(tr => tr.cells[{place}].dataset.value ?? null)"
    head = f"document.querySelectorAll('#clients-table thead th')[{place}]"
    for direction in ("ascending", "descending"):
        tab.run(f"{head}.querySelector('button').click()")
        assert tab.run(f"{head}.getAttribute('aria-sort')") == direction
        found = tab.run(values)
        known = [float(value) for value in found if value is not None]
        assert known == sorted(known, reverse=direction == "descending")
        assert 0 < len(known) < len(found)
        assert found[len(known) :] == [None] * (len(found) - len(known))


def test_names_sort_with_2_before_10(tab, written, tmp_path):
    tab.open(report.write([written("run", clients=("ward 10", "ward 2"))], tmp_path / "report.html"))
    tab.run("document.querySelector('#clients-table thead button').click()")
    assert tab.run(f"{ROWS}.map(tr => tr.cells[0].textContent)") == ["ward 2", "ward 10"]


def test_the_table_of_clients_filters_by_name_and_by_run_and_counts(tab, real):
    def type_in(field: str, text: str) -> list[list[str]]:
        tab.run(f"""(() => {{ const field = document.getElementById('{field}'); field.value = {json.dumps(text)};
                     field.dispatchEvent(new Event('input', {{bubbles: true}})); }})()""")
        return tab.run(
            f"{ROWS}.filter(tr => tr.offsetParent).map(tr => [tr.cells[0].textContent, tr.cells[1].textContent])"
        )

    tab.open(real)
    everyone = type_in("filter-client", "")
    runs = {run for _, run in everyone}
    assert len(runs) == 2
    name = everyone[0][0]
    assert type_in("filter-client", name) == [row for row in everyone if name in row[0]]
    run = sorted(runs)[0]
    both = type_in("filter-run", run)
    assert both == [row for row in everyone if name in row[0] and row[1] == run]
    assert tab.run("document.getElementById('filter-count').textContent") == f"{len(both)} of {len(everyone)} rows"
    assert type_in("filter-client", "nobody") == []


def test_names_from_the_data_do_not_act(tab, written, tmp_path):
    path = written("run", clients=(HOSTILE, "ward 2"), note=HOSTILE, extra={"clusters": {HOSTILE: 0}})
    tab.open(report.write([path], tmp_path / "report.html"))
    assert tab.run("document.title").startswith("Priory")
    assert HOSTILE in tab.run(f"{ROWS}.map(tr => tr.cells[0].textContent)")
    assert tab.complaints() == []


def test_a_click_on_a_name_in_the_legend_fades_the_others(tab, real):
    tab.open(real)
    marks = "[...document.querySelectorAll('#plot-rounds-nll .mark-symbol.role-mark path')]"
    faded = f"{marks}.filter(path => path.getAttribute('opacity') < 0.5)"
    assert tab.run(f"{faded}.length") == 0
    box = tab.run(
        "(() => { const r = document.querySelector('#plot-rounds-nll .role-legend-label text'); r.scrollIntoView();"
        " const b = r.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        tab.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
    assert tab.run(f"new Promise(done => setTimeout(() => done({faded}.length), 200))") > 0


def test_a_narrow_page_does_not_scroll_sideways(tab, real):
    tab.open(real, width=400)
    assert tab.run("document.documentElement.scrollWidth") <= 400


def test_printing_unfolds_what_is_folded_and_folds_it_again(tab, real):
    tab.open(real)
    folded = "document.querySelectorAll('main > section > details:not([open])').length"
    before = tab.run(folded)
    assert before > 0
    tab.run("dispatchEvent(new Event('beforeprint'))")
    assert tab.run(folded) == 0
    tab.run("dispatchEvent(new Event('afterprint'))")
    assert tab.run(folded) == before


def test_a_page_that_complains_or_asks_for_more_would_be_noticed(tab, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<html data-drawn='0 of 0'><img src='http://127.0.0.1:9/x.png'><script>console.warn('oh'); nowhere();</script>"
    )
    tab.open(bad)
    assert any("oh" in one for one in tab.complaints())
    assert any("nowhere" in one for one in tab.complaints())
    assert "http://127.0.0.1:9/x.png" in tab.requests()
