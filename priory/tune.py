"""Choosing hyper-parameters on validation rows: all traced values and seeds of a grid in one compiled, vmapped run.

A method is a pytree whose traced fields are its leaves, so a grid over them is the method with a leading axis, and a
seed is one more. A static field (epochs, batch size) changes the program; those are an outer loop.

How many clusters a method has is chosen by itself: by the likelihood of validation rows, client by client.
"""

import dataclasses
import inspect
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from priory import metrics
from priory.core import rng, trees
from priory.core.errors import UsageError
from priory.core.rng import Key, Stream
from priory.core.struct import replace
from priory.data import Federation, Split
from priory.engine import Settings, devices, simulate
from priory.engine.prepared import BLOCK
from priory.engine.rounds import AXIS, SCHEDULING, Plan, run_block
from priory.engine.session import Session
from priory.evaluate import ClientTallies, Standing, tally_clients
from priory.fed import schedule
from priory.fed.method import Channel, Task
from priory.fed.screen import Limits
from priory.fed.shard import Shards
from priory.fed.visit import Record

__all__ = ["Axis", "Setting", "Tried", "fewest", "is_open", "ranked", "settle", "try_clusters", "tune", "without_test"]

MOST_CLUSTERS = 4  # that `clusters="auto"` tries
Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Axis:
    """One hyper-parameter and the values it takes.

    Attributes:
        name: As a user types it.
        path: Field names that lead to it in the method.
        values: What is tried.
        is_static: Whether a new value means a new compilation.
    """

    name: str
    path: tuple[str, ...]
    values: tuple[Any, ...]
    is_static: bool


@dataclass(frozen=True)
class Setting:
    """One point of the grid and how it did on the validation rows.

    Attributes:
        values: By name of the hyper-parameter.
        method: The method with these values.
        scores: One record for each seed, with `personal` and `global` as in summary.json.
    """

    values: dict[str, Any]
    method: Any
    scores: list[dict[str, Any]]

    def mean_and_error(self, name: str) -> tuple[float | None, float | None]:
        """Mean over seeds of a score such as `personal.accuracy`, and its standard error; None where there is none."""
        part, score = name.split(".")
        found = [record[part][score] for record in self.scores if record[part] and record[part][score] is not None]
        if len(found) < len(self.scores):
            return None, None
        error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None
        return statistics.fmean(found), error


def tune(
    method: Any,
    federation: Federation,
    axes: Sequence[Axis],
    *,
    seeds: int,
    settings: Settings,
    told: Told = lambda done, total: None,
) -> list[Setting]:
    """Every point of the grid with its scores on the validation rows, in the order of the grid; test rows are not read.

    Args:
        federation: With a validation part.
        seeds: How many, counted from the seed of the settings.
        told: Hears how many of how many rounds are done, over all compiled runs.
    """
    held = without_test(federation)
    static_axes = [axis for axis in axes if axis.is_static]
    traced_axes = [axis for axis in axes if not axis.is_static]
    programs = [list(_points(base, traced_axes)) for base in _points((method, {}), static_axes)]
    for points in programs:
        for point, _ in points:
            point.check()
    runs = [settings.seed + i for i in range(seeds)]
    found: list[Setting] = []
    for number, points in enumerate(programs):
        session = Session.prepare(points[0][0], held, settings, None, None, None, resume=False)
        if len(session.tasks) > 1:
            raise UsageError(
                f"models={settings.models} are several, and tuning compares settings on one; give --model."
            )
        if session.ledger is not None:
            raise UsageError(
                f"dp={session.ledger.mode} would be spent anew by every run of a tuning, and no total is kept; tune "
                "without it, on data that need no protection."
            )
        cells = [(point, seed) for point, _ in points for seed in runs]
        scores: list[dict[str, Any]] = []
        pieces = list(_pieces(cells, session))
        for place, piece in enumerate(pieces):
            done = (number * len(pieces) + place) * settings.rounds
            total = len(programs) * len(pieces) * settings.rounds
            # Under a vmap `lax.cond` becomes a select of its operands, which the check for reused keys takes for a use.
            with jax.debug_key_reuse(False):
                scores += _scores_of(session, piece, partial(_tell, told, done, total))
        for i, (point, values) in enumerate(points):
            found.append(Setting(values, point, scores[i * seeds : (i + 1) * seeds]))
    return sorted((_in_order(setting, axes) for setting in found), key=lambda setting: _place(setting, axes))


def ranked(settings: Sequence[Setting], by: str) -> list[Setting]:
    """The settings, best first by the mean over seeds; those without a finite score come last."""
    sign = -1.0 if by.endswith("accuracy") else 1.0

    def key(setting: Setting) -> float:
        mean, _ = setting.mean_and_error(by)
        return math.inf if mean is None else sign * mean

    return sorted(settings, key=key)


@dataclass(frozen=True, eq=False)
class Tried:
    """How a number of clusters did on the validation rows.

    Attributes:
        clusters: K.
        nll: Mean negative log-likelihood of each client's validation rows under its own posterior, (clients with any,).
    """

    clusters: int
    nll: np.ndarray


def settle(method: Any, federation: Federation, **options: Any) -> Any:
    """The method with a number where `clusters="auto"` asks for one; any other method as it is.

    K in 1 … min(4, clients) is chosen on the validation rows, each after a run with the same `options`, which are what
    the final run is to be given (rounds, seed, model, …): the smallest within one standard error of the best.
    """
    if not is_open(method):
        return method
    return replace(method, clusters=fewest(try_clusters(method, federation, **options)))


def is_open(method: Any) -> bool:
    """Whether the method's number of clusters is still to be chosen."""
    return bool(getattr(method, "clusters", None) == "auto")


def try_clusters(
    method: Any, federation: Federation, *, told: Told = lambda done, total: None, **options: Any
) -> list[Tried]:
    """How 1 … min(4, clients) clusters do on the validation rows, in this order; test rows are not read.

    Args:
        federation: With a validation part.
        told: Hears how many of how many rounds are done, over all runs.
    """
    share = options.get("exclude_uncertain")
    if share:
        raise UsageError(f"exclude-uncertain={share} needs the rows that clusters=auto is chosen on; give a number.")
    if federation.validation.count[: federation.num_clients].sum() == 0:
        raise UsageError("clusters=auto is chosen on validation rows, and there are none; use --validation 0.2.")
    held = without_test(federation)
    numbers = range(1, min(MOST_CLUSTERS, federation.num_clients) + 1)
    found = []
    for number in numbers:
        listener = _Count(told, number - 1, len(numbers))
        run = simulate(replace(method, clusters=number), held, listener=listener, **{**options, "eval_every": 0})
        assert run.personal is not None, "there are validation rows"
        scores = run.personal.per_client
        found.append(Tried(number, scores["nll"][scores["count"] > 0]))
    return found


def fewest(tried: Sequence[Tried]) -> int:
    """The smallest K whose mean nll over clients is within one standard error of the best K's.

    The standard error is that of the paired differences, client by client: how easy a client is does not enter.
    """
    finite = [one for one in tried if np.all(np.isfinite(one.nll))]
    if not finite:
        raise UsageError("clusters=auto found no number whose validation likelihood is finite; lower the step size.")
    best = min(finite, key=lambda one: float(np.mean(one.nll)))

    def is_as_good(one: Tried) -> bool:
        worse = one.nll - best.nll
        error = np.std(worse, ddof=1) / math.sqrt(len(worse)) if len(worse) > 1 else 0.0
        return bool(np.mean(worse) <= error)

    return min(one.clusters for one in finite if is_as_good(one))


@dataclass(frozen=True)
class _Count:
    """A listener that counts the rounds of several runs."""

    told: Told
    before: int
    num_runs: int

    def advanced(self, completed: int, rounds: int, info: dict[str, float]) -> None:
        del info
        self.told(self.before * rounds + completed, self.num_runs * rounds)

    def evaluated(self, line: dict[str, Any]) -> None:
        del line


def without_test(federation: Federation) -> Federation:
    """The federation with its validation part in the place of the test part, whose rows are taken out of the pool."""
    if federation.validation.total == 0:
        raise UsageError("validation=0 leaves nothing to tune on; give a fraction such as validation=0.2.")
    kept = np.ones(federation.num_examples, bool)
    for start, count in zip(federation.test.start, federation.test.count, strict=True):
        kept[start : start + count] = False
    moved = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)

    def shifted(split: Split) -> Split:
        return Split(moved[split.start], split.count)

    empty = Split(moved[federation.validation.start], np.zeros_like(federation.validation.count))
    return dataclasses.replace(
        federation,
        x=federation.x[kept],
        y=federation.y[kept],
        scale=None if federation.scale is None else federation.scale[kept],
        train=shifted(federation.train),
        validation=empty,
        test=shifted(federation.validation),
    )


def _tell(told: Told, done: int, total: int, t: int) -> None:
    told(done + t, total)


def _points(base: tuple[Any, dict[str, Any]], axes: Sequence[Axis]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The method and its values at every point of a grid."""
    for combination in itertools.product(*(axis.values for axis in axes)):
        method, values = base
        for axis, value in zip(axes, combination, strict=True):
            method, values = schedule.put(method, axis.path, value), {**values, axis.name: value}
        yield method, values


def _in_order(setting: Setting, axes: Sequence[Axis]) -> Setting:
    return dataclasses.replace(setting, values={axis.name: setting.values[axis.name] for axis in axes})


def _place(setting: Setting, axes: Sequence[Axis]) -> list[int]:
    return [axis.values.index(setting.values[axis.name]) for axis in axes]


Cell = tuple[Any, int]


def _pieces(cells: list[Cell], session: Session) -> Iterator[list[Cell]]:
    """The cells in equal pieces whose clients' state fits; the last one is filled up, so that all share a program."""
    size = max(1, trees.num_bytes(session.record) * session.task.num_clients)
    most = session.settings.resident_bytes // size
    if most < 1:
        raise UsageError(
            f"The state of {session.task.num_clients} clients takes {size} bytes and tuning keeps it on the devices; "
            f"raise resident-bytes to at least that."
        )
    step = -(-len(cells) // -(-len(cells) // most))
    for start in range(0, len(cells), step):
        piece = cells[start : start + step]
        yield piece + [piece[-1]] * (step - len(piece))


def _scores_of(session: Session, cells: list[Cell], told: Callable[[int], None]) -> list[dict[str, Any]]:
    """What each cell scores after all rounds, run side by side."""
    mesh, plan, task = session.plan.mesh, session.plan, session.task
    stacked = jax.tree.map(lambda *leaves: np.asarray(leaves, np.float32), *(method for method, _ in cells))
    roots = jnp.stack([rng.root(seed) for _, seed in cells])
    stacked, roots = devices.everywhere((stacked, roots), mesh)
    server = devices.everywhere(_init(stacked, task, roots), mesh)
    records = _no_records(session, len(cells))
    for start in range(0, session.settings.rounds, BLOCK):
        stop = min(start + BLOCK, session.settings.rounds)
        span = devices.everywhere((np.int32(start), np.int32(stop)), mesh)
        server, records = _run_cells(
            stacked, task, session.channel, session.train, roots, *span, server, records, session.limits, plan=plan
        )
        jax.block_until_ready(server)
        told(stop)
    num = session.federation.num_clients
    ids = devices.shared_out(np.resize(np.arange(num), plan.rows(num)), mesh)
    t = devices.everywhere(np.int32(session.settings.rounds), mesh)
    tallies = _tally_cells(stacked, task, session.train, session.test, roots, t, server, records, ids, plan=plan)
    host = jax.tree.map(lambda leaf: leaf[:, :num], devices.to_host(tallies, mesh))
    return [_record(jax.tree.map(lambda leaf, i=i: leaf[i], host)) for i in range(len(cells))]


@jax.jit
def _init(methods: Any, task: Task, roots: Key) -> Any:
    return jax.vmap(lambda method, root: method.init(task, rng.key(root, Stream.INIT)))(methods, roots)


@partial(jax.jit, static_argnames="plan", donate_argnames=("server", "records"), compiler_options=SCHEDULING)
def _run_cells(
    methods: Any,
    task: Task,
    channel: Channel | None,
    train: Shards,
    roots: Key,
    start: Array,
    stop: Array,
    server: Any,
    records: Record,
    limits: Limits,
    *,
    plan: Plan,
) -> tuple[Any, Record]:
    """Servers and records of all cells after rounds start … stop − 1."""

    def one(method: Any, root: Key, server: Any, records: Record) -> tuple[Any, Record]:
        # The plain function, since the compiler takes options from the outermost `jit` alone.
        rounds = inspect.unwrap(run_block)
        state = (server, records, None, limits)
        return rounds(method, (task,), channel, train, root, start, stop, *state, plan=plan)[:2]

    return jax.vmap(one)(methods, roots, server, records)


@partial(jax.jit, static_argnames="plan")
def _tally_cells(
    methods: Any,
    task: Task,
    train: Shards,
    held: Shards,
    roots: Key,
    t: Array,
    server: Any,
    records: Record,
    ids: Array,
    *,
    plan: Plan,
) -> ClientTallies:
    """The tallies of all cells and clients, (cells, clients, ...)."""

    def one(method: Any, root: Key, server: Any, records: Record) -> ClientTallies:
        mine = jax.tree.map(lambda leaf: leaf[ids], records)
        standing = Standing(method, method, task, method.broadcast(server), train, root, t)
        return tally_clients(standing, held, ids, mine.joined, mine.client, mesh=plan.mesh)

    return jax.vmap(one)(methods, roots, server, records)


def _no_records(session: Session, num_cells: int) -> Record:
    plan = session.plan
    lead = num_cells, plan.rows(session.task.num_clients)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype), session.record)
    return devices.zeros_shared_out(shapes, plan.mesh, P(None, AXIS))


def _record(tallies: Any) -> dict[str, Any]:
    personal = metrics.summarise(tallies.personal)
    population = None if tallies.population is None else metrics.summarise(tallies.population)
    return {
        "personal": personal.to_json() if personal else None,
        "global": population.to_json() if population else None,
    }
