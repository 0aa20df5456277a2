"""pFedBayes, sFedBayes and cFedBayes on the protocol of their paper, beside FedAvg; prints docs' tables.

    PRIORY_DATA=... python bench/fedbayes.py             runs what is missing, then prints
    PRIORY_DATA=... python bench/fedbayes.py --estimate  only says what is missing and how long it would take

10 clients with 5 classes each, `classes:5:paired`; 50/950, 200/800 or 900/300 examples a class and client for training
and test; one hidden layer of 100 units; 20 local steps a round with batches of 50 (small) or 100. Seed s is that of the
partition and of the run, so methods are paired within a seed. Every finished cell is a JSON file of its own with the
command that makes it again; it is read back as long as the method's settings are those it was run with.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

from cells import SHOWN, Cell, difference, mean_of, run_missing  # noqa: E402

CELLS = Path(__file__).parents[1] / "docs" / "methods" / "pfedbayes"
ROUNDS = 300  # the paper has 800
PER_CLASS = {"small": "50/950", "medium": "200/800", "large": "900/300"}
SEEDS = {"small": (0, 1, 2), "medium": (0,), "large": (0,)}
SECONDS = 100  # about, for a cell on two cores
FEDAVG = "fedavg:step-size=0.01"
SPARSE = "sfedbayes"
# Name of a table: data set, transform, methods; published personal and global accuracy of each method by size.
TABLES: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "mnist": ("mnist", None, (FEDAVG, "pfedbayes", SPARSE)),
    "fashion_mnist": ("fashion_mnist", None, (FEDAVG, "pfedbayes", SPARSE)),
    "fashion_mnist-inverted": ("fashion_mnist", "invert-half", (FEDAVG, "pfedbayes", "cfedbayes")),
    "mnist-fashion_mnist": ("mnist", "mix:fashion_mnist", (FEDAVG, "pfedbayes", "cfedbayes")),
}
PUBLISHED = {
    ("mnist", "small"): {"fedavg": "– / 87.38", "pfedbayes": "94.13 / 90.44", "sfedbayes": "93.28 / 93.28"},
    ("mnist", "medium"): {"fedavg": "– / 90.60", "pfedbayes": "97.09 / 92.33", "sfedbayes": "97.15 / 95.77"},
    ("mnist", "large"): {"fedavg": "– / 92.39", "pfedbayes": "98.79 / 94.39", "sfedbayes": "98.63 / 96.37"},
    ("fashion_mnist", "small"): {"fedavg": "– / 81.51", "pfedbayes": "89.05 / 80.17", "sfedbayes": "87.64 / 83.62"},
    ("fashion_mnist", "medium"): {"fedavg": "– / 83.90", "pfedbayes": "– / 82.33", "sfedbayes": "91.60 / 86.14"},
    ("fashion_mnist", "large"): {"fedavg": "– / 85.42", "pfedbayes": "– / 83.30", "sfedbayes": "93.07 / 87.96"},
    ("fashion_mnist-inverted", "small"): {"cfedbayes": "85.99 / 79.28"},
    ("fashion_mnist-inverted", "medium"): {"cfedbayes": "89.82 / 81.20"},
    ("fashion_mnist-inverted", "large"): {"cfedbayes": "91.70 / 82.55"},
    ("mnist-fashion_mnist", "small"): {"cfedbayes": "89.31 / 82.46"},
    ("mnist-fashion_mnist", "medium"): {"cfedbayes": "93.06 / 86.47"},
    ("mnist-fashion_mnist", "large"): {"cfedbayes": "95.41 / 87.20"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimate", action="store_true", help="run nothing")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="which tables")
    parser.add_argument("--sizes", nargs="+", choices=PER_CLASS, default=list(PER_CLASS), help="which federations")
    options = parser.parse_args()
    run_missing(list(everything(options.only, options.sizes)), SECONDS, options.estimate)
    if not options.estimate:
        for table in options.only:
            for size in options.sizes:
                print_table(table, size)


def everything(tables: list[str], sizes: list[str]) -> Iterator[Cell]:
    """All cells, the small federations first."""
    for size in sizes:
        for table in tables:
            for seed in SEEDS[size]:
                for spec in TABLES[table][2]:
                    yield cell(table, size, spec, seed)


def cell(table: str, size: str, spec: str, seed: int) -> Cell:
    data, transform, _ = TABLES[table]
    partition = {"spec": "classes:5:paired", "clients": 10, "per_class": PER_CLASS[size], "seed": seed}
    if transform is not None:
        partition["transform"] = transform
    return Cell(
        path=CELLS / f"{table}-{size}-{name_of(spec)}-{seed}.json",
        spec=spec,
        shared={"steps": 20, "batch_size": 50 if size == "small" else 100},
        data=data,
        partition=partition,
        settings={"rounds": ROUNDS, "model": "mlp:100", "eval_every": 50, "seed": seed},
    )


def name_of(spec: str) -> str:
    return spec.partition(":")[0]


def print_table(table: str, size: str) -> None:
    """Means over the seeds, with standard errors where there are several, then paired differences to the others."""
    specs = TABLES[table][2]
    found = {name_of(spec): [cell(table, size, spec, seed).summary() for seed in SEEDS[size]] for spec in specs}
    print(f"\n### {table}, {size}, {len(SEEDS[size])} seeds\n")
    print("| method | " + " | ".join(SHOWN) + " | published personal / global |")
    print("|---" * (len(SHOWN) + 2) + "|")
    for spec in specs:
        name = name_of(spec)
        row = " | ".join(mean_of(found[name], column) for column in SHOWN)
        print(f"| `{spec}` | {row} | {PUBLISHED[table, size].get(name, '–')} |")
    if len(SEEDS[size]) == 1:
        return
    print("\n| less | " + " | ".join(SHOWN) + " |")
    print("|---" * (len(SHOWN) + 1) + "|")
    names = [name_of(spec) for spec in specs]
    for place, own in enumerate(names[1:], start=1):
        for other in names[:place]:
            row = " | ".join(difference(found[own], found[other], column) for column in SHOWN)
            print(f"| `{own}` − `{other}` | {row} |")


if __name__ == "__main__":
    main()
