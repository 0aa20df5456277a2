"""Tables and figures from records of runs."""

import io
import math
import re

import pytest
from rich.console import Console

from priory import methods, report


def a_summary(accuracy: float = 0.9, population: float | None = 0.8, up: int | None = 1200) -> dict:
    def scores(value: float) -> dict:
        spread = {"mean": value, "worst": value - 0.3, "p10": value - 0.2}
        return {"accuracy": value, "nll": 1 - value, "ece": 0.05, "mce": 0.1, "brier": 0.2, "clients": spread}

    return {
        "method": "fedavg",
        "rounds": 3,
        "personal": scores(accuracy),
        "global": None if population is None else scores(population),
        "newcomers": None,
        "communication": {"down_bytes": up, "up_bytes": up},
        "seconds": {"compile": 3.0, "train": 1.0, "evaluate": 0.5},
        "extra": {"rejected": {}},
    }


def shown(table, capsys) -> str:
    report.console().print(table)
    return capsys.readouterr().out


def test_a_paired_difference_loses_what_a_seed_does_to_both():
    easy, hard = 0.95, 0.75
    runs = {"a": [a_summary(easy), a_summary(hard)], "b": [a_summary(easy + 0.02), a_summary(hard + 0.02)]}
    first, second = report.compare(runs)
    assert first["scores"]["personal.accuracy"]["mean"] == pytest.approx(0.85)
    assert first["scores"]["personal.accuracy"]["standard_error"] == pytest.approx(0.1)  # |0.95 − 0.75| / √2 / √2
    paired = second["scores"]["personal.accuracy"]["difference"]
    assert paired["mean"] == pytest.approx(0.02)
    assert paired["standard_error"] == pytest.approx(0.0, abs=1e-12)


def test_one_seed_has_no_standard_error():
    (record,) = report.compare({"a": [a_summary()]})
    assert record["scores"]["personal.accuracy"]["standard_error"] is None


def test_a_method_without_a_global_model_has_a_dash_and_no_difference():
    records = report.compare({"a": [a_summary()], "b": [a_summary(population=None)]})
    assert records[1]["scores"]["global.accuracy"]["mean"] is None
    assert records[1]["scores"]["global.accuracy"]["difference"]["mean"] is None


def test_newcomers_are_compared_and_pooled_data_are_marked_as_a_reference(capsys):
    summaries = {"fedavg": a_summary(), "pooled": a_summary(up=None)}
    summaries["pooled"]["communication"]["down_bytes"] = None
    with_newcomers = {label: [one | {"newcomers": one["personal"]}] for label, one in summaries.items()}
    header, fedavg, pooled, reference = shown(
        report.comparison_tables(report.compare(with_newcomers), 1)[0], capsys
    ).splitlines()[-4:]
    assert "newcomers" in header
    assert (fedavg.split()[0], pooled.split()[0], reference.strip()) == ("fedavg", "pooled", "(reference)")
    without = report.comparison_tables(report.compare({"fedavg": [a_summary()]}), 1)[0]
    assert "newcomers" not in shown(without, capsys)


def test_a_comparison_of_six_methods_and_three_seeds_fits_a_hundred_columns(capsys):
    labels = ["local", "fedavg", "fedprox:mu=0.1,step-size=0.05", "fedrep:head-epochs=5", "ditto:lam=0.3", "pooled"]
    runs = {label: [a_summary(0.9 + 0.01 * seed, up=123_456_789) for seed in range(3)] for label in labels}
    for table in report.comparison_tables(report.compare(runs), 3):
        lines = shown(table, capsys).splitlines()
        assert max(map(len, lines)) <= 100
        assert not any("…" in line for line in lines)


def test_the_table_of_a_run_shows_its_parts_and_only_those(capsys):
    text = shown(report.run_table(a_summary()), capsys)
    rows = [line.split() for line in text.splitlines()[1:]]
    assert [row[0] for row in rows] == ["personal", "global"]
    assert rows[0] == ["personal", "0.900", "0.100", "0.050", "0.200", "0.900", "0.600", "0.700"]


def test_the_ways_in_of_newcomers_have_rows_that_fit_a_hundred_columns(capsys):
    summary = a_summary()
    summary |= dict.fromkeys(("newcomers", "newcomers_unlabelled", "newcomers_global"), summary["personal"])
    lines = shown(report.run_table(summary), capsys).splitlines()
    names = ["personal", "global", "newcomers", "newcomers, unlabelled", "newcomers, no data"]
    assert [line.split("  ")[0] for line in lines[1:]] == names
    assert max(map(len, lines)) <= 100
    assert len(lines) == 6  # nothing wraps


def test_the_table_of_one_newcomer_has_a_row_for_each_way_and_no_spread(capsys):
    scores = {"no data": {"rmse": 2.0, "nll": 1.5, "coverage_90": 0.8}}
    scores |= {"inputs and labels": {"rmse": 1.0, "nll": None, "coverage_90": 0.9}}
    lines = shown(report.ways_table(scores), capsys).splitlines()
    assert lines[0].split() == ["RMSE", "NLL", "coverage", "of", "90", "%"]
    assert [line.split() for line in lines[1:]] == [
        ["no", "data", "2.000", "1.500", "0.800"],
        ["inputs", "and", "labels", "1.000", "–", "0.900"],
    ]


def test_the_table_of_a_regression_has_its_own_scores(capsys):
    summary = a_summary()
    spread = {"mean": 1.0, "worst": 3.0, "p10": 2.0}
    summary |= {"personal": {"rmse": 1.5, "nll": 0.7, "coverage_90": 0.88, "clients": spread}, "global": None}
    text = shown(report.run_table(summary), capsys)
    assert text.splitlines()[-1].split() == ["personal", "1.500", "0.700", "0.880", "1.000", "3.000", "2.000"]
    assert "accuracy" not in text


def test_a_run_without_test_examples_says_so(capsys):
    summary = a_summary() | {"personal": None, "global": None}
    assert "no test examples" in shown(report.run_table(summary), capsys)


def test_bytes_are_rounded_to_their_unit():
    lines = report.run_lines(a_summary(up=19_240))
    assert lines[0] == "19.2 kB down and 19.2 kB up per client and round"


def test_pooled_data_send_no_model():
    assert "one place" in report.run_lines(a_summary(up=None))[0]


def test_clients_that_were_left_out_are_named():
    summary = a_summary() | {"extra": {"rejected": {"ward 3": 2}}}
    assert report.run_lines(summary)[-1] == "left out of rounds, since their updates were not finite: ward 3 (2 rounds)"


def test_reasons_for_leaving_out_are_told_with_their_counts():
    extra = {"rejected": {"ward 3": 2, "ward 4": 1}, "reasons": {"norm": 2, "not finite": 1}}
    line = report.run_lines(a_summary() | {"extra": extra})[-1]
    assert "since their updates were larger than max-norm (2), not finite (1): ward 3 (2 rounds), ward 4" in line


def test_a_line_gives_personal_and_global_scores():
    line = report.score_line(a_summary())
    assert line == "personal accuracy 0.900 nll 0.100  global accuracy 0.800 nll 0.200"


def test_a_score_that_is_missing_is_a_dash():
    summary = a_summary()
    summary["personal"]["nll"] = None  # what was not finite is null in summary.json
    assert "nll –" in report.score_line(summary)


def test_a_published_method_is_listed_with_its_paper():
    [papers] = [column for column in report.methods_table().columns if column.header == "paper"]
    cited = dict(zip(methods.REGISTRY, papers.cells, strict=True))
    assert {name for name, paper in cited.items() if paper == "baseline"} == {"local", "pooled"}
    assert all("arXiv:" in paper for paper in cited.values() if paper != "baseline")


@pytest.mark.parametrize("width", [80, 100])
def test_the_methods_fit_a_terminal_and_no_citation_is_cut(width):
    console = Console(width=width, color_system=None, file=io.StringIO())
    console.print(report.methods_table())
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert sum(re.search(r"arXiv:\d{4}\.\d{5}\b", line) is not None for line in lines) == len(methods.REGISTRY) - 2


def test_nothing_plain_contains_colour(capsys):
    assert "\x1b" not in shown(report.methods_table(), capsys)


def test_a_value_is_found_by_its_dotted_name():
    assert math.isclose(report.value_at(a_summary(), "personal.clients.worst"), 0.6)
    assert report.value_at(a_summary(population=None), "global.accuracy") is None


def test_scores_that_are_not_finite_are_explained():
    summary = a_summary()
    assert not any("diverged" in line for line in report.run_lines(summary))
    summary["personal"]["nll"] = None
    assert "training diverged" in report.run_lines(summary)[-1]


def test_a_narrow_terminal_gets_costs_in_a_table_of_their_own():
    runs = {"local": [a_summary(), a_summary(0.8)], "fedprox:mu=0.1,step-size=0.05": [a_summary(0.7), a_summary(0.9)]}
    console = Console(width=80, record=True, file=io.StringIO())
    for table in report.comparison_tables(report.compare(runs), 2, width=80):
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    assert text.count("compile s") == 1
    assert "±0.050" in text
