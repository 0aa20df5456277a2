import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.engine.run_log import RunLog
from priory.store import Checkpoint, RunDirectory

SERVER = {"w": np.zeros(2, np.float32)}


@pytest.fixture
def opened(tmp_path):
    """Opens the log of a run with three clients that keep one number, anew at each call."""

    def opened() -> RunLog:
        directory = RunDirectory(tmp_path)
        return RunLog(directory, Checkpoint(directory.checkpoint, SERVER, np.float32(0), 3), None)

    return opened


def after_a_round(log: RunLog, number: int) -> None:
    log.completed, log.info = number, {"loss": 1.0 / number}
    log.rejected["a"] += 1
    log.reasons["norm"] += 1
    log.append(log.line({"personal": None}, {"train": 0.12345}))
    log.commit({"w": np.full(2, number, np.float32)}, {"origin": "here"})


def test_a_log_that_is_opened_again_goes_on_from_the_last_commit(opened):
    log = opened()
    after_a_round(log, 1)
    after_a_round(log, 2)
    log.append(log.line({}, {}))  # never committed
    again = opened()
    extra = again.restore()
    again.take_over()
    assert (again.completed, again.info) == (2, {"loss": 0.5})
    assert again.counters() == {"rejected": {"a": 2}, "reasons": {"norm": 2}}
    assert extra["origin"] == "here"
    assert [line["round"] for line in again.history] == [1, 2]
    np.testing.assert_array_equal(again.checkpoint.read_server()["w"], [2.0, 2.0])


def test_a_log_with_a_directory_keeps_no_line_in_memory(opened):
    log = opened()
    after_a_round(log, 1)
    assert log.history._packed == []
    assert [line["round"] for line in log.history] == [1]


def test_lines_that_were_cut_are_noticed(opened, tmp_path):
    after_a_round(opened(), 1)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="so it was cut"):
        opened().restore()


def test_a_line_has_the_round_the_figures_the_counters_and_seconds_to_the_millisecond():
    log = RunLog(None, None, None)
    after_a_round(log, 4)
    (line,) = log.history
    assert line == {
        "round": 4,
        "personal": None,
        "info": {"loss": 0.25},
        "rejected": {"a": 1},
        "reasons": {"norm": 1},
        "seconds": {"train": 0.123},
    }


def test_a_figure_that_is_not_finite_is_null():
    log = RunLog(None, None, None)
    log.info = {"loss": float("nan")}
    assert log.line({}, {})["info"] == {"loss": None}
