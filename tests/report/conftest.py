"""Runs to report on: some that were written by hand, and a few real ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import priory
from priory.store import RunDirectory

Written = Callable[..., Path]


def scores(value: float | None, kind: str = "accuracy") -> dict[str, Any]:
    spread = {"mean": value, "worst": value, "p10": value}
    nll = None if value is None else 1 - value
    if kind == "rmse":
        return {"rmse": value, "nll": nll, "coverage_90": 0.9, "clients": spread}
    return {"accuracy": value, "nll": nll, "ece": 0.1, "brier": 0.2, "clients": spread}


@pytest.fixture
def written(tmp_path) -> Written:
    """Writes the directory of a finished run with two clients and no checkpoint."""

    def write(
        name: str,
        accuracy: float | None = 0.5,
        seed: int = 0,
        method: str = "fedavg",
        clients: tuple[str, str] = ("ward 1", "ward 2"),
        kind: str = "accuracy",
        extra: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Path:
        directory = RunDirectory(tmp_path / name)
        directory.create(
            {
                "method": {"name": method, **settings},
                "run": {"rounds": 2, "seed": seed},
                "data": {"data": "digits", "clients": 2},
                "environment": {"priory": "0.1.0", "data_checksum": "0" * 12},
            }
        )
        directory.append_metrics({"round": 2, "personal": scores(accuracy, kind), "global": None, "info": {}}, 0)
        summary = {
            "method": method,
            "rounds": 2,
            "personal": scores(accuracy, kind),
            "global": None,
            "communication": {"down_bytes": 10, "up_bytes": 10},
            "seconds": {"compile": 1.0, "train": 1.0, "evaluate": 1.0},
            "extra": {"rejected": {}, **(extra or {})},
        }
        columns = {"client": list(clients), kind: [accuracy, None], "nll": [0.5, None], "count": [10.0, 10.0]}
        directory.write_summary(summary, {"personal": columns})
        return directory.path

    return write


@pytest.fixture(scope="session")
def comparison(tmp_path_factory) -> Path:
    """A directory of real runs: two seeds of FedAvg and one of pFedBayes, with global models and newcomers.

    The federation is that of `BAYES` in tests/cli, so that pFedBayes is compiled once for both.
    """
    place = tmp_path_factory.mktemp("comparison")
    federation = priory.data.load("digits").partition(
        "dirichlet:0.5", clients=6, validation=0.2, newcomers=0.34, seed=0
    )
    for method, seed in ((priory.FedAvg(), 0), (priory.FedAvg(), 1), (priory.PFedBayes(samples=3), 0)):
        name = type(method).__name__
        priory.simulate(
            method, federation, model="linear", rounds=4, eval_every=2, seed=seed, out=place / f"{name}-s{seed}"
        )
    return place
