"""Names in data that are escape sequences, markup, formulas or HTML, through every command that shows them."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from priory import report
from priory.cli import main
from priory.report.markup import embedded, table
from tests.cli.conftest import patients

pytestmark = pytest.mark.xdist_group("command line")

ESCAPE, MARKUP, TURNED, FORMULA = "\x1b[2Jgone", "[bold]loud[/bold]", "\u202eexe.txt", "=cmd|' /C calc'!A0"
SCRIPT, LINE = "</script><script>alert(1)</script>", "one\ntwo"
CLIENTS = (ESCAPE, MARKUP, TURNED, FORMULA, SCRIPT, LINE)
CLASSES = (FORMULA, "@no")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """A run on a table whose clients, classes and columns have hostile names."""
    place = tmp_path_factory.mktemp("hostile")
    frame = patients()
    frame["ill"] = np.where(frame.ill == "yes", *CLASSES)
    frame["site"] = np.array(CLIENTS)[np.arange(120) % 6]
    frame = frame.rename(columns={"age": f"age{ESCAPE}"})
    frame["note"] = np.array(["-1", "+a", "=b"])[np.arange(120) % 3]
    frame.drop(columns="cost").to_csv(place / "table.csv", index=False)
    frame.drop(columns=["cost", "ill", "site"]).assign(shift=-1.5).to_csv(place / "new.csv", index=False)
    return place


@pytest.fixture
def run(hostile, capsys) -> str:
    """The directory of the run, made when it is first asked for."""
    flags = ["--data", str(hostile / "table.csv"), "--target", "ill", "--client", "site", "--drop", "note"]
    if not (hostile / "run").exists():
        flags += ["--validation", "0.3", "--model", "linear", "--rounds", "1", "--out", str(hostile / "run")]
        assert main(["run", "fedavg", *flags]) == 0
        said = capsys.readouterr()
        assert_harmless(said.out + said.err)
        assert "age\\x1b[2Jgone" in said.out
    return str(hostile / "run")


def assert_harmless(said: str) -> None:
    assert not CONTROL.search(said)


def test_clients_are_listed_with_their_names_escaped_and_one_on_each_line(run, capsys):
    assert main(["clients", run]) == 0
    said = capsys.readouterr().out
    assert_harmless(said)
    lines = said.splitlines()[1:]
    assert len(lines) == len(CLIENTS)
    for name in ("\\x1b[2Jgone", MARKUP, "\\u202eexe.txt", FORMULA, SCRIPT, "one\\ntwo"):
        assert any(line.startswith(name) for line in lines)


@pytest.mark.parametrize("name", CLIENTS)
def test_an_error_that_names_a_hostile_name_is_one_harmless_line(name, run, hostile, capsys):
    argv = ["predict", run, "--client", f"{name}?", "--data", str(hostile / "new.csv"), "--out", "x.csv"]
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert_harmless(line)


def test_a_file_name_with_an_escape_sequence_is_shown_escaped(capsys):
    assert main(["run", "fedavg", "--data", f"{ESCAPE}.csv", "--target", "y"]) == 2
    said = capsys.readouterr().err
    assert_harmless(said)
    assert "\\x1b[2Jgone.csv" in said


def test_predictions_as_csv_hold_no_formula_and_numbers_as_they_are(run, hostile, capsys):
    argv = ["predict", run, "--client", ESCAPE, "--data", str(hostile / "new.csv"), "--out", "x.csv"]
    assert main([*argv, "--keep", "note", "shift"]) == 0
    assert_harmless(capsys.readouterr().out)
    with Path("x.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    assert {value[:2] for value in (*columns["label"], *columns["set"]) if value} <= {"'=", "'@"}
    assert set(columns["note"]) == {"-1", "'+a", "'=b"}
    assert set(columns["shift"]) == {"-1.5"}


def test_other_formats_keep_labels_as_they_are(run, hostile):
    for ending in (".npz", ".parquet"):
        argv = ["predict", run, "--client", ESCAPE, "--data", str(hostile / "new.csv"), "--out", f"x{ending}"]
        assert main([*argv, "--keep", "note", "shift"]) == 0
    assert set(np.load("x.npz")["label"]) <= set(CLASSES)
    assert set(pd.read_parquet("x.parquet")["label"]) <= set(CLASSES)


def test_predictions_of_a_newcomer_hold_no_formula(run, hostile):
    table = pd.read_csv(hostile / "table.csv").drop(columns=["site", "note"])
    table.to_csv("late.csv", index=False)
    table.drop(columns="ill").to_csv("rows.csv", index=False)
    assert main(["onboard", run, "--data", "late.csv", "--predict", "rows.csv", "--test", "0"]) == 0
    with next(Path(run).glob("onboarded/*/predictions.csv")).open(newline="") as file:
        _, *rows = csv.reader(file)
    assert {row[0] for row in rows} <= {f"'{name}" for name in CLASSES}


def test_the_report_shows_names_as_text(run):
    assert main(["report", run, "--out", "report.html"]) == 0
    text = Path("report.html").read_text()
    assert "<script>alert" not in text
    assert text.count("<script") == text.count("</script>") == 3  # data of the figures, Vega, and the page's own
    assert "\x1b" not in text
    assert TURNED not in text
    assert "\\u202eexe.txt" in text


@pytest.mark.parametrize("name", [SCRIPT, "<!--", "<img src=x onerror=alert(1)>", "&lt;", '"><b>', ESCAPE, TURNED])
def test_no_name_ends_the_element_that_it_is_in(name):
    cells = table(["client"], [[name, name]], name, data_name=name)
    assert re.sub(r"</?(div|table|caption|thead|tbody|tr|th|td)\b[^<>]*>", "", cells).count("<") == 0
    assert not CONTROL.search(cells)
    data = embedded("specs", {name: name})
    inner = data.removeprefix('<script type="application/json" id="specs">').removesuffix("</script>")
    assert "<" not in inner
    assert json.loads(inner) == {name: name}


def test_a_table_in_the_terminal_interprets_no_markup(capsys):
    summary = {"extra": {"rejected": {MARKUP: 1, ESCAPE: 2}}, "communication": {"down_bytes": None}, "seconds": {}}
    for line in report.run_lines(summary | {"rounds": 1}):
        report.console().print(line)
    said = capsys.readouterr().out
    assert MARKUP in said
    assert_harmless(said)
