"""`priory check` as a user types it."""

import json

import pytest

from priory.cli import main

FEW = ["--clients", "100", "--rounds", "0", "--visits", "20"]


def test_a_method_that_fails_is_shown_beside_the_setting_that_passes(capsys):
    assert main(["check", "fedhb-niw", *FEW, "--out", "verdict.json"]) == 1
    shown = capsys.readouterr().out
    assert "fedhb-niw --epsilon 0.0001" in shown
    assert "at true hyper-parameters: FAILS (90 % intervals hold 0.0 ± 0.0 %, 0.000" in shown
    assert "fedhb-niw --epsilon 0.333333" in shown
    assert "at true hyper-parameters: passes" in shown
    assert "Of right posteriors 99 in 100 pass" in shown
    with open("verdict.json") as file:
        kept = json.load(file)
    assert [one["passes"] for one in kept["verdicts"]] == [False, True]
    assert kept["command"] == f"priory check fedhb-niw {' '.join(FEW)} --out verdict.json"
    assert kept["verdicts"][1]["at_true_hyper_parameters"]["clients"] == 100
    assert kept["verdicts"][0]["plug_in"] is None


def test_a_setting_that_passes_stands_alone_and_ends_with_0(capsys):
    assert main(["check", "fedhb-niw", *FEW, "--epsilon", "0.3333"]) == 0
    assert "FAILS" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "priory check needs a method"),
        (["--zeta", "1"], "priory check needs a method"),
        (["fedavg"], "fedavg claims no posterior over weights"),
        (["pfedbaye"], "did you mean pfedbayes?"),
        (["pfedbayes", "--clients", "7"], "clients=7 is too small; choose 100 or more."),
        (["pfedbayes", "--zeta", "-1"], "zeta=-1.0"),
        (["pfedbayes", "--out", "missing/verdict.json"], "out=missing/verdict.json cannot be written"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_sentence(argv, sentence, capsys):
    assert main(["check", *argv]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_help_tells_the_flags(capsys):
    assert main(["check", "--help"]) == 0
    assert "--rounds" in capsys.readouterr().out
    assert main(["check", "pfedbayes", "--help"]) == 0
    assert "--zeta" in capsys.readouterr().out
