"""`priory report`, and `--report` of the commands that end with a run."""

import json
from pathlib import Path

import pytest

from priory import report
from priory.cli import main
from priory.store import UNCERTAINTY, RunDirectory
from tests.cli.conftest import TINY

pytestmark = pytest.mark.xdist_group("command line")


def specs_of(path: str) -> dict:
    text = Path(path).read_text()
    return json.loads(text.partition('id="specs">')[2].partition("</script>")[0])


@pytest.mark.slow  # six commands
def test_a_run_and_a_comparison_end_with_a_report_when_asked(capsys):
    assert main(["run", "fedavg", *TINY, "--report", "--out", "one"]) == 0
    assert "report: one/report.html" in capsys.readouterr().out
    assert RunDirectory("one").read(UNCERTAINTY) is not None  # measured from the run at hand
    assert "reliability-pooled" in specs_of("one/report.html")
    assert main(["compare", "fedavg", "local", *TINY, "--report", "--out", "both"]) == 0
    assert "report: both/report.html" in capsys.readouterr().out
    assert {row["run"] for row in specs_of("both/report.html")["rounds-nll"]["data"]["values"]} == {"fedavg", "local"}
    # A finished run is only loaded, so its report can be had later too.
    Path("one/report.html").unlink()
    assert main(["resume", "one", "--report"]) == 0
    assert Path("one/report.html").exists()
    # The directory of a comparison stands for the runs in it; several places are written here.
    assert main(["report", "both", "--out", "other.html"]) == 0
    assert Path("other.html").read_text() == Path("both/report.html").read_text()
    assert main(["report", "both/local-s0", "one"]) == 0
    assert Path("report.html").exists()


def test_a_failed_attempt_leaves_the_report_that_was_there(made, capsys):
    run = Path(made("local"))
    Path(run, "report.html").write_text("an earlier one")
    summary = Path(run, "summary.json")
    summary.write_text(summary.read_text()[:100])
    capsys.readouterr()
    assert main(["report", str(run)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "summary.json is damaged" in told
    assert Path(run, "report.html").read_text() == "an earlier one"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "holds no run"),
        (["empty"], "holds no run"),
        (["foreign"], "not finished"),
        (["run", "--out", "no/such/report.html"], "lies in no directory"),
        (["run", "--out", "empty"], "is a directory"),
        (["run", "--ood", "missing.npz"], "missing.npz does not exist"),
        (["run", "--ood", "nonsense"], "nonsense"),
    ],
)
def test_what_cannot_be_reported_is_told_in_one_sentence(arguments, sentence, capsys):
    Path("empty").mkdir()
    tables = {"method": {"name": "fedavg"}, "run": {}, "data": {}, "environment": {"data_checksum": "0"}}
    RunDirectory("foreign").create(tables)
    RunDirectory("run").create(tables)
    scores = {"accuracy": 0.5, "nll": 1.0, "clients": {}}
    spent = {"communication": {"down_bytes": 1, "up_bytes": 1}, "seconds": {"train": 1.0}}
    summary = {"method": "fedavg", "rounds": 1, "personal": scores, "global": None, "extra": {}, **spent}
    RunDirectory("run").write_summary(summary, {})
    assert main(["report", *arguments]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1
    assert not list(Path.cwd().rglob("report.html"))


def test_without_the_extra_nothing_is_trained(monkeypatch, capsys):
    monkeypatch.setattr(report.page, "find_spec", lambda name: None)
    for command in (["run", "fedavg"], ["compare", "fedavg"]):
        assert main([*command, *TINY, "--report", "--out", "run"]) == 2
        assert "priory[report]" in capsys.readouterr().err
        assert not Path("run").exists()
