"""The project's own benchmark: each figure is a ratio of two sides measured alternately in one run.

    make bench                                    everything
    python bench/run.py --only fedavg overhead    some of it

Rules: the machine should be idle (a busy core slows PyTorch's two threads far more than it slows XLA, so ratios taken
under load flatter this project; a busy machine is called so, and its figures are not kept). Best of several rounds,
both sides alternating, on random pixels. Each figure is kept in `bench/results/`, from which `python bench/render.py`
writes the tables of `docs/benchmarks.md`; accuracies are the business of `priory reproduce`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from by_hand import fedavg_round  # noqa: E402
from measure import LAUNCHES, alternate, describe, is_idle, machine, save  # noqa: E402
from works import WORKS  # noqa: E402

import priory  # noqa: E402
from priory import FedAvg, FedHBMixture, FedHBNIW, FedVI, Optimiser, PFedBayes, SFedBayes, Work  # noqa: E402
from priory.bayes import kernels  # noqa: E402

HERE = Path(__file__).parent


def main() -> None:
    works: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
        "fedavg": fedavg,
        "cnn": cnn,
        "overhead": overhead,
        "pfedbayes": pfedbayes,
        "sfedbayes": sfedbayes,
        "fedhb": fedhb,
        "langevin": langevin,
        "fedvi": fedvi,
        "clients": clients,
        "flower": flower,
        "fedjax": fedjax,
        "pfl": pfl,
        "startup": startup,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="a Python with torch==2.13.0, for the other side of fedavg, cnn and pfedbayes")
    for other in ("flower", "fedjax", "pfl"):
        parser.add_argument(
            f"--{other}", metavar="PYTHON", help=f"a Python with {other}, for the other side of {other}"
        )
    parser.add_argument("--only", nargs="+", choices=works, default=list(works), help="which figures")
    parser.add_argument("--one-size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_size is not None:
        print(json.dumps(_federation_of(options.one_size)))
        return
    for name in options.only:
        told = machine()
        trusted = "" if is_idle(told) else "; too busy, so what follows is not to be trusted and is not kept"
        print(f"{name:11} on {describe(told)}{trusted}", flush=True)
        rows = works[name](options)
        if rows and is_idle(told):
            save(name, told, rows=rows)


def fedavg(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One epoch of 10 clients with 600 examples, MLP 784-256-10, batch 50, momentum 0.9."""
    method = FedAvg(optimiser=Optimiser(step_size=0.1, momentum=0.9), work=Work(batch_size=50))
    words = "FedAvg round, 10 clients x 12 steps, MLP 784-256-10, batch 50, momentum"
    federation = _random_federation(10, 600)
    return _race("fedavg", words, options, method, federation, "mlp:256", aim="at least 3, aim 4", rounds=60)


def cnn(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Four steps of 4 clients, two 5x5 convolutions, batch 50."""
    method = FedAvg(optimiser=Optimiser(step_size=0.01), work=Work(steps=4, batch_size=50))
    words = "CNN round, 4 clients x 4 steps, 5x5x32, 5x5x64, dense 128, batch 50"
    return _race("cnn", words, options, method, _random_federation(4, 200), "cnn", aim="no slower", rounds=5)


def pfedbayes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Twenty steps of 10 clients with 1000 examples, MLP 784-100-10, batch 50, Adam on both distributions."""
    words, aim = "pFedBayes round, 10 clients x 20 steps, MLP 784-100-10, batch 50, Adam on both", "at least 4, aim 6"
    return _race("pfedbayes", words, options, PFedBayes(), _random_federation(10, 1000), "mlp:100", aim=aim, rounds=20)


def sfedbayes(_: argparse.Namespace) -> list[dict[str, Any]]:
    """A round of sFedBayes against one of pFedBayes that draws weights, both ours: the work of `pfedbayes`."""
    federation = _random_federation(10, 1000)
    ours, plain = alternate(
        lambda: _seconds_a_round(SFedBayes(stateful=True), federation, "mlp:100", 20),
        lambda: _seconds_a_round(PFedBayes(draw="weights"), federation, "mlp:100", 20),
    )
    work = "sFedBayes round against a pFedBayes round that draws weights, both ours"
    return [_row("sfedbayes", work, ours / plain, "the time", "at most 1.6", ours, plain)]


def overhead(_: argparse.Namespace) -> list[dict[str, Any]]:
    """The FedAvg round through `simulate` against the same mathematics jitted by hand."""
    federation = _random_federation(10, 600)
    method = FedAvg(optimiser=Optimiser(step_size=0.1, momentum=0.9), work=Work(batch_size=50))
    rows = federation.x.reshape(10, 600, 784), federation.y.reshape(10, 600)
    by_hand, weights = fedavg_round(*rows)
    keys = [jax.random.key(i) for i in range(20)]

    def hand() -> float:
        nonlocal weights
        started = time.perf_counter()
        for key in keys:
            weights = by_hand(weights, key)
        jax.block_until_ready(weights)
        return (time.perf_counter() - started) / len(keys)

    ours, theirs = alternate(lambda: _seconds_a_round(method, federation, "mlp:256", 60), hand, launches=6)
    work = "the engine: that FedAvg round through `simulate` against the same mathematics jitted by hand"
    return [_row("overhead", work, ours / theirs, "the time", "at most 1.15", ours, theirs)]


def fedhb(_: argparse.Namespace) -> list[dict[str, Any]]:
    """A round of FedHB against one of FedAvg, both ours: the work of `fedavg`."""
    federation, local = _random_federation(10, 600), {"optimiser": Optimiser(step_size=0.1, momentum=0.9)}
    local["work"] = Work(batch_size=50)
    aims = {FedHBNIW(**local): "at most 1.3", FedHBMixture(num_prototypes=2, **local): "at most 3"}
    names, rows = {FedHBNIW: "FedHB NIW", FedHBMixture: "FedHB mixture, K = 2,"}, []
    for method, aim in aims.items():
        ours, plain = alternate(
            lambda method=method: _seconds_a_round(method, federation, "mlp:256", 60),
            lambda: _seconds_a_round(FedAvg(**local), federation, "mlp:256", 60),
            launches=6,
        )
        work = f"{names[type(method)]} round against that FedAvg round, both ours"
        rows.append(_row("fedhb", work, ours / plain, "the time", aim, ours, plain))
    return rows


def langevin(_: argparse.Namespace) -> list[dict[str, Any]]:
    """A Langevin step on a last layer 64-10 over 100 examples against the gradient that it needs, both in a loop."""
    steps, draw = 2000, np.random.default_rng(0)
    features, labels = jnp.asarray(draw.normal(size=(100, 64)), jnp.float32), jnp.asarray(draw.integers(0, 10, 100))
    start = {"kernel": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}

    def log_density(z: Any, key: Any) -> Any:
        del key
        logits = features @ z["kernel"] + z["bias"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return jnp.sum(chosen) - 0.5 * sum(jnp.sum(leaf**2) for leaf in z.values())

    def ascend(_: Any, z: Any) -> Any:
        return jax.tree.map(lambda a, b: a + 1e-3 * b, z, jax.grad(log_density)(z, None))

    chain = jax.jit(lambda z, key: kernels.sample("ula", log_density, z, 1e-3, key, num_steps=steps).last)
    alone = jax.jit(lambda z: jax.lax.fori_loop(0, steps, ascend, z))

    def seconds(program: Callable[..., Any], *arguments: Any) -> float:
        started = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        return (time.perf_counter() - started) / steps

    ours, theirs = alternate(
        lambda: seconds(chain, start, jax.random.key(0)), lambda: seconds(alone, start), launches=10
    )
    work = "a Langevin step of FedPop on a last layer 64-10, 100 examples, against the gradient that it needs"
    rows = [_row("langevin", work, ours / theirs, "the time", "at most 1.3", ours, theirs)]
    kept = jax.jit(lambda z, key: kernels.sample("ula", log_density, z, 1e-3, key, num_steps=steps))
    memory = kept.lower(start, jax.random.key(0)).compile().memory_analysis()
    numbers = steps * sum(leaf.size for leaf in start.values())
    held = (memory.temp_size_in_bytes + memory.output_size_in_bytes) / (4 * numbers)
    print(f"{'langevin':11} a chain that keeps all of its M steps holds {held:.2f} M d numbers (M d are kept)")
    return rows


def fedvi(_: argparse.Namespace) -> list[dict[str, Any]]:
    """A round of FedVI against one of FedAvg with the same embedding, both ours: 4 clients, 3 steps of 32 images."""
    federation, network, work = _random_federation(4, 96), "reddi:16,32,64", Work(batch_size=32)
    ours, plain = alternate(
        lambda: _seconds_a_round(FedVI(work=work), federation, network, 10),
        lambda: _seconds_a_round(FedAvg(work=work), federation, network, 10),
    )
    work = (
        "FedVI round against a FedAvg round with the same embedding, both ours: `reddi:16,32,64`, 4 clients x 3 steps"
    )
    return [_row("fedvi", work, ours / plain, "the time", "at most 1.5", ours, plain)]


def clients(_: argparse.Namespace) -> list[dict[str, Any]]:
    """A federation of 10 000 clients against one of 100, cohort 10; each in a process of its own for its peak RSS."""
    sizes = {100: [], 10_000: []}
    for _ in range(LAUNCHES):
        for size, seen in sizes.items():
            command = [sys.executable, __file__, "--one-size", str(size)]
            seen.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    few, many = (min(one["seconds"] for one in sizes[size]) for size in sizes)
    rss = max(one["peak_rss_bytes"] for one in sizes[10_000]) / 1e9
    words = f"the time of a round, peak RSS {rss:.1f} GB"
    return [_row("clients", "10 000 clients against 100, cohort 10", many / few, words, "at most 1.3, 3 GB", many, few)]


def flower(options: argparse.Namespace) -> list[dict[str, Any]]:
    """FedAvg in Flower's simulation, a PyTorch client on Ray."""
    return _simulators("flower", "Flower's simulation", options.flower, ("fedavg-100",))


def fedjax(options: argparse.Namespace) -> list[dict[str, Any]]:
    """FedAvg in FedJAX on work of the size of EMNIST."""
    return _simulators("fedjax", "FedJAX", options.fedjax, ("emnist-mlp", "emnist-cnn"))


def pfl(options: argparse.Namespace) -> list[dict[str, Any]]:
    """FedAvg in pfl on work of the size of EMNIST."""
    return _simulators("pfl", "pfl", options.pfl, ("emnist-mlp", "emnist-cnn"))


def startup(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds from the shell to the help, and to the end of a first round with and without compiled programs kept."""
    priory_ = [str(Path(sys.executable).with_name("priory"))]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "XDG_CACHE_HOME": home}
        runs = iter(range(100))

        def seconds(*words: str) -> float:
            started = time.perf_counter()
            subprocess.run([*priory_, *words], check=True, capture_output=True, env=environment)
            return time.perf_counter() - started

        def first_round() -> float:
            words = ("--data", "digits", "--clients", "20", "--rounds", "1", "--eval-every", "0")
            return seconds("run", "fedavg", *words, "--out", f"{home}/{next(runs)}")

        asked = min(seconds("--help") for _ in range(LAUNCHES))
        cold = first_round()
        warm = min(first_round() for _ in range(LAUNCHES))
    print(
        f"startup     priory --help {asked:.2f} s; a run of one round {warm:.2f} s, with nothing compiled {cold:.2f} s"
    )
    return [
        {"work": "`priory --help`", "seconds": asked},
        {"work": "`priory run fedavg --data digits --clients 20 --rounds 1`, evaluated", "seconds": warm},
        {"work": "the same with nothing compiled yet", "seconds": cold},
    ]


def _race(
    name: str,
    work: str,
    options: argparse.Namespace,
    method: Any,
    federation: Any,
    model: str,
    *,
    aim: str,
    rounds: int,
) -> list[dict[str, Any]]:
    if options.torch is None:
        print(f"{name:11} skipped: --torch names no Python with PyTorch")
        return []
    ours, theirs = alternate(
        lambda: _seconds_a_round(method, federation, model, rounds),
        lambda: _other_side([options.torch, str(HERE / "torch_loops.py"), name]),
    )
    return [_row(name, work, theirs / ours, "as fast as PyTorch", aim, ours, theirs)]


def _simulators(name: str, title: str, python: str | None, works: tuple[str, ...]) -> list[dict[str, Any]]:
    """Our round against that of another simulator on the same works."""
    if python is None:
        print(f"{name:11} skipped: --{name} names no Python with it")
        return []
    rows = []
    for work_name in works:
        work = WORKS[work_name]
        pixels = [work.pixels(client) for client in range(work.clients)]
        x, y = (np.concatenate(parts) for parts in zip(*pixels, strict=True))
        client = np.repeat(np.arange(work.clients), work.examples)
        names = [str(label) for label in range(work.classes)]
        federation = priory.data.from_arrays(x, y, client, test=0.0, scaling="unit", classes=names)
        optimiser = Optimiser(step_size=work.step_size, momentum=work.momentum)
        method = FedAvg(optimiser=optimiser, work=Work(batch_size=work.batch))
        model = "mlp:256" if work.network == "mlp" else "cnn"
        ours, theirs = alternate(
            lambda method=method, federation=federation, model=model, work=work: _seconds_a_round(
                method, federation, model, 10, cohort=work.cohort
            ),
            lambda work_name=work_name: _other_side([python, str(HERE / f"{name}_loop.py"), work_name]),
        )
        steps = work.examples // work.batch
        net = "MLP 784-256" if work.network == "mlp" else "5x5x32, 5x5x64, dense 128"
        words = f"FedAvg round, 10 of 100 clients x {steps} steps, {net}, {work.classes} classes, batch {work.batch}"
        rows.append(_row(name, words, theirs / ours, f"as fast as {title}", "", ours, theirs))
    return rows


def _other_side(command: list[str]) -> float:
    """Seconds a round as another program in another environment prints them."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])["seconds"]


def _seconds_a_round(method: Any, federation: Any, model: str, rounds: int, **settings: Any) -> float:
    run = priory.simulate(method, federation, rounds=rounds, model=model, eval_every=0, **settings)
    return run.seconds["train"] / rounds


def _random_federation(num: int, examples: int) -> Any:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (num * examples, 28, 28, 1), dtype=np.uint8)
    y = draw.integers(0, 10, num * examples)
    client = np.repeat(np.arange(num), examples)
    return priory.data.from_arrays(x, y, client, test=0.0, scaling="unit")


def _federation_of(num: int) -> dict[str, float]:
    """Seconds a round and peak RSS of a federation with so many clients of 20 examples."""
    federation = _random_federation(num, 20)
    method = FedAvg(optimiser=Optimiser(step_size=0.1, momentum=0.9), work=Work(batch_size=10))
    settings = {"cohort": 10, "model": "mlp:256", "eval_every": 0, "rounds": 300}
    priory.simulate(method, federation, **settings)
    run = min((priory.simulate(method, federation, **settings) for _ in range(3)), key=lambda run: run.seconds["train"])
    return {"seconds": run.seconds["train"] / run.completed, "peak_rss_bytes": run.peak_rss_bytes}


def _row(name: str, work: str, ratio: float, words: str, aim: str, ours: float, theirs: float) -> dict[str, Any]:
    """A figure as it is printed and kept."""
    times = f"{1e3 * ours:.2f} ms against {1e3 * theirs:.2f} ms"
    print(f"{name:11} {ratio:.2f} times {words}{aim and f' ({aim})'}; {times}: {work}", flush=True)
    return {"work": work, "ratio": ratio, "words": words, "aim": aim, "ours_seconds": ours, "theirs_seconds": theirs}


if __name__ == "__main__":
    main()
