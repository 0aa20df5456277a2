"""Record what every registered method computes, as digests that a refactoring must leave alone.

    python -m tests.digests.record                    # compare this tree with digests.json; exit 1 on a difference
    python -m tests.digests.record --write            # record again
    python -m tests.digests.record --save DIR         # keep the states themselves as well
    python -m tests.digests.record --against DIR      # print the largest relative difference from saved states

Three rounds on the embedded digits, on two devices, with fixed seeds: one run per method in the simulator, one over
the wire format, and one that is stopped and resumed. Each digest is the SHA-256 of the names, types, shapes and bytes
of all arrays that server and clients keep. The numbers of the run's summary are next to it, so that a change can be
read. Bits depend on the processor and on the versions of JAX: the file names those it was made with, and on another
machine only the summaries, compared to 1e-5, mean something.

Whoever changes a digest on purpose records it again in a commit of its own that gives the reason. A change of
rounding is one whose states differ from the old ones by at most 1e-5, relative to the largest number of each array;
--save in the old tree and --against in the new one measure it.
"""

import argparse
import hashlib
import importlib.metadata
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

import priory
from priory import methods
from priory.data import Federation
from priory.deploy import charter as charters
from priory.engine.compilation import keep_compiled
from priory.engine.settings import Settings
from priory.fed.method import Method
from tests.deploy.conftest import Deployed
from tests.states import State, named, state_of

FILE = Path(__file__).with_name("digests.json")
SETTINGS = {"model": "mlp:16", "rounds": 3, "cohort": 4, "seed": 1, "eval_every": 0}
ROUNDING = 1e-5  # largest relative difference that counts as a change of rounding


def main() -> int:
    """Record or compare, and return the exit code."""
    parser = argparse.ArgumentParser(description="Compare what every method computes with the recorded digests.")
    parser.add_argument("--write", action="store_true", help="record the digests again")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the states of all runs in this directory")
    parser.add_argument("--against", type=Path, metavar="DIR", help="compare with states that --save kept")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names of runs, such as fedavg or wire:fedavg")
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    keep_compiled()
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {"runs": {}}
    machine = environment()
    exact = machine == recorded.get("environment")
    if not asked.write and not exact:
        print(f"recorded with {recorded.get('environment')}, here {machine}: bits are not compared")
    found, different = {}, []
    for name, run in runs():
        if asked.only is not None and name not in asked.only:
            continue
        state, summary = run()
        found[name] = {"digest": digest(state), "summary": summary}
        verdict = compared(found[name], recorded["runs"].get(name), exact)
        file = f"{name.replace(':', '-')}.npz"
        if asked.save is not None:
            asked.save.mkdir(parents=True, exist_ok=True)
            np.savez(asked.save / file, **state)
        if asked.against is not None:
            distance = largest_difference(state, asked.against / file)
            verdict += f", relative difference {distance:.1e}" + ("" if distance <= ROUNDING else " (not rounding)")
        print(f"{name:24} {found[name]['digest'][:12]} {verdict}", flush=True)
        if not verdict.startswith("same"):
            different.append(name)
    if asked.write:
        kept = recorded["runs"] | found if asked.only is not None else found
        FILE.write_text(json.dumps({"environment": machine, "runs": kept}, indent=1) + "\n")
        return 0
    print(f"{len(found) - len(different)} of {len(found)} runs are as recorded")
    return 1 if different else 0


def runs() -> Iterator[tuple[str, Callable[[], tuple[State, dict[str, float]]]]]:
    """Return each run's name with a function that makes it."""
    for name in methods.REGISTRY:
        yield name, lambda name=name: simulated(methods.get(name)())
    yield "fedopt:yogi", lambda: simulated(priory.FedOpt(server_optimiser="yogi"))
    yield "random-groups:all", lambda: simulated(priory.RandomGroups(predict_with="all"))
    yield "wire:pfedbayes", lambda: over_the_wire("pfedbayes")
    yield "resumed:ditto", lambda: resumed("ditto")


def federation() -> Federation:
    """Return eight clients of the digits, with the rows that methods on public data align on."""
    digits = priory.data.load("digits")
    return digits.partition("dirichlet:0.5", clients=8, align="own:64", seed=1)


def simulated(method: Method) -> tuple[State, dict[str, float]]:
    """Run a method in the simulator."""
    run = priory.simulate(method, federation(), **SETTINGS)
    return state_of(run), numbers(run.summary())


def resumed(name: str) -> tuple[State, dict[str, float]]:
    """Run a method that is stopped after its first round and resumed."""
    with tempfile.TemporaryDirectory() as place:
        out, asked = Path(place) / "run", iter([False, True, True])
        priory.simulate(methods.get(name)(), federation(), out=out, stop=lambda: next(asked), **SETTINGS)
        run = priory.resume(out)
        return state_of(run), numbers(run.summary())


def over_the_wire(name: str) -> tuple[State, dict[str, float]]:
    """Run a method with clients that exchange encoded messages with a server."""
    data = federation()
    charter = charters.make(methods.get(name)(), data, Settings(**SETTINGS))
    with tempfile.TemporaryDirectory() as place:
        made = Deployed(Path(place), charter, data)
        server = made.server()
        summary = server.go()
        kept = {number: client_arrays(made.place / f"node-{number}") for number in range(data.num_clients)}
    state = named({"server": server.server})
    for number, arrays in kept.items():
        state |= {f"client {number} {name}": array for name, array in arrays.items()}
    return state, numbers(summary)


def client_arrays(directory: Path) -> State:
    """Return the arrays in the newest record of a deployed client."""
    newest = max(directory.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    return load_file(newest)


def digest(state: State) -> str:
    """Return the SHA-256 of names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(state):
        leaf = np.ascontiguousarray(state[name])
        total.update(f"{name} {leaf.dtype.str} {leaf.shape}\n".encode())
        total.update(leaf.tobytes())
    return total.hexdigest()


def numbers(summary: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a summary by their path, without times and memory."""
    found: dict[str, float] = {}
    for name, value in summary.items():
        if name in ("seconds", "environment", "peak_rss_bytes"):
            continue
        if isinstance(value, dict):
            found |= numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{prefix}{name}"] = value
    return found


def compared(found: dict[str, Any], recorded: dict[str, Any] | None, exact: bool) -> str:
    """Return a verdict that begins with "same" where the run is as recorded."""
    if recorded is None:
        return "new"
    if exact and found["digest"] == recorded["digest"] and found["summary"] == recorded["summary"]:
        return "same"
    before, now = recorded["summary"], found["summary"]
    if before.keys() != now.keys():
        return f"different fields: {sorted(before.keys() ^ now.keys())}"
    apart = [name for name in now if not math.isclose(before[name], now[name], rel_tol=ROUNDING)]
    if apart:
        return "different: " + ", ".join(f"{name} {before[name]:.6g} -> {now[name]:.6g}" for name in apart[:3])
    return "different bits, same summary" if exact else "same summary"


def largest_difference(state: State, saved: Path) -> float:
    """Return the largest difference of two states, relative to the largest number of each array."""
    with np.load(saved) as before:
        if set(before.files) != set(state):
            return math.inf
        return max((relative_difference(before[name], state[name]) for name in state), default=0.0)


def relative_difference(before: np.ndarray, now: np.ndarray) -> float:
    """Return max |now − before| / max |before|."""
    if before.shape != now.shape or before.dtype != now.dtype:
        return math.inf
    if before.size == 0 or np.array_equal(before, now, equal_nan=before.dtype.kind == "f"):
        return 0.0
    before, now = before.astype(np.float64), now.astype(np.float64)
    return float(np.max(np.abs(now - before)) / max(float(np.max(np.abs(before))), 1e-30))


def environment() -> dict[str, str]:
    """Return what the bits of a run depend on besides the code."""
    cpu = Path("/proc/cpuinfo")
    flags = (
        next((line for line in cpu.read_text().splitlines() if line.startswith("flags")), "") if cpu.exists() else ""
    )
    features = [name for name in ("avx2", "fma", "avx512f", "amx_tile") if name in flags.split()]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "flax", "numpy")}
    return {"cpu": " ".join(features), **versions}


if __name__ == "__main__":
    sys.exit(main())
