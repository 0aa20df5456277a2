"""FedHB beside the methods it is compared with, on the protocol of its paper's appendix H.2; prints docs' tables.

    PRIORY_DATA=... python bench/fedhb.py             runs what is missing, then prints
    PRIORY_DATA=... python bench/fedhb.py --estimate  only says what is missing and how long it would take

100 clients with 5 shards each, cohort 10, one hidden layer of 256 units; one local epoch for 100 rounds or five for 20.
Seed s is that of the partition and of the run, so methods are paired within a seed. Every finished cell is a JSON file
of its own with the command that makes it again; it is read back as long as the method's settings are those it was run
with.
"""

import argparse
import os
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

from cells import SHOWN, Cell, difference, mean_of, run_missing  # noqa: E402

CELLS = Path(__file__).parents[1] / "docs" / "methods" / "fedhb"
SEEDS = (0, 1, 2)
DATA = ("mnist", "fashion_mnist")
WORKS = {"1x100": (1, 100), "5x20": (5, 20)}
METHODS = ("fedavg", "fedprox:mu=0.1", "fedbabu:finetune-step-size=0.003", "fedhb-niw", "fedhb-mixture")
SECONDS = 25  # about, for a cell on two cores
# Global and personal accuracy, tables 10 and 11 of the paper.
PUBLISHED = {
    ("mnist", "1x100"): {"fedavg": (97.15, 97.83), "fedprox": (97.38, 97.96), "fedbabu": (97.16, 97.73),
                         "fedhb-niw": (97.81, 98.78), "fedhb-mixture": (97.94, 98.85)},
    ("mnist", "5x20"): {"fedavg": (94.86, 96.10), "fedprox": (95.28, 96.45), "fedbabu": (94.59, 95.89),
                        "fedhb-niw": (95.51, 96.53), "fedhb-mixture": (95.68, 96.67)},
    ("fashion_mnist", "1x100"): {"fedavg": (81.98, 90.59), "fedprox": (83.25, 90.72), "fedbabu": (83.86, 91.03),
                                 "fedhb-niw": (84.18, 92.48), "fedhb-mixture": (84.28, 92.54)},
    ("fashion_mnist", "5x20"): {"fedavg": (73.70, 86.85), "fedprox": (73.67, 87.35), "fedbabu": (76.10, 89.02),
                                "fedhb-niw": (77.48, 89.91), "fedhb-mixture": (77.60, 89.53)},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimate", action="store_true", help="run nothing")
    options = parser.parse_args()
    everything = [cell(data, work, spec, seed) for data in DATA for work in WORKS for seed in SEEDS for spec in METHODS]
    run_missing(everything, SECONDS, options.estimate)
    if not options.estimate:
        for data in DATA:
            for work in WORKS:
                print_table(data, work)


def cell(data: str, work: str, spec: str, seed: int) -> Cell:
    epochs, rounds = WORKS[work]
    return Cell(
        path=CELLS / f"{data}-{work}-{name_of(spec)}-{seed}.json",
        spec=spec,
        shared={"step_size": 0.1, "momentum": 0.9, "batch_size": 50, "epochs": epochs},
        data=data,
        partition={"spec": "shards:5", "clients": 100, "seed": seed},
        settings={
            "cohort": 10,
            "rounds": rounds,
            "schedule": ("step-size=step:0.1@0.5,0.75",),
            "model": "mlp:256",
            "eval_every": 0,
            "seed": seed,
        },
    )


def name_of(spec: str) -> str:
    return spec.partition(":")[0]


def print_table(data: str, work: str) -> None:
    """Means over the seeds with standard errors, then paired differences of FedHB to each of the others."""
    table = {name_of(spec): [cell(data, work, spec, seed).summary() for seed in SEEDS] for spec in METHODS}
    print(f"\n### {data}, {WORKS[work][0]} x {WORKS[work][1]}\n")
    print("| method | " + " | ".join(SHOWN) + " | published |")
    print("|---" * (len(SHOWN) + 2) + "|")
    for spec in METHODS:
        name = name_of(spec)
        both = " / ".join(f"{value:.2f}" for value in PUBLISHED[data, work][name])
        print(f"| `{spec}` | " + " | ".join(mean_of(table[name], column) for column in SHOWN.values()) + f" | {both} |")
    print("\n| less | " + " | ".join(SHOWN) + " |")
    print("|---" * (len(SHOWN) + 1) + "|")
    for own in ("fedhb-niw", "fedhb-mixture"):
        for other in ("fedavg", "fedprox", "fedbabu"):
            differences = (difference(table[own], table[other], column) for column in SHOWN.values())
            print(f"| `{own}` − `{other}` | " + " | ".join(differences) + " |")


if __name__ == "__main__":
    main()
