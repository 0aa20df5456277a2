"""`check`: all that a run may be refused for is raised before anything is compiled or written."""

from typing import ClassVar

import pytest

import priory
from priory.core.struct import static, struct
from priory.engine import check
from priory.engine.rounds import run_block

OPTIONS = {"model": "linear", "rounds": 1, "cohort": 3, "eval_every": 0}


@struct
class Counting(priory.FedAvg):
    """FedAvg that counts how often its verbs are traced."""

    traced: ClassVar[dict[str, int]] = {}

    def client_update(self, *args):
        self.traced["update"] = self.traced.get("update", 0) + 1
        return super().client_update(*args)

    def predict(self, *args):
        self.traced["predict"] = self.traced.get("predict", 0) + 1
        return super().predict(*args)


@struct
class Picky(priory.FedAvg):
    """FedAvg that finds only in one of its verbs that the problem does not suit it."""

    verb: str = static(default="")

    def aggregate(self, *args):
        return self.refuse("aggregate") or super().aggregate(*args)

    def predict(self, *args):
        return self.refuse("predict") or super().predict(*args)

    def refuse(self, verb: str) -> None:
        if verb == self.verb:
            raise priory.UsageError(f"{verb} needs something else; give it.")


@pytest.mark.parametrize("verb", ["aggregate", "predict"])
def test_a_problem_that_only_a_later_verb_finds_is_raised_before_anything_is_written(verb, federation, tmp_path):
    with pytest.raises(priory.UsageError, match=f"{verb} needs something else"):
        priory.simulate(Picky(verb=verb), federation, out=tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("resident_bytes", [1 << 30, 0])
def test_a_check_compiles_no_round_and_the_run_after_it_traces_nothing_again(federation, resident_bytes):
    options = OPTIONS | {"resident_bytes": resident_bytes}
    compiled = run_block._cache_size()
    check(Counting(), federation, **options)
    assert run_block._cache_size() == compiled
    traced = dict(Counting.traced)
    assert min(traced["update"], traced["predict"]) > 0
    priory.simulate(Counting(), federation, **options)
    assert Counting.traced == traced


def test_a_directory_that_holds_a_run_is_refused(federation, tmp_path):
    (tmp_path / "manifest.toml").write_text("")
    with pytest.raises(priory.UsageError, match="never overwritten"):
        check(priory.FedAvg(), federation, out=tmp_path, **OPTIONS)


def test_a_tool_that_does_not_exist_is_refused(federation):
    with pytest.raises(priory.UsageError, match="track='tensorbord' is no tool"):
        check(priory.FedAvg(), federation, track="tensorbord", **OPTIONS)
