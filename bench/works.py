"""The FedAvg work that simulators are compared on: one description, read by every side, whatever it is written in.

Needs numpy alone, so that each side can run in an environment of its own. Pixels are random, since only time is
measured; every side sees them as float32 in [0, 1].
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

THREADS = 2


@dataclass(frozen=True)
class Work:
    """A round: `cohort` of `clients` make one pass each over their examples with SGD, then their weights are averaged.

    Attributes:
        network: `mlp` is 784-256-classes; `cnn` is 5x5x32, pool, 5x5x64, pool, dense 128, dense classes.
        momentum: Heavy-ball momentum, started afresh by each client.
    """

    clients: int
    cohort: int
    examples: int
    batch: int
    classes: int
    network: str
    step_size: float
    momentum: float

    def pixels(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's images, (examples, 28, 28, 1) uint8, and labels."""
        draw = np.random.default_rng(client)
        x = draw.integers(0, 256, (self.examples, 28, 28, 1), dtype=np.uint8)
        return x, draw.integers(0, self.classes, self.examples)

    def inputs(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """The same with pixels as a model sees them."""
        x, y = self.pixels(client)
        return x.astype(np.float32) / 255, y


WORKS = {
    "fedavg-100": Work(100, 10, 600, 50, 10, "mlp", 0.1, 0.9),
    "emnist-mlp": Work(100, 10, 100, 20, 62, "mlp", 0.1, 0.9),
    "emnist-cnn": Work(100, 10, 100, 20, 62, "cnn", 0.03, 0.0),
}


def answer(about: str | None, seconds_of_rounds: Callable[[Work, int], list[float]]) -> None:
    """The command line of one side: time a named work and print one JSON line, the seconds of its fastest round."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds, after one that is not")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"{options.rounds} rounds give no time; choose 1 or more")
    seconds = seconds_of_rounds(WORKS[options.work], options.rounds)
    print(json.dumps({"work": options.work, "seconds": min(seconds), "rounds": len(seconds)}), flush=True)
