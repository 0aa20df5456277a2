"""What a person sees while a run is under way."""

import io

import pytest

from priory.cli import progress
from priory.report.tables import PlainConsole

LINE = {"round": 4, "personal": {"accuracy": 0.91, "nll": 0.3}, "seconds": {"train": 1.5, "evaluate": 0.5}}


@pytest.fixture
def screen(monkeypatch):
    """Makes a terminal of some width, or a file, and returns what is written to it."""

    def make(is_terminal: bool, width: int = 120) -> io.StringIO:
        text = io.StringIO()
        how = {"force_terminal": is_terminal, "width": width, "color_system": None, "legacy_windows": False}
        monkeypatch.setattr(progress.report, "console", lambda stderr: PlainConsole(file=text, **how))
        return text

    return make


def last_bar(text: io.StringIO) -> str:
    return [line for line in text.getvalue().splitlines() if "/10" in line][-1]


def test_a_bar_shows_rounds_pace_scores_and_loss(screen, monkeypatch):
    text = screen(is_terminal=True)
    clock = iter([0.0, 2.0, 10.0, 11.0])  # two blocks, an evaluation that takes 8 s, a third block
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with progress.watching("ditto") as bar:
        bar.advanced(2, 10, {"loss": 0.75})
        bar.advanced(4, 10, {"loss": 0.5})
        bar.evaluated(LINE)
        bar.advanced(9, 10, {"loss": 0.25})
    last = last_bar(text)
    assert "ditto" in last
    assert "9/10" in last
    assert "2.3 rounds/s" in last  # 7 rounds in 2 + 1 seconds: neither the first block, which compiles, nor scoring
    assert "personal 0.910 loss 0.250" in last


def test_a_bar_on_a_narrow_terminal_leaves_out_the_loss_and_the_end_of_the_name(screen):
    text = screen(is_terminal=True, width=progress.NARROW - 1)
    with progress.watching("a method with a very long name") as bar:
        bar.evaluated(LINE)
        bar.advanced(4, 10, {"loss": 0.5})
    last = last_bar(text)
    assert "a method with a…" in last
    assert "personal 0.910" in last
    assert "loss" not in last


def test_a_file_gets_one_line_for_each_evaluation(screen):
    text = screen(is_terminal=False)
    with progress.watching("ditto") as lines:
        lines.advanced(4, 10, {"loss": 0.5})
        lines.evaluated(LINE)
    assert text.getvalue() == "ditto  round 4/10  personal accuracy 0.910 nll 0.300  2.0 s\n"


def test_a_terminal_shows_the_rounds_that_are_counted_and_the_time_left(screen):
    text = screen(is_terminal=True)
    with progress.counting("audit") as count:
        count(3, 8)
        count(5, 8)
    last = [line for line in text.getvalue().splitlines() if "audit" in line][-1]
    assert "5/8 rounds 00:0" in " ".join(last.split())


def test_a_file_gets_a_line_for_each_tenth_of_the_rounds_with_the_time_left(screen, monkeypatch):
    text = screen(is_terminal=False)
    clock = iter([0.0, 50.0, 51.0, 60.0, 230.0])  # the first rounds are compiled for, and no pace follows from them
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with progress.counting("tuning ditto") as count:
        for done in (0, 10, 11, 20, 100):
            count(done, 100)
    assert text.getvalue().splitlines() == [
        "tuning ditto  10/100 rounds",
        "tuning ditto  20/100 rounds, about 80 s left",
        "tuning ditto  100/100 rounds",
    ]
