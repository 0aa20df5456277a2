"""The lines of a run: a list to whoever reads them, and little memory while they are many."""

import gc
import json
import shutil
import tracemalloc

import pytest

import priory
from priory.engine.history import History
from priory.store import RunDirectory

LINES = [{"round": t, "personal": {"nll": t / 3}, "uncertainty": {"é": None}} for t in range(1, 4)]
START, FEW, MANY = 5, 50, 200
# Bytes per line. A compressed line has 650; what else is found is what JAX keeps, whatever the number of lines. Parsed
# lines took 5,400 in both cases.
MOST = {"in memory": 1500, "with a directory": 600}


@pytest.fixture(params=MOST)
def history(request, tmp_path) -> History:
    if request.param == "in memory":
        found = History()
        for line in LINES:
            found.append(line, 0)
        return found
    directory, length = RunDirectory(tmp_path), 0
    found = History(directory=directory, length=0)
    for line in LINES:
        length = directory.append_metrics(line, length)
        found.append(line, length)
    return found


def test_a_history_reads_like_a_list(history):
    assert history == LINES
    assert history[:] == LINES
    assert (len(history), list(history), history[-1], history[1:]) == (3, LINES, LINES[-1], LINES[1:])
    assert repr(history) == repr(LINES)
    assert history != LINES[:2]
    assert History() == []


def test_lines_of_another_process_do_not_belong_to_a_run(tmp_path):
    directory = RunDirectory(tmp_path)
    length = directory.append_metrics(LINES[0], 0)
    found = History(directory=directory, length=length)
    directory.append_metrics(LINES[1], length)
    assert found == LINES[:1]


def test_lines_that_are_kept_survive_their_directory(history, tmp_path):
    history.keep()
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    assert history == LINES
    history.append(LINES[0], 0)
    assert history[3:] == LINES[:1]


@pytest.mark.parametrize("how", ["finished", "stopped", "loaded", "resumed"])
def test_the_history_of_a_run_survives_its_directory(how, simulate, tmp_path):
    asked = iter([False, True])
    stop = (lambda: next(asked, True)) if how == "stopped" else (lambda: False)
    run = simulate(priory.Ditto(), rounds=4, eval_every=1, out=tmp_path / "run", stop=stop)
    if how in ("loaded", "resumed"):
        run = (priory.load if how == "loaded" else priory.resume)(tmp_path / "run", federation=run.federation)
    shutil.rmtree(tmp_path / "run")
    lines = json.loads(json.dumps(list(run.history)))
    assert [line["round"] for line in lines] == list(range(1, run.completed + 1))


class Scales:
    """Hears of evaluations and weighs what Python holds after a few and after many."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}

    def advanced(self, *_) -> None:
        pass

    def evaluated(self, line) -> None:
        if line["round"] == START:
            tracemalloc.start()  # only now: it slows down everything that is compiled before
        if line["round"] in (FEW, MANY):
            gc.collect()
            self.bytes[line["round"]] = tracemalloc.get_traced_memory()[0]
        if line["round"] == MANY:
            tracemalloc.stop()


@pytest.mark.parametrize("where", MOST)
def test_memory_hardly_grows_with_the_number_of_evaluations(where, simulate, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)  # the disk is not what is measured
    out, scales = tmp_path / "run" if where == "with a directory" else None, Scales()
    run = simulate(priory.Ditto(), rounds=MANY, eval_every=1, out=out, listener=scales)
    assert [line["round"] for line in run.history] == list(range(1, MANY + 1))
    assert (scales.bytes[MANY] - scales.bytes[FEW]) / (MANY - FEW) < MOST[where]
