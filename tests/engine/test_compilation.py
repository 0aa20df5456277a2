"""How many compiled programs a process holds on to."""

from pathlib import Path

import jax
import pytest

import priory
from priory.engine import compilation
from priory.engine.rounds import run_block


@pytest.mark.slow  # it drops the programs of the other tests as well
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what a process has mapped")
def test_a_run_lets_go_of_the_programs_of_others_when_there_are_too_many(monkeypatch):
    federation = priory.data.load("digits").partition("iid", clients=2, seed=0)

    def run(method: object) -> int:
        priory.simulate(method, federation, rounds=1, model="linear", eval_every=0)
        return run_block._cache_size()

    # Whatever other tests have compiled in this process neither counts nor is too much.
    jax.clear_caches()
    monkeypatch.setattr(compilation, "MOST_MAPPINGS", 10**9)
    assert [run(priory.FedAvg()), run(priory.FedProx())] == [1, 2]
    monkeypatch.setattr(compilation, "MOST_MAPPINGS", 0)
    assert run(priory.FedAvg()) == 1
