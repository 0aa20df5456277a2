"""`priory reproduce`, as a person uses it."""

import pytest

import priory
from priory.cli.app import main
from priory.reproduce import cells

pytestmark = [pytest.mark.usefixtures("somewhere_else"), pytest.mark.xdist_group("command line")]


def test_a_table_is_made_then_read_back_and_written_as_markdown_and_html(tiny, capsys, tmp_path):
    assert main(["reproduce", "digits-table-0", "--seeds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "0 of 3 runs are there" in shown
    assert "FedProx" in shown
    assert (tmp_path / "results" / "digits-table-0" / "table.html").exists()
    assert main(["reproduce", "digits-table-0", "--seeds", "1"]) == 0
    assert "3 of 3 runs are there" in capsys.readouterr().out


def test_the_listing_tells_runs_and_minutes(tiny, capsys):
    assert main(["reproduce", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "digits-table-0" in shown
    assert "0/6" in shown


def test_an_estimate_runs_nothing(tiny, capsys, tmp_path):
    assert main(["reproduce", "digits-table-0", "--estimate"]) == 0
    assert "about 6 minutes" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_when_the_time_is_over_the_rest_is_left_for_the_same_command(tiny, capsys, tmp_path):
    assert main(["reproduce", "digits-table-0", "--minutes", "0.0001"]) == 130
    assert "runs left; the same command goes on" in capsys.readouterr().out
    assert "cells are not there yet" in (tmp_path / "results" / "digits-table-0" / "table.md").read_text()


def test_a_guard_passes_its_own_cells_and_refuses_to_stand_where_they_go(tiny, capsys):
    assert main(["reproduce", "digits-table-0", "--quick"]) == 0
    again = ["reproduce", "digits-table-0", "--quick", "--out", "again", "--guard", "results"]
    assert main(again) == 0
    assert "is within what seeds explain" in capsys.readouterr().out
    assert main([*again[:3], "--guard", "results"]) == 2
    assert "proves nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no table to make"),
        (["digits-tabel-0"], "digits-tabel-0"),
        (["all", "digits-table-0"], "all stands for every table"),
        (["digits-table-0", "--seeds", "0"], "seeds=0 is too small"),
        (["digits-table-0", "--minutes", "0"], "minutes=0 leaves no time"),
        (
            ["digits-table-0", "--guard", "nowhere"],
            "nowhere holds no run of digits-table-0, which would be in nowhere/",
        ),
    ],
)
def test_a_mistake_ends_in_one_sentence(tiny, words, says, capsys):
    assert main(["reproduce", *words]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_data_that_are_not_here_are_named_before_anything_runs(table, tiny, monkeypatch, capsys):
    table["data"]["data"] = "mnist"
    monkeypatch.delenv("PRIORY_DATA", raising=False)
    assert main(["reproduce", "digits-table-0"]) == 2
    assert "digits-table-0 needs mnist" in capsys.readouterr().err


def test_a_run_that_would_be_refused_is_named_before_anything_runs(table, tiny, tmp_path, capsys):
    table["row"][1]["set"]["mu"] = -1
    assert main(["reproduce", "digits-table-0"]) == 2
    assert "priory: digits-table-0 one-prox-0: mu=-1.0 is out of range" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_directory_that_cannot_be_written_is_named_before_anything_runs(tiny, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main(["reproduce", "digits-table-0", "--out", "taken"]) == 2
    assert "out='taken' cannot be written" in capsys.readouterr().err


def test_when_a_run_fails_the_others_are_made_and_the_tables_written(tiny, tmp_path, monkeypatch, capsys):
    real = cells.simulate

    def simulate(method, *given, **options):
        if isinstance(method, priory.FedProx):
            raise priory.UsageError("its training diverged; lower step_size.")
        return real(method, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(cells, "simulate", simulate)
        assert main(["reproduce", "digits-table-0", "--seeds", "1"]) == 2
    failed = "priory: 1 of 3 runs failed: digits-table-0 one-prox-0: its training diverged; lower step_size."
    assert capsys.readouterr().err.splitlines()[-1] == failed
    assert "FedAvg" in (tmp_path / "results" / "digits-table-0" / "table.md").read_text()
    assert main(["reproduce", "digits-table-0", "--seeds", "1"]) == 0
    assert "2 of 3 runs are there" in capsys.readouterr().out
