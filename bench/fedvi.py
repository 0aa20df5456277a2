"""FedVI beside FedAvg, FedRep and Ditto on writers and on CIFAR-100; prints docs' tables.

    PRIORY_DATA=... python bench/fedvi.py                 runs what is missing, then prints
    PRIORY_DATA=... python bench/fedvi.py --estimate      only says what is missing and how long it would take
    PRIORY_DATA=... python bench/fedvi.py --only writers  one table
    PRIORY_DATA=... python bench/fedvi.py --only full     the network of the paper, which a whole run of the others does
                                                          not contain

writers   the 539 writers of MNIST's training images, 139 of them held out, 50 a round; the paper's network for FEMNIST
          at half width
rotated   the same, every writer's page turned by an angle of its own
tau       CIFAR-100 by a Dirichlet over its coarse labels, 10 of 110 clients held out; τ as in figure 5

Seed s is that of the split and of the run, so methods are paired within a seed. Settings were chosen on the validation
rows of seed 100. Every finished cell is a JSON file of its own with the command that makes it again.
"""

import math
import os
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

import numpy as np  # noqa: E402
from cells import Column  # noqa: E402
from tables import Table, main  # noqa: E402

CELLS = Path(__file__).parents[1] / "docs" / "methods" / "fedvi"
PARTS = {
    "participating": "personal",
    "participating, global model": "global",
    "newcomers, labels": "newcomers",
    "newcomers, inputs alone": "newcomers_unlabelled",
    "newcomers, nothing": "newcomers_global",
}
COLUMNS = {name: Column((part, "accuracy"), 100, 2) for name, part in PARTS.items()}


def gap(run: Any) -> dict[str, float]:
    """How much better participants are served than newcomers, in mean accuracy over clients, with its standard error.

    Newcomers are scored by the best that the method has for clients without labels, or else with them.
    """
    parts = [run.newcomers_unlabelled, run.newcomers_global, run.newcomers]
    inside, outside = (_accuracies(part) for part in (run.personal, next(part for part in parts if part is not None)))
    error = math.hypot(*(np.std(one, ddof=1) / math.sqrt(len(one)) for one in (inside, outside)))
    return {"gap": float(inside.mean() - outside.mean()), "gap_error": float(error)}


def _accuracies(scores: Any) -> np.ndarray:
    found = scores.per_client["accuracy"]
    return found[np.isfinite(found)]


GAP = {
    "gap": Column(("measured", "gap"), 100, 2),
    "its standard error over clients": Column(("measured", "gap_error"), 100, 2),
}
WRITERS: dict[str, Any] = {
    "data": "mnist_writers",
    "partition": {"spec": "natural", "newcomers": 139 / 539},
    "columns": COLUMNS | GAP,
    "seconds": 300,
    "measure": gap,
}
AT_HALF_WIDTH = {"rounds": 150, "cohort": 50, "model": "reddi:16,32,64"}
ROWS = {
    "fedavg": "fedavg:step-size=0.1",
    "fedrep": "fedrep:step-size=0.1,head-epochs=2",
    "ditto": "ditto:step-size=0.1",
    "fedvi": "fedvi:step-size=0.1,server-step-size=1.0",
}
TURNED = {"transform": "rotate-by-client"}
TAUS = ("0", "1e-9", "1e-6", "1e-3", "0.1")
TABLES = {
    "writers": Table(settings=AT_HALF_WIDTH, rows=ROWS, **WRITERS),
    "rotated": Table(
        settings=AT_HALF_WIDTH,
        rows={row: ROWS[row] for row in ("fedavg", "fedvi")},
        **{**WRITERS, "partition": WRITERS["partition"] | TURNED},
    ),
    "tau": Table(
        data="cifar100",
        partition={"spec": "dirichlet:0.1:coarse", "clients": 110, "newcomers": 10 / 110},
        settings={"rounds": 150, "cohort": 10, "model": "reddi:8,16,pool,32,64,64,128", "eval_every": 15},
        rows={tau: f"{ROWS['fedvi']},tau={tau}" for tau in TAUS},
        columns=COLUMNS | GAP,
        seeds=(0,),
        seconds=240,
        measure=gap,
    ),
}
FULL = Table(settings={**AT_HALF_WIDTH, "rounds": 1500, "model": "reddi"}, rows=ROWS, **{**WRITERS, "seconds": 10_000})

if __name__ == "__main__":
    main(TABLES, CELLS, __doc__, apart={"full": FULL})
