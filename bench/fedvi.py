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

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

import numpy as np  # noqa: E402
from cells import Column  # noqa: E402
from tables import Table, main  # noqa: E402

from priory import metrics  # noqa: E402

CELLS = Path(__file__).parents[1] / "docs" / "methods" / "fedvi"
COLUMNS = {
    "participating": Column(("personal", "accuracy"), 100, 2),
    "newcomers": Column(("newcomers", "accuracy"), 100, 2),
    "participating, no labels": Column(("measured", "participating_no_labels"), 100, 2),
    "newcomers, no labels": Column(("measured", "newcomers_no_labels"), 100, 2),
    "gap, no labels": Column(("measured", "gap"), 100, 2),
    "its standard error over clients": Column(("measured", "gap_error"), 100, 2),
    "client mean": Column(("personal", "clients", "mean"), 100, 2),
}


def without_labels(run: Any) -> dict[str, float]:
    """What a method has for clients whose labels it does not read, and how participants are served against newcomers.

    That is the posterior from inputs alone, or else the global model. The gap is of mean accuracies over clients.
    """
    inside, outside = run.population, run.newcomers_global
    if run.newcomers_unlabelled is not None:
        plain = dataclasses.replace(run.session, method=dataclasses.replace(run.method, refine_epochs=0))
        total = plain._tallies(np.arange(run.federation.num_clients), visits=0, arriving=True)
        inside, outside = metrics.summarise(total.unlabelled), run.newcomers_unlabelled
    if inside is None or outside is None:
        return {}
    ours, theirs = (each.per_client["accuracy"][np.isfinite(each.per_client["accuracy"])] for each in (inside, outside))
    error = math.hypot(*(np.std(one, ddof=1) / math.sqrt(len(one)) for one in (ours, theirs)))
    return {
        "participating_no_labels": inside.accuracy,
        "newcomers_no_labels": outside.accuracy,
        "gap": float(ours.mean() - theirs.mean()),
        "gap_error": float(error),
    }


WRITERS: dict[str, Any] = {
    "data": "mnist_writers",
    "partition": {"spec": "natural", "newcomers": 139 / 539},
    "columns": COLUMNS,
    "seconds": 330,
    "measure": without_labels,
}
AT_HALF_WIDTH = {"rounds": 150, "cohort": 50, "model": "reddi:16,32,64"}
FEDVI = "fedvi:step-size=0.1,server-step-size=0.6,batch-size=32,overlap=True"
ROWS = {
    "fedavg": "fedavg:step-size=0.1",
    "fedrep": "fedrep:step-size=0.1,head-epochs=2",
    "ditto": "ditto:step-size=0.1",
    "fedvi": f"{FEDVI},refine-epochs=20,refine-step-size=1.0",
}
TURNED = {"transform": "rotate-by-client"}
TAUS = ("0", "1e-9", "1e-6", "1e-3", "0.1")
ON_CIFAR = "fedvi:step-size=0.1,server-step-size=1.0,server-momentum=0.0,batch-size=16,epochs=3,overlap=True"
TABLES = {
    "writers": Table(settings=AT_HALF_WIDTH, rows=ROWS, **WRITERS),
    "rotated": Table(
        settings=AT_HALF_WIDTH,
        rows={"fedavg": f"{ROWS['fedavg']},finetune-epochs=0", "fedvi": FEDVI},
        **{**WRITERS, "partition": WRITERS["partition"] | TURNED, "seconds": 240},
    ),
    "tau": Table(
        data="cifar100",
        partition={"spec": "dirichlet:0.1:coarse", "clients": 110, "newcomers": 10 / 110},
        settings={
            "rounds": 60,
            "cohort": 10,
            "model": "reddi:8,16,pool,32,64,64,128",
            "eval_every": 12,
            "eval_newcomers": True,
        },
        rows={tau: f"{ON_CIFAR},tau={tau}" for tau in TAUS},
        columns=COLUMNS,
        seeds=(0,),
        seconds=290,
        measure=without_labels,
    ),
}
FULL = Table(settings={**AT_HALF_WIDTH, "rounds": 1500, "model": "reddi"}, rows=ROWS, **{**WRITERS, "seconds": 10_000})

if __name__ == "__main__":
    main(TABLES, CELLS, __doc__, apart={"full": FULL})
