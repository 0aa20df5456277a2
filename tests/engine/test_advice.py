"""What a method makes of the figures of a run: told once for each kind, and kept with the run."""

import json
import warnings

import pytest

import priory
from priory import methods
from priory.cli import main
from priory.core.struct import struct
from priory.fed.capabilities import AdviceWarning, Advises


@struct
class Advising(priory.FedAvg, Advises):
    """FedAvg that has something to say of every loss, and of one that fell below a bound."""

    bound: float = -1.0

    def advice(self, task, info):
        told = {"loss": f"The loss is {info['loss']!r}; look at it."}
        return told | ({"low": f"The loss fell below {self.bound}; stop."} if info["loss"] < self.bound else {})


ALWAYS = Advising(bound=1e9)


@pytest.fixture(scope="module")
def federation():
    """The one that the command line makes below, so that all runs are one program."""
    return priory.data.load("digits").partition("iid", clients=4, seed=0)


@pytest.fixture(scope="module")
def simulate(federation):
    def run(method, **options):
        return priory.simulate(method, federation, **({"model": "linear", "rounds": 4, "eval_every": 0} | options))

    return run


def heard(function, *args, **options):
    """What a function returns, and the sentences of advice that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args, **options)
    assert all(one.category is AdviceWarning for one in caught)
    return result, [str(one.message) for one in caught]


@pytest.mark.slow  # a method of its own
def test_a_kind_of_advice_is_given_once_though_its_numbers_change(simulate):
    run, told = heard(simulate, Advising(), eval_every=1)
    first, last = run.history[0]["info"]["loss"], run.history[-1]["info"]["loss"]
    assert (len(run.history), first != last) == (4, True)
    assert told == [f"The loss is {first!r}; look at it."]


def test_each_kind_of_advice_is_given(simulate):
    _, told = heard(simulate, ALWAYS)
    assert len(told) == 2
    assert told[1] == "The loss fell below 1000000000.0; stop."


def test_the_summary_keeps_the_newest_words(simulate):
    run, _ = heard(simulate, Advising(), eval_every=1)
    assert run.summary()["extra"]["advice"] == {"loss": f"The loss is {run.history[-1]['info']['loss']!r}; look at it."}


def test_a_run_without_advice_has_none_in_its_summary(simulate):
    assert not isinstance(priory.FedAvg(), Advises)
    assert "advice" not in simulate(priory.FedAvg(), rounds=0).summary()["extra"]


def test_a_resumed_run_does_not_repeat_itself_and_ends_with_the_same_summary(simulate, federation, tmp_path):
    whole, _ = heard(simulate, Advising(), eval_every=1)
    asked = iter([False, False, True])
    _, first = heard(simulate, Advising(), eval_every=1, out=tmp_path / "run", stop=lambda: next(asked))
    assert len(first) == 1
    again, second = heard(priory.resume, tmp_path / "run", federation=federation, method=Advising())
    assert second == []
    assert again.summary()["extra"] == whole.summary()["extra"]


def test_a_loaded_run_still_knows_its_advice(simulate, federation, tmp_path):
    run, _ = heard(simulate, ALWAYS)
    run.save(tmp_path / "run")
    loaded, told = heard(priory.load, tmp_path / "run", federation=federation, method=ALWAYS)
    assert told == []
    assert loaded.extra["advice"] == run.extra["advice"]


def test_the_command_line_shows_advice_as_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(methods.REGISTRY, "advising", Advising)
    monkeypatch.chdir(tmp_path)
    tiny = ["--data", "digits", "--partition", "iid", "--clients", "4", "--rounds", "1", "--model", "linear"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["run", "advising", *tiny, "--out", "a"]) == 0
    [sentence] = json.loads((tmp_path / "a" / "summary.json").read_text())["extra"]["advice"].values()
    assert f"warning: {sentence}\n" in capsys.readouterr().err
