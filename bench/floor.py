"""Against the floor: how much of a round is matrix products that no other way of writing it could avoid.

    python bench/floor.py                      every registered method, about five minutes on two cores
    python bench/floor.py --only fedavg fedvi  some of them
    python bench/floor.py --operations fedavg  each operation of one method, nothing kept

Each method runs in a process of its own: XLA writes down its program, then a few rounds are run bare, for their time,
and a few under JAX's profiler, which times every operation of XLA's CPU backend. An operation counts as a product if it
is, or contains, a dot or a convolution. The others are named by the function of the library that asked for them, as far
as XLA remembers (a fusion has the name of its last operation). What is left of cores × time is loop control, waiting.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from measure import describe, is_idle, machine, save

MODEL, CLIENTS, EXAMPLES, BATCH, PUBLIC = "mlp:100", 10, 500, 50, 500
MODULE = "jit_run_block"
REST = "loop control and waiting"
EXCHANGE = "exchange between devices"
CONTAINERS = ("while", "conditional", "call")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="which methods")
    parser.add_argument("--operations", metavar="METHOD", help="print each operation of one method")
    parser.add_argument("--rounds", type=int, default=4, help="rounds under the profiler")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_measured(options.one, options.rounds)))
        return
    if options.operations:
        found = _in_a_process(options.operations, options.rounds)
        for name, (seconds, label) in list(found["operations"].items())[:40]:
            print(f"{1e3 * seconds:9.3f} ms a round  {name:36} {label}")
        print(f"{1e3 * found['cores'] * found['seconds']:9.3f} ms a round on all cores")
        return
    told = machine()
    print(describe(told) + ("" if is_idle(told) else ": too busy for shares to be trusted or kept"), flush=True)
    rows = []
    for name in options.only or _registered():
        try:
            found = _in_a_process(name, options.rounds)
        except SystemExit as error:  # a method that asks for more than labelled images
            rows.append({"method": name, "failed": _reason(str(error))})
            print(f"{name:14} {rows[-1]['failed']}", flush=True)
            continue
        found.pop("operations")
        rows.append({"method": name, **found})
        others = ", ".join(f"{share:.0%} {label}" for label, share in found["others"])
        print(f"{name:14} {found['products']:.0%} products at {found['gflops']:.0f} GFLOP/s; {others}", flush=True)
    if options.only is None and is_idle(told):
        work = f"{CLIENTS} clients, {EXAMPLES} images each, batch {BATCH}, MLP 784-100-10, otherwise as a method has it"
        save("floor", told, work=work, gemm_gflops=_gemm_gflops(), rows=rows)


def _reason(trace: str) -> str:
    """The line of a traceback that names the error."""
    named = [line for line in trace.splitlines() if re.match(r"[\w.]+(Error|Exception|Interrupt|Warning): ", line)]
    return (named or trace.strip().splitlines())[-1]


def _registered() -> list[str]:
    from priory import methods

    return list(methods.REGISTRY)


def _in_a_process(name: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as dump:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text"
        environment = {**os.environ, "XLA_FLAGS": f"{flags} --xla_dump_hlo_module_re={MODULE}", "FLOOR_DUMP": dump}
        command = [sys.executable, __file__, "--one", name, "--rounds", str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _measured(name: str, rounds: int) -> dict[str, Any]:
    import jax

    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    import numpy as np

    import priory
    from priory import Optimiser, methods
    from priory.core.struct import replace
    from priory.data import arrays

    draw = np.random.default_rng(0)
    num = CLIENTS * EXAMPLES + PUBLIC
    x = draw.integers(0, 256, (num, 28, 28, 1), dtype=np.uint8)
    data = arrays.dataset(x, draw.integers(0, 10, num), scaling="unit")
    # Rows without labels, for the methods that need some; the others do not look.
    federation = data.partition("iid", clients=CLIENTS, test=0.0, align=f"own:{PUBLIC}")
    cls = methods.get(name)
    own = {"work": replace(cls.work, batch_size=BATCH)} if "work" in cls.__dataclass_fields__ else {}
    if isinstance(getattr(cls, "optimiser", None), Optimiser) and cls.optimiser.kind == "sgd":
        own["optimiser"] = Optimiser(step_size=0.05, momentum=0.9)
    method, settings = cls(**own), {"model": MODEL, "eval_every": 0, "rounds": rounds}
    priory.simulate(method, federation, **settings)  # compiles
    seconds = min(priory.simulate(method, federation, **settings).seconds["train"] for _ in range(3)) / rounds
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            priory.simulate(method, federation, **settings)
        timed = _timed_operations(directory)
    program = Program(_program_text(Path(os.environ["FLOOR_DUMP"])))
    return _shares(program, timed, seconds, rounds, len(jax.devices()))


def _program_text(dump: Path) -> str:
    """The optimised program of a block of rounds: the longest, if there were several."""
    found = [path.read_text() for path in dump.rglob(f"*{MODULE}*after_optimizations.txt")]
    if not found:
        raise SystemExit("XLA wrote no program down; does this version know --xla_dump_hlo_as_text?")
    return max(found, key=len)


def _timed_operations(directory: str) -> dict[str, tuple[float, int]]:
    """Seconds of each operation of the block, and how often it ran, over all devices."""
    import jax

    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for path in Path(directory).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    stats = dict(event.stats) if not event.name.startswith(("$", "end: ")) else {}
                    if stats.get("hlo_module") == MODULE:
                        seconds, times = found[stats["hlo_op"]]
                        found[stats["hlo_op"]] = (seconds + event.duration_ns / 1e9, times + 1)
    return found


class Program:
    """The text of an optimised program: what each operation is, and which line of the library asked for it."""

    def __init__(self, text: str) -> None:
        self._files = _table(text, "FileNames", r'^(\d+) "(.*)"$')
        self._functions = _table(text, "FunctionNames", r'^(\d+) "(.*)"$')
        places = r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+)"
        self._places = _table(text, "FileLocations", places)
        self._frames = _table(text, "StackFrames", r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)")
        self._instructions: dict[str, tuple[str, str, str]] = {}
        self._computations: dict[str, list[str]] = defaultdict(list)
        current = ""
        for line in text.splitlines():
            if line.endswith("{") and "(" in line:
                current = line.replace("ENTRY", "").split("(")[0].strip().lstrip("%")
            elif match := INSTRUCTION.match(line):
                name, shape, opcode, rest = match.groups()
                self._instructions[name] = (shape, opcode, rest)
                self._computations[current].append(name)

    def opcode(self, name: str) -> str:
        return self._instructions.get(name, ("", "unknown", ""))[1]

    def products(self, name: str) -> list[str]:
        """The dots and convolutions that an operation is or contains."""
        opcode = self.opcode(name)
        if opcode in ("dot", "convolution") or (opcode == "custom-call" and "onednn" in self._instructions[name][2]):
            return [name]
        if opcode not in ("fusion", "call"):
            return []
        called = re.search(r"(?:calls|to_apply)=%?([\w.-]+)", self._instructions[name][2])
        inside = self._computations.get(called.group(1), []) if called else []
        return [found for other in inside if other != name for found in self.products(other)]

    def flops(self, name: str) -> float:
        """Twice the multiplications of a dot; 0 for anything else."""
        shape, opcode, rest = self._instructions[name]
        if opcode != "dot":
            return 0.0
        operand = self._instructions.get(re.findall(r"%([\w.-]+)", rest)[0], ("",))[0]
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
        sizes, result = _sizes(operand), 2.0
        for size in _sizes(shape):
            result *= size
        for axis in contracted.group(1).split(",") if contracted and contracted.group(1) else ():
            result *= sizes[int(axis)]
        return result

    def label(self, name: str) -> str:
        """Who asked for an operation: file and function of the library, and what it is where that says more."""
        if self.opcode(name).removesuffix("-start").removesuffix("-done") in COLLECTIVES:
            return EXCHANGE
        rest = self._instructions.get(name, ("", "", ""))[2]
        path = re.search(r'op_name="([^"]*)"', rest)
        kind = _kind(path.group(1) if path else "", self.opcode(name))
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        place = self._place(int(frame.group(1))) if frame else ""
        return f"{kind} ({place})" if place else kind

    def _place(self, frame: int) -> str:
        """The innermost function of the library on a stack; the text counts parents from 1."""
        while frame > 0 and str(frame) in self._frames:
            location, parent = self._frames[str(frame)]
            file, function = self._places[location]
            path = self._files[file]
            if "/priory/" in path and "site-packages" not in path:
                return f"`{path.rpartition('/priory/')[2]}` {self._functions[function].replace('.<locals>', '')}"
            frame = int(parent) - 1
        return ""


def _table(text: str, title: str, pattern: str) -> dict[str, Any]:
    """One of the tables in front of a program."""
    found: dict[str, Any] = {}
    begun = False
    for line in text.splitlines():
        if line == title:
            begun = True
        elif begun:
            match = re.match(pattern, line)
            if match is None:
                break
            key, *values = match.groups()
            found[key] = values[0] if len(values) == 1 else values
    return found


def _kind(path: str, opcode: str) -> str:
    """What an operation does, from the path of calls that JAX gave it."""
    if any(word in path for word in ("threefry", "random_bits", "_uniform", "_normal", "erf_inv", "random_split")):
        return "random numbers"
    if opcode == "copy" or path == "":
        return "copies"
    if "sort" in path:
        return "sorting"
    if "gather" in path:
        return "gathering"
    if "transpose(jvp" in path:
        return "backward pass"
    if "jvp(" in path:
        return "forward pass"
    return "arithmetic"


def _sizes(shape: str) -> list[int]:
    match = re.search(r"\[([\d,]*)\]", shape)
    return [int(size) for size in match.group(1).split(",") if size] if match else []


def _shares(
    program: Program, timed: dict[str, tuple[float, int]], seconds: float, rounds: int, cores: int
) -> dict[str, Any]:
    """The share of products in cores × time, their speed, and the three largest other shares."""
    total = cores * seconds * rounds
    products, flops, others, operations = 0.0, 0.0, defaultdict(float), {}
    for name, (spent, times) in timed.items():
        if program.opcode(name) in CONTAINERS and not program.products(name):
            continue  # its insides are timed too
        inside = program.products(name)
        label = "product" if inside else program.label(name)
        operations[name] = (spent / rounds, label)
        if inside:
            products += spent
            flops += times * sum(map(program.flops, inside))
        else:
            others[label] += spent
    accounted = products + sum(others.values())
    total = max(total, accounted)  # the profiler slows small operations a little
    others[REST] = total - accounted
    largest = sorted(others.items(), key=lambda item: -item[1])[:3]
    ordered = dict(sorted(operations.items(), key=lambda item: -item[1][0]))
    return {
        "seconds": seconds,
        "cores": cores,
        "products": products / total,
        "gflops": flops / products / 1e9 if products else 0.0,
        "others": [(label, spent / total) for label, spent in largest],
        "operations": ordered,
    }


def _gemm_gflops(size: int = 512, times: int = 20) -> float:
    """Speed of a large product on one core, for comparison; NumPy's, so that one setting keeps it on one core."""
    code = f"""
import time
import numpy as np
a = np.ones(({size}, {size}), np.float32)
best = float("inf")
for _ in range({times}):
    started = time.perf_counter()
    a @ a
    best = min(best, time.perf_counter() - started)
print(best)
"""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    return 2 * size**3 / float(done.stdout) / 1e9


if __name__ == "__main__":
    main()
