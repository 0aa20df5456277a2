"""`priory compare` where a method does not suit the problem, fails, or is interrupted."""

import json
import os
import signal
from pathlib import Path

import pytest

import priory
from priory import tune as tuner
from priory.cli import compare, main, progress
from tests.cli.conftest import TINY

pytestmark = pytest.mark.xdist_group("command line")

COMMAND = ["compare", "fedavg", "fedprox", *TINY, "--out", "c"]


def failing(error: Exception, method: type = priory.FedProx):
    """`simulate`, with an error in place of the first round of a method."""
    real = compare.simulate

    def simulate(given, *args, **options):
        if isinstance(given, method):
            raise error
        return real(given, *args, **options)

    return simulate


def labels() -> list[str]:
    return [record["label"] for record in json.loads(Path("c/comparison.json").read_text())["methods"]]


@pytest.mark.parametrize(
    ("methods", "flags", "says"),
    [
        (["fedavg", "fedbnn"], [], "priory: fedbnn needs inputs that are known to all clients"),
        (["fedavg", "fedbe:epochs=2"], [], "fedbe:epochs=2: fedbe distils on inputs without labels"),
        (["fedavg", "fedprox:mu=-1"], [], "fedprox:mu=-1: mu=-1.0 is out of range"),
        (
            ["fedavg", "random-groups"],
            ["--models", "linear,mlp:8"],
            "priory: fedavg exchanges what depends on the network",
        ),
        (["fedavg", "pooled"], ["--robust", "median"], "pooled: robust=median needs messages of several clients"),
        (["fedavg", "pooled"], ["--dp", "local", "--dp-noise", "1"], "pooled: dp=local protects what clients send"),
        (["fedavg", "cfedbayes:clusters=auto"], [], "cfedbayes:clusters=auto: clusters=auto is chosen on validation"),
        (["fedavg", "ifca:clusters=9"], [], "ifca:clusters=9: clusters=9 exceeds the 5 clients"),
        (["fedavg"], ["--seed", "4294967295", "--seeds", "2"], "seeds=2 from seed=4294967295 on end above 2^32 - 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_any_method_is_refused_for_is_raised_before_the_first_round(methods, flags, says, capsys, monkeypatch):
    monkeypatch.setattr(compare, "simulate", lambda *_, **__: pytest.fail("a method was trained"))
    data = TINY[: TINY.index("--model")] if "--models" in flags else TINY
    assert main(["compare", *methods, *data, *flags, "--out", "c"]) == 2
    assert says in capsys.readouterr().err
    assert not Path("c").exists()


@pytest.mark.parametrize("error", [priory.UsageError("loss is not finite; lower it."), RuntimeError("out of memory\n")])
def test_when_one_method_fails_the_others_are_kept_and_printed_and_the_same_command_makes_the_rest(
    error, capsys, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(compare, "simulate", failing(error))
        assert main(["compare", "fedprox", "fedavg", *TINY, "--out", "c"]) == 2
    shown = capsys.readouterr()
    said = "loss is not finite; lower it" if isinstance(error, priory.UsageError) else "RuntimeError: out of memory"
    assert f"fedprox: {said}; the others go on\n" in shown.err
    assert shown.err.splitlines()[-1] == f"priory: 1 of 2 methods failed: fedprox: {said}."
    assert ("Traceback" in shown.err) == isinstance(error, RuntimeError)
    assert "fedavg" in shown.out
    assert labels() == ["fedavg"]
    monkeypatch.setattr(compare, "simulate", failing(AssertionError("it was trained already"), priory.FedAvg))
    assert main(["compare", "fedprox", "fedavg", *TINY, "--out", "c"]) == 0
    assert labels() == ["fedprox", "fedavg"]
    assert [path.name for path in Path("c").glob("*.json")] == ["comparison.json"]


def test_an_interrupted_comparison_prints_the_methods_that_finished(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        lines = progress.Lines.evaluated

        def evaluated(self, line):
            lines(self, line)
            if self._label == "fedprox":
                os.kill(os.getpid(), signal.SIGINT)

        patch.setattr(progress.Lines, "evaluated", evaluated)
        assert main(COMMAND) == 130
    shown = capsys.readouterr().out
    assert "worst" in shown
    assert "goes on from the checkpoint in c/fedprox-s0" in " ".join(shown.split())
    assert not Path("c/comparison.json").exists()
    assert main(COMMAND) == 0
    assert labels() == ["fedavg", "fedprox"]


def test_a_comparison_stops_while_a_number_of_clusters_is_chosen(capsys, monkeypatch):
    def pressed(*_, stop, **__):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        return []

    monkeypatch.setattr(tuner, "check", lambda *_, **__: None)
    monkeypatch.setattr(tuner, "try_clusters", pressed)
    assert main(["compare", "cfedbayes:clusters=auto", *TINY, "--validation", "0.2", "--out", "c"]) == 130
    assert "Stopped; the same command goes on" in capsys.readouterr().out
