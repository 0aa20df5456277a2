"""The project's own benchmark: each figure is a ratio of two sides measured alternately in one run.

    make bench                                    everything
    python bench/run.py --only fedavg overhead    some of it

Rules: the machine should be idle (a busy core slows PyTorch's two threads far more than it slows XLA, so ratios taken
under load flatter this project; a busy machine is called so). Best of several rounds, both
sides alternating. Random pixels where only time is measured; accuracies come from real data in PRIORY_DATA.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from by_hand import fedavg_round  # noqa: E402

import priory  # noqa: E402
from priory import FedAvg, FedHBMixture, FedHBNIW, FedProx, FedVI, Optimiser, PFedBayes, SFedBayes, Work  # noqa: E402
from priory.bayes import kernels  # noqa: E402

HERE = Path(__file__).parent
RESULTS = HERE / "accuracy"
LAUNCHES = 3
PARTS = ("global", "personal")


def main() -> None:
    works: dict[str, Callable[[argparse.Namespace], None]] = {
        "fedavg": fedavg,
        "cnn": cnn,
        "overhead": overhead,
        "pfedbayes": pfedbayes,
        "sfedbayes": sfedbayes,
        "fedhb": fedhb,
        "langevin": langevin,
        "fedvi": fedvi,
        "clients": clients,
        "accuracy": accuracy,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="a Python with torch==2.13.0, for the other side of fedavg, cnn and pfedbayes")
    parser.add_argument("--only", nargs="+", choices=works, default=list(works), help="which figures")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each accuracy")
    parser.add_argument("--again", action="store_true", help="run the accuracies anew instead of reading them back")
    parser.add_argument("--one-size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_size is not None:
        print(json.dumps(_federation_of(options.one_size)))
        return
    busy = _busy_cores()
    verdict = "so the ratios below are not to be trusted" if busy > 0.2 else "idle enough"
    print(f"{os.cpu_count()} cores, {busy:.2f} of them busy before the start, {verdict}; jax {jax.__version__}")
    for name in options.only:
        works[name](options)


def fedavg(options: argparse.Namespace) -> None:
    """One epoch of 10 clients with 600 examples, MLP 784-256-10, batch 50, momentum 0.9."""
    method = FedAvg(optimiser=Optimiser(step_size=0.1, momentum=0.9), work=Work(batch_size=50))
    _race("fedavg", options, method, _random_federation(10, 600), "mlp:256", aim="at least 3, aim 4", rounds=60)


def cnn(options: argparse.Namespace) -> None:
    """Four steps of 4 clients, two 5x5 convolutions, batch 50."""
    method = FedAvg(optimiser=Optimiser(step_size=0.01), work=Work(steps=4, batch_size=50))
    _race("cnn", options, method, _random_federation(4, 200), "cnn", aim="aim 1, at least 0.67", rounds=5)


def pfedbayes(options: argparse.Namespace) -> None:
    """Twenty steps of 10 clients with 1000 examples, MLP 784-100-10, batch 50, Adam on both distributions."""
    aim = "at least 4, aim 6"
    _race("pfedbayes", options, PFedBayes(), _random_federation(10, 1000), "mlp:100", aim=aim, rounds=20)


def sfedbayes(_: argparse.Namespace) -> None:
    """A round of sFedBayes against one of pFedBayes that draws weights, both ours: the work of `pfedbayes`."""
    federation = _random_federation(10, 1000)
    ours, plain = _alternate(
        lambda: _seconds_a_round(SFedBayes(stateful=True), federation, "mlp:100", 20),
        lambda: _seconds_a_round(PFedBayes(draw="weights"), federation, "mlp:100", 20),
    )
    _print("sfedbayes", f"{ours / plain:.2f} x a pFedBayes round with weight samples", "at most 1.6", ours, plain)


def overhead(_: argparse.Namespace) -> None:
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

    ours, theirs = _alternate(lambda: _seconds_a_round(method, federation, "mlp:256", 60), hand, launches=6)
    _print("overhead", f"{ours / theirs:.2f} x the round by hand", "at most 1.15", ours, theirs)


def fedhb(_: argparse.Namespace) -> None:
    """A round of FedHB against one of FedAvg, both ours: the work of `fedavg`."""
    federation, local = _random_federation(10, 600), {"optimiser": Optimiser(step_size=0.1, momentum=0.9)}
    local["work"] = Work(batch_size=50)
    aims = {FedHBNIW(**local): "at most 1.3", FedHBMixture(num_prototypes=2, **local): "at most 3"}
    for method, aim in aims.items():
        ours, plain = _alternate(
            lambda method=method: _seconds_a_round(method, federation, "mlp:256", 60),
            lambda: _seconds_a_round(FedAvg(**local), federation, "mlp:256", 60),
            launches=6,
        )
        name = type(method).__name__
        _print("fedhb", f"{name} {ours / plain:.2f} x a FedAvg round", aim, ours, plain)


def langevin(_: argparse.Namespace) -> None:
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

    ours, theirs = _alternate(
        lambda: seconds(chain, start, jax.random.key(0)), lambda: seconds(alone, start), launches=10
    )
    text = f"{ours / theirs:.2f} x its gradient; {1e6 * ours:.1f} µs against {1e6 * theirs:.1f} µs a step"
    print(f"{'langevin':11} {text} (at most 1.3)")
    kept = jax.jit(lambda z, key: kernels.sample("ula", log_density, z, 1e-3, key, num_steps=steps))
    memory = kept.lower(start, jax.random.key(0)).compile().memory_analysis()
    numbers = steps * sum(leaf.size for leaf in start.values())
    held = (memory.temp_size_in_bytes + memory.output_size_in_bytes) / (4 * numbers)
    print(f"{'langevin':11} a chain that keeps all of its M steps holds {held:.2f} M d numbers (M d are kept)")


def fedvi(_: argparse.Namespace) -> None:
    """A round of FedVI against one of FedAvg with the same embedding, both ours: 4 clients, 3 steps of 32 images."""
    federation, network, work = _random_federation(4, 96), "reddi:16,32,64", Work(batch_size=32)
    ours, plain = _alternate(
        lambda: _seconds_a_round(FedVI(work=work), federation, network, 10),
        lambda: _seconds_a_round(FedAvg(work=work), federation, network, 10),
    )
    _print("fedvi", f"{ours / plain:.2f} x a FedAvg round", "at most 1.5", ours, plain)


def clients(_: argparse.Namespace) -> None:
    """A federation of 10 000 clients against one of 100, cohort 10; each in a process of its own for its peak RSS."""
    sizes = {100: [], 10_000: []}
    for _ in range(LAUNCHES):
        for size, seen in sizes.items():
            command = [sys.executable, __file__, "--one-size", str(size)]
            seen.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    few, many = (min(one["seconds"] for one in sizes[size]) for size in sizes)
    rss = max(one["peak_rss_bytes"] for one in sizes[10_000]) / 1e9
    _print(
        "clients", f"{many / few:.2f} x a round of 100 clients, peak RSS {rss:.2f} GB", "at most 1.3, 3 GB", many, few
    )


def accuracy(options: argparse.Namespace) -> None:
    """FedAvg and FedProx on the FedHB protocol; a finished cell is read back from its own file unless `--again`."""
    if not os.environ.get("PRIORY_DATA"):
        print("accuracy    skipped: PRIORY_DATA names no directory with MNIST and Fashion-MNIST")
        return
    published = {("mnist", "fedavg"): 97.15, ("mnist", "fedprox"): 97.38, ("fashion_mnist", "fedavg"): 81.98}
    published |= {("fashion_mnist", "fedprox"): 83.25}
    floor = {"mnist": 96.6, "fashion_mnist": 80.5}
    for (data, name), target in published.items():
        if options.again:
            for path in RESULTS.glob(f"{data}-{name}-*.json"):
                path.unlink()
        known = sum(_is_current(RESULTS / f"{data}-{name}-{seed}.json") for seed in range(options.seeds))
        cells = [_accuracy_cell(data, name, seed) for seed in range(options.seeds)]
        # As published: the mean over clients of the accuracy on each client's own test examples.
        both = {part: np.array([100 * cell[part]["clients"]["mean"] for cell in cells]) for part in PARTS}
        text = ", ".join(
            f"{part} {v.mean():.2f} (sd {v.std(ddof=1) if len(v) > 1 else 0:.2f})" for part, v in both.items()
        )
        aim = f"at least {floor[data]}, published {target} global"
        print(f"accuracy    {data} {name}: {text}; {len(cells)} seeds, {known} read back; {aim}")


def _accuracy_cell(data: str, name: str, seed: int) -> dict[str, Any]:
    """The summary of one run; its file holds the command that makes it again."""
    path = RESULTS / f"{data}-{name}-{seed}.json"
    if not _is_current(path):
        federation = priory.data.load(data).partition("shards:5", clients=100, seed=seed)
        optimiser, work = Optimiser(step_size=0.1, momentum=0.9), Work(epochs=1, batch_size=50)
        method = {"fedavg": FedAvg, "fedprox": FedProx}[name](optimiser=optimiser, work=work)
        settings = {"cohort": 10, "rounds": 100, "model": "mlp:256", "schedule": ("step-size=step:0.1@0.5,0.75",)}
        run = priory.simulate(method, federation, seed=seed, eval_every=0, **settings)
        command = (
            f"priory run {name} --data {data} --partition shards:5 --clients 100 --cohort 10 --rounds 100 --epochs 1 "
            f"--batch-size 50 --momentum 0.9 --step-size 0.1 --schedule step-size=step:0.1@0.5,0.75 --model mlp:256 "
            f"--validation 0 --eval-every 0 --seed {seed} --data-seed {seed}"
        )
        path.parent.mkdir(exist_ok=True)
        origin = {"command": command, "version": priory.__version__, "data_checksum": federation.checksum}
        path.write_text(json.dumps({**origin, **run.summary()}, indent=2) + "\n")
    return json.loads(path.read_text())


def _busy_cores(seconds: float = 2.0) -> float:
    """How many cores others use, measured over a moment in which this process sleeps."""
    if not Path("/proc/stat").exists():
        return os.getloadavg()[0]

    def idle() -> float:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
        return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")

    before = idle()
    time.sleep(seconds)
    return max(0.0, (os.cpu_count() or 1) - (idle() - before) / seconds)


def _is_current(path: Path) -> bool:
    """Whether a cell was measured with this version of the library."""
    return path.exists() and json.loads(path.read_text()).get("version") == priory.__version__


def _race(
    name: str, options: argparse.Namespace, method: Any, federation: Any, model: str, *, aim: str, rounds: int
) -> None:
    if options.torch is None:
        print(f"{name:11} skipped: --torch names no Python with PyTorch")
        return
    command = [options.torch, str(HERE / "torch_loops.py"), name]

    def torch() -> float:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])["seconds"]

    ours, theirs = _alternate(lambda: _seconds_a_round(method, federation, model, rounds), torch)
    _print(name, f"{theirs / ours:.2f} times as fast as PyTorch", aim, ours, theirs)


def _alternate(ours: Callable[[], float], theirs: Callable[[], float], launches: int = LAUNCHES) -> tuple[float, float]:
    """The best of both sides, measured in turn after a warm-up."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(launches)]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def _seconds_a_round(method: Any, federation: Any, model: str, rounds: int) -> float:
    run = priory.simulate(method, federation, rounds=rounds, model=model, eval_every=0)
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


def _print(name: str, figure: str, aim: str, ours: float, theirs: float) -> None:
    print(f"{name:11} {figure} ({aim}); {1e3 * ours:.2f} ms against {1e3 * theirs:.2f} ms a round")


if __name__ == "__main__":
    main()
