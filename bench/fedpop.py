"""FedPop beside FedAvg and FedRep on the synthetic problem of its paper's section 5; prints docs' tables.

    python bench/fedpop.py             runs what is missing, then prints
    python bench/fedpop.py --estimate  only says what is missing and how long it would take

y = x·(φ z_k) + N(0, 0.1), φ in R^{20x2}; of 100 clients 90 have 5 examples and 10 have 10. Seed s is that of the
problem, of the split and of the run, so methods are paired within a seed. Step sizes were chosen on seed 100. Every
finished cell is a JSON file of its own with the command that makes it again.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

import numpy as np  # noqa: E402
from cells import Cell, Column, difference, mean_of, run_missing  # noqa: E402

CELLS = Path(__file__).parents[1] / "docs" / "methods" / "fedpop"
SEEDS = (0, 1, 2, 3, 4)
SECONDS = 8  # about, for a cell on two cores
COSINE = ("step-size=cosine", "prior-step-size=cosine")
COLUMNS = {
    "principal angle": Column(("measured", "angle"), 1, 3),
    "error of φz": Column(("measured", "error"), 1, 3),
    "personal RMSE": Column(("personal", "rmse"), 1, 3),
}
# Name of a row: the method as `priory compare` spells it, rounds, schedules.
METHODS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "fedavg": ("fedavg:step-size=0.003,batch-size=10", 1000, ()),
    "fedrep": ("fedrep:step-size=0.003,finetune-step-size=0.003,batch-size=10", 1000, ()),
    "fedrep-1": ("fedrep:step-size=0.003,finetune-step-size=0.003,batch-size=10,head-epochs=1", 1000, ()),
    "fedpop": ("fedpop:step-size=0.01,prior-step-size=0.01", 1000, COSINE),
}
STEPS = (1, 2, 5, 10, 50)
STATES = {
    f"{name}-{steps}": (
        f"fedpop:step-size=0.01,prior-step-size=0.01,stateful={stateful},steps={steps},burn-in={steps // 2}",
        300,
        COSINE,
    )
    for steps in STEPS
    for name, stateful in (("stateful", True), ("stateless", False))
}
TABLES = {"methods": METHODS, "states": STATES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimate", action="store_true", help="run nothing")
    options = parser.parse_args()
    everything = [cell(rows, row, seed) for rows in TABLES.values() for row in rows for seed in SEEDS]
    run_missing(everything, SECONDS, options.estimate)
    if not options.estimate:
        for rows in TABLES.values():
            print_table(rows)


def cell(rows: dict[str, tuple[str, int, tuple[str, ...]]], row: str, seed: int) -> Cell:
    spec, rounds, schedule = rows[row]
    return Cell(
        path=CELLS / f"synthetic-{row}-{seed}.json",
        spec=spec,
        shared={},
        data=f"synthetic:representation:seed={seed}",
        partition={"spec": "natural", "sizes": "0.9=5,0.1=10", "seed": seed},
        settings={"rounds": rounds, "model": "factor:2", "eval_every": 0, "seed": seed, "schedule": schedule},
        measure=distances,
    )


def distances(run: Any) -> dict[str, float]:
    """Sine of the largest principal angle between estimated and true representation, and mean ‖φz_k − its estimate‖.

    A personal model is linear here, so its predictions at the unit vectors are its estimate of φz_k.
    """
    truth = run.federation.truth
    weights = run.server.phi if hasattr(run.server, "phi") else run.server.weights
    basis = np.linalg.qr(np.asarray(weights["Dense_0"]["kernel"]))[0]
    true_basis = np.linalg.qr(truth["representation"][0])[0]
    angle = np.linalg.norm(true_basis - basis @ (basis.T @ true_basis), 2)
    units = np.eye(len(basis), dtype=np.float32)
    found = np.stack([run.predict(k, units, scale=1.0).mean for k in range(run.federation.num_clients)])
    return {"angle": float(angle), "error": float(np.linalg.norm(found - truth["weights"], axis=1).mean())}


def print_table(rows: dict[str, tuple[str, int, tuple[str, ...]]]) -> None:
    """Means over the seeds with standard errors, then paired differences of the last row to the others."""
    found = {row: [cell(rows, row, seed).summary() for seed in SEEDS] for row in rows}
    print(f"\n| method | rounds | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for row, (spec, rounds, _) in rows.items():
        print(f"| `{spec}` | {rounds} | {' | '.join(mean_of(found[row], column) for column in COLUMNS.values())} |")
    *others, own = rows
    print(f"\n| less | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for other in others:
        row = " | ".join(difference(found[own], found[other], column) for column in COLUMNS.values())
        print(f"| {own} − {other} | {row} |")


if __name__ == "__main__":
    main()
