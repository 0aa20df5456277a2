"""Runs that commands are tried on, made once and copied; every test runs in an empty directory.

Files that train the same methods share a worker (`xdist_group("command line")`) and the federation `TINY`, so that each
program is compiled once.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from priory.cli import main
from priory.engine.evaluator import NEWCOMERS, Evaluator
from priory.engine.prepared import Prepared

TINY = ["--data", "digits", "--partition", "iid", "--clients", "5", "--rounds", "3", "--model", "linear"]
# With newcomers and validation rows, for a posterior; tests/report trains the same.
BAYES = ["--samples", "3", "--data", "digits", "--partition", "dirichlet:0.5", "--clients", "6", "--newcomers", "0.34"]
BAYES += ["--validation", "0.2", "--rounds", "4", "--eval-every", "2", "--model", "linear"]
SITES = ("east", "north", "west")


def patients() -> pd.DataFrame:
    """A table of three sites with a class and a number to predict."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"age": 50 + 9 * draw.normal(size=120), "sex": draw.choice(["f", "m"], 120)})
    frame["ill"] = np.where(frame.age + 5 * draw.normal(size=120) > 50, "yes", "no")
    frame["cost"] = 2 * frame.age + draw.normal(size=120)
    frame["site"] = np.array(SITES)[np.arange(120) % 3]
    return frame


def visits() -> pd.DataFrame:
    """The table with four rows of each patient, none of them after one another."""
    rows = np.arange(120)
    return patients().assign(patient=[f"P{number}" for number in rows // 12 * 3 + rows % 3])


@pytest.fixture(autouse=True)
def _somewhere_else(somewhere_else):
    pass


@contextmanager
def without_scores() -> Iterator[None]:
    """Let runs end without evaluations, which are programs of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "scores", lambda *_: (None, None))
        patch.setattr(Evaluator, "newcomer_scores", lambda *_: dict.fromkeys(NEWCOMERS))
        patch.setattr(Prepared, "_rehearse_scores", lambda *_: None)
        yield


@pytest.fixture
def unscored() -> Iterator[None]:
    """Train without scores in a test that does not look at them."""
    with without_scores():
        yield


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Callable[[str], str]:
    """Copy a finished run into the current directory; it is made when it is first asked for.

    By name: methods on the digits, and four runs on `patients`: a posterior, a point without validation rows, the
    same with groups, a regression. The runs have no scores.
    """
    root = tmp_path_factory.mktemp("made")
    patients().to_csv(root / "table.csv", index=False)
    visits().to_csv(root / "visits.csv", index=False)
    where = ["--data", str(root / "table.csv"), "--client", "site", "--rounds", "1", "--model", "linear"]
    classes = [*where, "--target", "ill", "--drop", "cost"]
    kinds = {
        "pfedbayes": ["pfedbayes", *BAYES],
        "bayes": ["pfedbayes", *classes, "--validation", "0.4"],
        "point": ["fedavg", *classes, "--newcomers", "0.3"],
        "grouped": ["fedavg", *classes, "--newcomers", "0.3", "--data", str(root / "visits.csv"), "--group", "patient"],
        "regression": [
            "fedavg",
            *where,
            "--target",
            "cost",
            "--drop",
            "ill",
            "--validation",
            "0.4",
            "--step-size",
            "1e-4",
        ],
    }

    def of(name: str) -> str:
        if not Path(root, name).exists():
            with without_scores():
                assert main(["run", *kinds.get(name, [name, *TINY]), "--out", str(root / name)]) == 0
        shutil.copytree(root / name, name)
        return name

    return of
