"""How a round grows: time, memory and a fitted exponent over clients, cohort, parameters, samples, clusters, devices.

    python bench/scaling.py                         every family, about ten minutes on two cores
    python bench/scaling.py --only clients cohort   some of them
    python bench/scaling.py --quick                 two or three small sizes of each: that it runs, nothing to keep

Each point runs in a process of its own, so that peak memory is its own. Each family is written to
`bench/results/scaling-<family>.json`; `python bench/render.py` puts them into the document. The exponent is the slope
of log time over log size on the upper half of the sizes, where fixed costs no longer hide it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from measure import describe, exponent, is_idle, machine, save

PIXELS = 64  # of the tiny images of most families


@dataclass(frozen=True)
class Point:
    """What one process measures: a method on a federation of random pixels.

    Attributes:
        method: Registered name, and its fields but optimiser and work.
        inputs: Numbers an example.
        batch: Examples in a minibatch; one pass over all of them is a client's work.
        test: Share of each client's examples that is held out, so that everybody is evaluated at the end.
    """

    method: str
    fields: dict[str, Any]
    model: str
    clients: int
    cohort: int
    examples: int
    batch: int
    rounds: int
    inputs: int = PIXELS
    test: float = 0.0


@dataclass(frozen=True)
class Family:
    """Sizes of one quantity, and the point that each makes.

    Attributes:
        what: The quantity that grows, in words.
        fixed: What stays as it is, in words.
        at_most: The exponent that a round's time needs: 0 where the size has no part in the work, else 1.
    """

    what: str
    fixed: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    point: Callable[[int], Point]
    at_most: float
    limit_gb: float | None = None


def _clients(method: str, rounds: int) -> Callable[[int], Point]:
    # Four examples a client, one of them to test on: a million clients are evaluated too.
    return lambda n: Point(method, {}, "mlp:32", n, 10, 4, 3, rounds, test=0.25)


FAMILIES = {
    "clients": Family(
        "clients N",
        "FedAvg, cohort 10, 4 examples of 64 numbers each, MLP 64-32-10",
        (100, 1000, 10_000, 100_000, 1_000_000),
        (20, 40),
        _clients("fedavg", 512),
        at_most=0.0,
        limit_gb=4.0,
    ),
    "clients-stateful": Family(
        "clients N",
        "Ditto, which keeps a network for each client, cohort 10, as above",
        (100, 1000, 10_000, 100_000, 1_000_000),
        (20, 40),
        _clients("ditto", 256),
        at_most=0.0,
        limit_gb=4.0,
    ),
    "cohort": Family(
        "cohort",
        "FedAvg, 2000 clients of 40 examples of 64 numbers, batch 20, MLP 64-32-10",
        (10, 32, 100, 316, 1000),
        (2, 4),
        lambda n: Point("fedavg", {}, "mlp:32", 2 * n if n < 10 else 2000, n, 40, 20, max(8, 6400 // n)),
        at_most=1.0,
    ),
    "parameters": Family(
        "parameters",
        "FedAvg, cohort 4 of 8 clients, 40 examples of 784 numbers, batch 20, one hidden layer",
        (10_000, 100_000, 1_000_000, 10_000_000),
        (10_000, 20_000),
        lambda n: Point(
            "fedavg", {}, f"mlp:{round((n - 10) / 795)}", 8, 4, 40, 20, max(4, min(256, 20_000_000 // n)), 784
        ),
        at_most=1.0,
    ),
    "samples": Family(
        "samples S a step",
        "pFedBayes, weights drawn, cohort 4 of 8 clients, 5 steps of 50 images, MLP 784-100-10",
        (1, 2, 4, 8, 16),
        (1, 2),
        lambda n: Point(
            "pfedbayes", {"samples_per_step": n, "draw": "weights", "samples": 1}, "mlp:100", 8, 4, 250, 50, 16, 784
        ),
        at_most=1.0,
    ),
    "clusters-cfedbayes": Family(
        "clusters K",
        "cFedBayes, cohort 4 of 32 clients, one pass over 200 images, batch 50, MLP 784-50-10",
        (1, 2, 4, 8, 16),
        (1, 2),
        lambda n: Point("cfedbayes", {"clusters": n, "samples": 16}, "mlp:50", 32, 4, 200, 50, 16, 784),
        at_most=1.0,
    ),
    "clusters-fedhb-mixture": Family(
        "prototypes K",
        "FedHB mixture, cohort 4 of 32 clients, one pass over 200 images, batch 50, MLP 784-50-10",
        (1, 2, 4, 8, 16),
        (1, 2),
        lambda n: Point("fedhb-mixture", {"num_prototypes": n}, "mlp:50", 32, 4, 200, 50, 16, 784),
        at_most=1.0,
    ),
    "devices": Family(
        "devices",
        "FedAvg, cohort 10 of 10 clients, one pass over 600 images, batch 50, MLP 784-256-10",
        tuple(range(1, (os.cpu_count() or 1) + 1))[:2],
        (1, 2),
        lambda n: Point("fedavg", {}, "mlp:256", 10, 10, 600, 50, 32, 784),
        at_most=0.0,
    ),
}
QUICK_ROUNDS = 2
MANY = 50_000  # clients; evaluating more takes longer than the rounds, so that is done once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="which families")
    parser.add_argument("--quick", action="store_true", help="small sizes, printed and not kept")
    parser.add_argument("--point", nargs=2, metavar=("FAMILY", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(_measured(options.point[0], int(options.point[1]), options.quick)))
        return
    for name in options.only:
        family, told = FAMILIES[name], machine()
        print(describe(told) + ("" if is_idle(told) else ": too busy for times to be trusted or kept"), flush=True)
        points = []
        for size in family.quick if options.quick else family.sizes:
            points.append(_in_a_process(name, size, options.quick))
            print(f"{name:24} {_line(points[-1])}", flush=True)
        slope = exponent([p["size"] for p in points], [p["seconds"] for p in points])
        print(f"{name:24} exponent {slope:.2f}, needs {family.at_most:.0f} at most", flush=True)
        if not options.quick and is_idle(told):
            words = {"what": family.what, "fixed": family.fixed, "at_most": family.at_most}
            save(f"scaling-{name}", told, **words, limit_gb=family.limit_gb, exponent=slope, points=points)


def _line(point: dict[str, Any]) -> str:
    return (
        f"{point['size']:>9,}: {1e3 * point['seconds']:.2f} ms a round, {point['peak_rss_bytes'] / 1e9:.2f} GB, "
        f"{point['build_seconds']:.1f} s to build, {point['evaluate_seconds']:.1f} s to evaluate everybody"
    )


def _in_a_process(name: str, size: int, quick: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--point", name, str(size), *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return {"size": size, **json.loads(done.stdout.splitlines()[-1])}


def _measured(name: str, size: int, quick: bool) -> dict[str, float]:
    """Seconds a round, to build the federation and to evaluate everybody, and peak RSS, of one point."""
    import jax

    jax.config.update("jax_num_cpu_devices", size if name == "devices" else os.cpu_count() or 1)
    import numpy as np

    import priory
    from priory import Optimiser, Work, methods

    point = FAMILIES[name].point(size)
    draw = np.random.default_rng(0)
    num = point.clients * point.examples
    x = draw.integers(0, 256, (num, point.inputs), dtype=np.uint8)
    y, client = draw.integers(0, 10, num), np.repeat(np.arange(point.clients), point.examples)
    started = time.perf_counter()
    federation = priory.data.from_arrays(x, y, client, test=point.test, scaling="unit", classes=list("0123456789"))
    built = time.perf_counter() - started
    del x, y, client
    method = methods.get(point.method)
    rest = {} if point.method in ("pfedbayes", "cfedbayes") else {"optimiser": Optimiser(step_size=0.05)}
    made = method(work=Work(batch_size=point.batch), **rest, **point.fields)
    settings = {"cohort": point.cohort, "model": point.model, "eval_every": 0}
    rounds = QUICK_ROUNDS if quick else point.rounds
    looks = iter((False, True))  # the first block, one round that compiles; no evaluation follows a run cut short
    priory.simulate(made, federation, rounds=rounds + 1, stop=lambda: next(looks), **settings)
    seconds = []
    for _ in range(1 if quick or point.clients > MANY else 3):
        run = priory.simulate(made, federation, rounds=rounds, **settings)
        seconds.append(run.seconds["train"] / rounds)
        evaluated, peak = run.seconds["evaluate"], run.peak_rss_bytes
        del run  # its records, before the next run has its own
    return {
        "seconds": min(seconds),
        "build_seconds": built,
        "evaluate_seconds": evaluated,
        "peak_rss_bytes": peak,
    }


if __name__ == "__main__":
    main()
