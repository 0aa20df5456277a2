"""pFedBayes, sFedBayes and cFedBayes on the protocol of their paper, beside FedAvg; prints docs' tables.

    PRIORY_DATA=... python bench/fedbayes.py                     runs what is missing, then prints
    PRIORY_DATA=... python bench/fedbayes.py --estimate          only says what is missing and how long it would take
    PRIORY_DATA=... python bench/fedbayes.py --only mnist-small  one table

10 clients with 5 classes each, `classes:5:paired`; 50/950, 200/800 or 900/300 examples a class and client for training
and test; one hidden layer of 100 units; 20 local steps a round with batches of 50 (small) or 100. Seed s is that of the
partition and of the run, so methods are paired within a seed. Every finished cell is a JSON file of its own with the
command that makes it again; it is read back as long as the method's settings are those it was run with.
"""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

from cells import SHOWN, Cell, Column, difference, mean_of, run_missing  # noqa: E402

CELLS = Path(__file__).parents[1] / "docs" / "methods" / "pfedbayes"
PER_CLASS = {"small": "50/950", "medium": "200/800", "large": "900/300"}
SEEDS = {"small": (0, 1, 2), "medium": (0,), "large": (0,)}
SECONDS = 110  # about, for a cell on two cores
# Name of a row: the method as `priory compare` spells it.
METHODS = {
    "fedavg": "fedavg:step-size=0.01",
    "pfedbayes": "pfedbayes",
    "sfedbayes": "sfedbayes",
    "sfedbayes-kept": "sfedbayes:stateful=True",
    "cfedbayes": "cfedbayes",
}
UPLINK = {"kB up": Column(("communication", "up_bytes"), 1e-3, 0)}


@dataclass(frozen=True)
class Table:
    """One federation and the runs on it.

    Attributes:
        data: Name of the data set.
        size: Examples of a client, a key of PER_CLASS.
        rows: Method and more settings of each run.
        published: Personal and global accuracy in the paper, by row.
        partition: More arguments of `partition`.
        rounds: Rounds of every run; the paper has 800.
        seeds: Seeds of partition and run.
        more: Columns beside the usual ones.
    """

    data: str
    size: str
    rows: dict[str, tuple[str, dict[str, Any]]]
    published: dict[str, str] = field(default_factory=dict)
    partition: dict[str, Any] = field(default_factory=dict)
    rounds: int = 300
    seeds: tuple[int, ...] = (0,)
    more: dict[str, Column] = field(default_factory=dict)


def classes(data: str, size: str, **published: str) -> Table:
    """Clients that differ in their classes."""
    kept = ["sfedbayes-kept"] if (data, size) == ("mnist", "small") else []
    names = ["fedavg", "pfedbayes", "sfedbayes", *kept]
    return Table(data, size, {name: (METHODS[name], {}) for name in names}, published, seeds=SEEDS[size])


def halves(data: str, size: str, transform: str, published: str) -> Table:
    """Clients of two kinds; methods that do not know it only where clients are small."""
    names = ["fedavg", "pfedbayes", "cfedbayes"] if size == "small" else ["cfedbayes"]
    rows: dict[str, tuple[str, dict[str, Any]]] = {name: (METHODS[name], {}) for name in names}
    return Table(data, size, rows, {"cfedbayes": published}, {"transform": transform}, seeds=SEEDS[size])


TABLES = {
    "mnist-small": classes("mnist", "small", fedavg="– / 87.38", pfedbayes="94.13 / 90.44", sfedbayes="93.28 / 93.28"),
    "fashion_mnist-small": classes(
        "fashion_mnist", "small", fedavg="– / 81.51", pfedbayes="89.05 / 80.17", sfedbayes="87.64 / 83.62"
    ),
    "fashion_mnist-inverted-small": halves("fashion_mnist", "small", "invert-half", "85.99 / 79.28"),
    "mnist-fashion_mnist-small": halves("mnist", "small", "mix:fashion_mnist", "89.31 / 82.46"),
    "mnist-medium": classes(
        "mnist", "medium", fedavg="– / 90.60", pfedbayes="97.09 / 92.33", sfedbayes="97.15 / 95.77"
    ),
    "mnist-large": classes("mnist", "large", fedavg="– / 92.39", pfedbayes="98.79 / 94.39", sfedbayes="98.63 / 96.37"),
    "fashion_mnist-medium": classes(
        "fashion_mnist", "medium", fedavg="– / 83.90", pfedbayes="– / 82.33", sfedbayes="91.60 / 86.14"
    ),
    "fashion_mnist-large": classes(
        "fashion_mnist", "large", fedavg="– / 85.42", pfedbayes="– / 83.30", sfedbayes="93.07 / 87.96"
    ),
    "fashion_mnist-inverted-medium": halves("fashion_mnist", "medium", "invert-half", "89.82 / 81.20"),
    "fashion_mnist-inverted-large": halves("fashion_mnist", "large", "invert-half", "91.70 / 82.55"),
    "mnist-fashion_mnist-medium": halves("mnist", "medium", "mix:fashion_mnist", "93.06 / 86.47"),
    "mnist-fashion_mnist-large": halves("mnist", "large", "mix:fashion_mnist", "95.41 / 87.20"),
    # What not sending rare weights saves and costs.
    "tol": Table(
        "mnist",
        "small",
        {f"{tol}": (f"sfedbayes:inclusion=0.5,tol={tol}", {}) for tol in (0.0, 0.3, 0.45, 0.48, 0.49, 0.5)},
        rounds=100,
        more=UPLINK,
    ),
    # What leaving out uncertain clients does, where some have much worse images than others.
    "exclude-uncertain": Table(
        "mnist",
        "small",
        {f"{share}": ("pfedbayes", {"exclude_uncertain": share}) for share in (0.0, 0.2, 0.4)},
        partition={"transform": "corrupt-by-client:5", "validation": 0.2},
        rounds=100,
        seeds=(0, 1, 2),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimate", action="store_true", help="run nothing")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="which tables")
    options = parser.parse_args()
    everything = [
        cell(name, row, seed) for name in options.only for seed in TABLES[name].seeds for row in TABLES[name].rows
    ]
    run_missing(everything, SECONDS, options.estimate)
    if not options.estimate:
        for name in options.only:
            print_table(name)


def cell(name: str, row: str, seed: int) -> Cell:
    table = TABLES[name]
    spec, settings = table.rows[row]
    per_class = PER_CLASS[table.size]
    return Cell(
        path=CELLS / f"{name}-{row}-{seed}.json",
        spec=spec,
        shared={"steps": 20, "batch_size": 50 if table.size == "small" else 100},
        data=table.data,
        partition={"spec": "classes:5:paired", "clients": 10, "per_class": per_class, "seed": seed, **table.partition},
        settings={"rounds": table.rounds, "model": "mlp:100", "eval_every": 100, "seed": seed, **settings},
    )


def print_table(name: str) -> None:
    """Means over the seeds, with standard errors where there are several, then paired differences to the others."""
    table = TABLES[name]
    columns = SHOWN | table.more
    found = {row: [cell(name, row, seed).summary() for seed in table.seeds] for row in table.rows}
    print(f"\n### {name}, {len(table.seeds)} seeds\n")
    print("| method | " + " | ".join(columns) + " | published personal / global |")
    print("|---" * (len(columns) + 2) + "|")
    for row, (spec, settings) in table.rows.items():
        label = ", ".join([f"`{spec}`", *(f"`--{key.replace('_', '-')} {value}`" for key, value in settings.items())])
        numbers = " | ".join(mean_of(found[row], column) for column in columns.values())
        print(f"| {label} | {numbers} | {table.published.get(row, '–')} |")
    if len(table.seeds) == 1:
        return
    print("\n| less | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    rows = list(table.rows)
    for place, own in enumerate(rows[1:], start=1):
        for other in rows[:place]:
            numbers = " | ".join(difference(found[own], found[other], column) for column in columns.values())
            print(f"| {own} − {other} | {numbers} |")


if __name__ == "__main__":
    main()
