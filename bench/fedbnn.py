"""FedBNN beside the same clients trained alone, on CIFAR-10 and MNIST; prints docs' tables.

    PRIORY_DATA=... python bench/fedbnn.py                 runs what is missing, then prints
    PRIORY_DATA=... python bench/fedbnn.py --estimate      only says what is missing and how long it would take
    PRIORY_DATA=... python bench/fedbnn.py --only same     one table
    PRIORY_DATA=... python bench/fedbnn.py --only full     the sizes of the paper, which a whole run of the others does
                                                           not contain

same       20 clients with 5 classes of CIFAR-10 each, 100 training images a class, one network
mixed      the same clients, four networks
alignment  alignment sets of 10, 8, 5 and 2 classes, of another data set (table 2), and of 50 to 2000 inputs (figure 3)
privacy    ε a round of 1, 0.01, 0.0001 at δ = 0.0001 (table 3), with the sensitivity of a row, and once of a matrix
many       500 clients, 10 % a round, 32 images each, 10 epochs, 100 alignment inputs (table 4)
mnist      calibration (figure 2), and clothes as alignment set of digits

Seed s is that of the split and of the run, so methods are paired within a seed. `alone` is the same training with
γ = 0: a client fits its prior to its own words. Settings were chosen on validation rows of seed 100 (CIFAR-10, one
network), from the trials that docs/methods/fedbnn.md lists. Every finished cell is a JSON file of its own with the
command that makes it again.
"""

import math
import os
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

from cells import Column  # noqa: E402
from tables import Table, main  # noqa: E402

from priory.fed import privacy  # noqa: E402

CELLS = Path(__file__).parents[1] / "docs" / "methods" / "fedbnn"
COLUMNS = {
    "accuracy": Column(("personal", "accuracy"), 100, 2),
    "client mean": Column(("personal", "clients", "mean"), 100, 2),
    "worst client": Column(("personal", "clients", "worst"), 100, 2),
    "NLL": Column(("personal", "nll"), 1, 3),
    "ECE": Column(("personal", "ece"), 1, 3),
    "MCE": Column(("personal", "mce"), 1, 3),
}
MODEL = "cnn3:16,32,64"
MODELS = "cnn3:16,32,64,cnn3:8,16,32,mlp:128,mlp:64,32"
FEDBNN = "fedbnn:step-size=0.001,batch-size=20,prior-sd=0.02,zeta=0.01,rho=-5.0,draw=weights"
ALONE = f"{FEDBNN},gamma=0.0"
CIFAR: dict[str, Any] = {
    "data": "cifar10",
    "partition": {"spec": "classes:5", "clients": 20, "align": "own:500", "sizes": "1.0=500"},
    "columns": COLUMNS,
}
SETTINGS = {"rounds": 30, "model": MODEL}
ONCE: dict[str, Any] = {"seeds": (0,), "seconds": 130}
PAIR = {"alone": ALONE, "fedbnn": FEDBNN}
LONG_PAIR = {name: f"{spec},epochs=10" for name, spec in PAIR.items()}
SHORT = {**SETTINGS, "rounds": 15}
SPENT = ("1", "0.01", "0.0001")


def noise(epsilon: str) -> float:
    """The noise multiplier whose zCDP is (ε, 0.0001)-DP for one message."""
    return round(1 / math.sqrt(2 * privacy.rho_of(float(epsilon), 1e-4)), 4)


TABLES = {
    "same": Table(settings=SETTINGS, rows=PAIR, seconds=250, **CIFAR),
    "mixed": Table(settings={"rounds": 30, "models": MODELS}, rows=PAIR, seconds=130, **CIFAR),
    "alignment": Table(
        settings=SHORT,
        rows={
            "alone": ALONE,
            **dict.fromkeys(("2-classes", "5-classes", "8-classes", "cifar100", "50", "200", "2000"), FEDBNN),
            "500": FEDBNN,
        },
        dealt={
            **{f"{num}-classes": {"align": f"own:500:classes={num}"} for num in (2, 5, 8)},
            "cifar100": {"align": "cifar100:500"},
            **{num: {"align": f"own:{num}"} for num in ("50", "200", "2000")},
        },
        **ONCE,
        **CIFAR,
    ),
    "privacy": Table(
        settings={**SHORT, "dp": "local", "dp_delta": 1e-4},
        rows=dict.fromkeys(("matrix-1", *(f"row-{epsilon}" for epsilon in reversed(SPENT))), FEDBNN),
        own={
            "matrix-1": {"dp_noise": noise("1")},
            **{
                f"row-{epsilon}": {"dp_noise": noise(epsilon), "dp_sensitivity": round(math.sqrt(2), 6)}
                for epsilon in SPENT
            },
        },
        **ONCE,
        **CIFAR,
    ),
    "many": Table(
        settings={**SETTINGS, "cohort": 50},
        rows=LONG_PAIR,
        **{**ONCE, "seconds": 280},
        **{**CIFAR, "partition": {**CIFAR["partition"], "clients": 500, "sizes": "1.0=32", "align": "own:100"}},
    ),
    "mnist": Table(
        data="mnist",
        partition=CIFAR["partition"],
        settings={"rounds": 30, "model": "mlp:100"},
        rows={"alone": ALONE, "clothes": FEDBNN, "fedbnn": FEDBNN},
        dealt={"clothes": {"align": "fashion_mnist:500"}},
        columns=COLUMNS,
        seeds=(0,),
        seconds=20,
    ),
}
FULL = Table(
    settings={"rounds": 100, "model": "cnn3:32,64,128", "eval_every": 10},
    rows=LONG_PAIR,
    **{**CIFAR, "partition": {**CIFAR["partition"], "align": "own:2000"}, "seconds": 17_000},
)

if __name__ == "__main__":
    main(TABLES, CELLS, __doc__, apart={"full": FULL})
