"""How much memory and time a run needs at least, found before anything is allocated or compiled.

Each estimate of memory counts arrays that certainly exist at the same time, and is compared with all the memory there
is (`core/memory.py`). A run that passes may still be too large; a run that is refused cannot work.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from priory.core import memory, rng, trees
from priory.core.errors import UsageError
from priory.engine.settings import Settings
from priory.fed.checks import countable
from priory.fed.local import Work
from priory.fed.method import Method
from priory.fed.schedule import RENAMED
from priory.models.model import Model

SIZES = ("cohort", "active", "client_batch", "eval_clients")  # settings of a run that are lengths of arrays
COUNTED = ("rounds", "onboard_visits")  # settings of a run that a compiled loop counts to
STEP, LONGEST = 1e-6, 600.0  # seconds: less than any local step takes, and the most that a round may surely take
# Primitives whose results XLA writes to memory; others may be fused into what reads them. So may random bits, but as
# many of them as fill a memory take minutes for a single step.
WRITTEN = ("dot_general", "conv_general_dilated", "scan", "while", "sort", "cholesky", "random_bits")


def check_numbers(method: Method, chosen: Settings) -> None:
    """Raise if a whole number of the method or of the run exceeds what compiled code can count."""
    own = {name: value for name, value in vars(chosen).items() if name in COUNTED}
    for name, value in (*_numbers(method), *own.items()):
        countable(name.replace("_", "-"), value)
    for work in _works(method):
        name, value = ("epochs", work.epochs) if work.steps is None else ("steps", work.steps)
        if value * STEP > LONGEST:
            raise UsageError(
                f"{name}={value} keeps each client busy for more than {value * STEP / 60:.0f} minutes in every round, "
                "and a round cannot be interrupted; choose less, and more rounds."
            )


@contextmanager
def counting(method: Method) -> Iterator[None]:
    """Raise one sentence where numbers are too large together for what is traced in the block."""
    try:
        yield
    except OverflowError:
        limit = "the 32-bit limit of compiled code"
        value, name = max(((value, name) for name, value in _numbers(method)), default=(0, None))
        if name is None:
            raise UsageError(f"The numbers of this run exceed, together, {limit}; choose smaller ones.") from None
        raise UsageError(f"{_typed(name, value)} exceeds, together with other numbers, {limit}; choose less.") from None


def check_model(network: Model, input_shape: tuple[int, ...], name: str) -> None:
    """Raise if the parameters of a network do not fit into memory."""
    shapes = jax.eval_shape(lambda key: network.init(key, input_shape), jax.eval_shape(rng.root, 0))
    num = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    memory.check(f"model={name} with {num:,} parameters", trees.num_bytes(shapes), "choose a smaller model")


def check_state(server: Any, record: Any, num_records: int, method: Method, chosen: Settings) -> None:
    """Raise if the server's state does not fit into memory with so many records of clients."""
    per_process = -(-num_records // jax.process_count())
    size = trees.num_bytes(server) + trees.num_bytes(record) * per_process
    shapes = [leaf.shape for leaf in jax.tree.leaves((server, record))]
    culprit = _culprit(shapes, method, chosen) or f"The state of the server and of {per_process} clients"
    memory.check(culprit, size, "choose a smaller number, a smaller model or a smaller cohort", _available())


def check_program(traced: Any, method: Method, chosen: Settings) -> None:
    """Raise if one array of a traced program does not fit into memory."""
    largest = max(_written(traced.jaxpr.jaxpr), key=_num_bytes, default=None)
    if largest is not None and _num_bytes(largest) > (available := _available()):
        culprit = _culprit([largest.shape], method, chosen) or f"An array of shape {largest.shape} in a round"
        memory.check(culprit, _num_bytes(largest), "choose a smaller number", available)


def _available() -> int:
    """Return the bytes of the machine, or of its accelerators where these have more."""
    stats = [device.memory_stats() or {} for device in jax.local_devices() if device.platform != "cpu"]
    return max(memory.total(), sum(one.get("bytes_limit", 0) for one in stats))


def _written(jaxpr: Any) -> Iterator[Any]:
    """Yield the shapes of the arrays that a program writes to memory, those of its inner programs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in WRITTEN:
            yield from (variable.aval for variable in equation.outvars)
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _written(getattr(inner, "jaxpr", inner))


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns")


def _num_bytes(shape: Any) -> int:
    return int(math.prod(getattr(shape, "shape", (0,))) * getattr(shape.dtype, "itemsize", 0))


def _culprit(shapes: Iterable[tuple[int, ...]], method: Method, chosen: Settings) -> str | None:
    """Return the number of the method, or of the run's sizes, that is the greatest length of the largest shape."""
    longest = max(max(shapes, key=math.prod, default=()), default=0)
    own = ((name, getattr(chosen, name)) for name in SIZES)
    named = [_typed(name, value) for name, value in (*_numbers(method), *own) if value == longest]
    return named[0] if named else None


def _numbers(settings: Any) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers of a dataclass by name, those of nested ones included."""
    for field in dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ():
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value)
        elif _is_whole(value):
            yield RENAMED.get(field.name, field.name), value


def _works(settings: Any) -> Iterator[Work]:
    """Yield the amounts of local work in a dataclass and in those that it contains."""
    for field in dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ():
        value = getattr(settings, field.name)
        if isinstance(value, Work):
            yield value
        else:
            yield from _works(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _typed(name: str, value: int) -> str:
    return f"{name.replace('_', '-')}={value}"
