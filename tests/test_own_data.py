"""The guide to own data: its code and its commands run one after another, in a directory of their own."""

import re
from pathlib import Path

import pandas as pd
import pytest

from priory.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "own-data.md"
BLOCKS = re.findall(r"```(python|console)\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.slow  # sixty rounds, predictions, a newcomer and a report, of programs that no other test shares
@pytest.mark.usefixtures("somewhere_else", "without_files")
def test_the_guide_runs_as_it_stands(capsys):
    names: dict = {"__name__": "__page__"}
    for kind, text in BLOCKS:
        if kind == "python":
            exec(compile(text, str(PAGE), "exec"), names)
            assert capsys.readouterr().out.strip(), "an example prints something worth seeing"
            continue
        for command in re.findall(r"^\$ priory (.*)$", text, re.MULTILINE):
            assert main(command.split()) == 0, capsys.readouterr().err
    assert "cleveland" in Path("runs/hospitals/report.html").read_text()
    one, other = pd.read_csv("predictions.csv"), pd.read_csv("again.csv")
    told = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE.read_text(), re.MULTILINE)
    columns = [name for names in told for name in re.findall(r"`(\w+)`", names)]
    assert list(one) == ["patient", *columns]
    pd.testing.assert_frame_equal(one.drop(columns="abstain"), other)
    assert set(pd.read_csv("va-predictions.csv")["set"]) <= {"no", "yes", "no|yes"}
