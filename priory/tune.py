"""Choosing hyper-parameters on validation rows: all traced values and seeds of a grid in one compiled, vmapped run.

A method is a pytree whose traced fields are its leaves, so a grid over them is the method with a leading axis, and a
seed is one more. A static field (epochs, batch size) changes the program; those are an outer loop.

How many clusters a method has is chosen by itself: by the likelihood of validation rows, client by client.
"""

import dataclasses
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from priory.data import Federation, Split
from priory.engine import Settings, demand, devices, simulate
from priory.engine import check as check_run
from priory.engine.prepared import Prepared, prepare
from priory.engine.rounds import AXIS, SCHEDULING, Plan, RoundInputs, run_block
from priory.engine.runner import COMMIT_SECONDS, next_block
from priory.evaluate import ClientSlot, ClientTallies, EvaluationContext, Layout, tally_clients
from priory.fed import schedule
from priory.fed.method import Channel, Method, Task
from priory.fed.screen import Limits
from priory.fed.shard import Shards
from priory.fed.visit import Record
from priory.stats import Estimate, estimate, standard_error
from priory.store import Checkpoint, TrialDirectory

__all__ = [
    "Axis",
    "Setting",
    "Tried",
    "check",
    "fewest",
    "is_open",
    "ranked",
    "settle",
    "try_clusters",
    "tune",
    "without_test",
]

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
    method: Method
    scores: list[dict[str, Any]]

    def score(self, name: str) -> Estimate:
        """Return the mean over seeds of a score such as `personal.accuracy`."""
        part, score = name.split(".")
        return estimate([record[part] and record[part][score] for record in self.scores])


@dataclass(frozen=True)
class Trial:
    """A point of the grid with one seed."""

    method: Method
    values: dict[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """Its values and its seed."""
        return ", ".join(f"{name}={value}" for name, value in {**self.values, "seed": self.seed}.items())


@dataclass(frozen=True)
class Part:
    """Trials that are run side by side.

    Attributes:
        place: What its checkpoint is called: the number of its program, and its own among those of the program.
        size: How many are run: the last trial is repeated, so that all parts of a program have one size.
    """

    place: str
    trials: Sequence[Trial]
    size: int

    @property
    def name(self) -> str:
        """Its first and last trial."""
        return " to ".join(dict.fromkeys((self.trials[0].name, self.trials[-1].name)))

    @property
    def cells(self) -> list[Trial]:
        """What is run."""
        return [*self.trials, *[self.trials[-1]] * (self.size - len(self.trials))]


def tune(
    method: Method,
    federation: Federation,
    axes: Sequence[Axis],
    *,
    seeds: int,
    settings: Settings,
    told: Told = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
    kept: TrialDirectory | None = None,
    guard: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> list[Setting]:
    """The points of the grid, in its order, with their scores on the validation rows; test rows are not read.

    All of them are checked before the first is run. Points that lack the score of a seed, since the tuning was stopped
    or a part failed, are left out.

    Args:
        federation: With a validation part.
        seeds: How many, counted from the seed of the settings.
        told: Hears how many of how many rounds are done, over all compiled runs.
        stop: Asked between blocks of rounds.
        kept: Where scores and checkpoints are kept, and looked for first; nowhere by default.
        guard: A context for each part by its name; if it swallows an exception, the other parts go on.
    """
    held = without_test(federation)
    points = list(_points((method, {}), axes))
    scores = {} if kept is None else kept.scores()
    parts = _missing_parts(points, axes, held, seeds, settings, scores)
    if kept is not None:
        kept.begin()
    for number, part in enumerate(parts):
        count = partial(_Count(told, number, len(parts)).advanced, rounds=settings.rounds, info={})
        with guard(part.name):
            scores.update(_scores_of_part(part, held, settings, count, stop, kept))
        if stop():
            break
        count(settings.rounds)
    found = []
    for point, values in points:
        names = [trial.name for trial in _trials(point, values, seeds, settings)]
        if all(name in scores for name in names):
            found.append(Setting(values, point, [scores[name] for name in names]))
    return found


def check(method: Method, federation: Federation, **options: Any) -> None:
    """Raise whatever `simulate` would raise on these arguments, after `settle` where a number of clusters is open."""
    if is_open(method):
        _check_choice(federation, options)
        method = schedule.put(method, ("clusters",), 1)
    check_run(method, federation, **options)


def ranked(settings: Sequence[Setting], by: str) -> list[Setting]:
    """The settings, best first by the mean over seeds; those without a finite score come last."""
    sign = -1.0 if by.endswith("accuracy") else 1.0

    def key(setting: Setting) -> float:
        mean = setting.score(by).value
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


def settle(method: Method, federation: Federation, **options: Any) -> Any:
    """The method with a number where `clusters="auto"` asks for one; any other method as it is.

    K in 1 … min(4, clients) is chosen on the validation rows, each after a run with the same `options`, which are what
    the final run is to be given (rounds, seed, model, …): the smallest within one standard error of the best.
    """
    if not is_open(method):
        return method
    return schedule.put(method, ("clusters",), fewest(try_clusters(method, federation, **options)))


def is_open(method: Method) -> bool:
    """Whether the method's number of clusters is still to be chosen."""
    return bool(getattr(method, "clusters", None) == "auto")


def try_clusters(
    method: Method,
    federation: Federation,
    *,
    told: Told = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> list[Tried]:
    """How 1 … min(4, clients) clusters do on the validation rows, in this order; test rows are not read.

    Args:
        federation: With a validation part.
        told: Hears how many of how many rounds are done, over all runs.
        stop: Asked between blocks of rounds; when true, the list ends with the numbers that were tried.
    """
    _check_choice(federation, options)
    held = without_test(federation)
    numbers = range(1, min(MOST_CLUSTERS, federation.num_clients) + 1)
    found = []
    for number in numbers:
        listener = _Count(told, number - 1, len(numbers))
        how: dict[str, Any] = {**options, "eval_every": 0}
        run = simulate(schedule.put(method, ("clusters",), number), held, listener=listener, stop=stop, **how)
        if stop():
            break
        assert run.personal is not None, "there are validation rows"
        scores = run.personal.per_client
        found.append(Tried(number, scores["nll"][scores["count"] > 0]))
    return found


def _check_choice(federation: Federation, options: dict[str, Any]) -> None:
    """Raise where the validation rows cannot decide the number of clusters."""
    share = options.get("exclude_uncertain")
    if share:
        raise UsageError(f"exclude-uncertain={share} needs the rows that clusters=auto is chosen on; give a number.")
    if federation.validation.count[: federation.num_clients].sum() == 0:
        raise UsageError("clusters=auto is chosen on validation rows, and there are none; use --validation 0.2.")


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
        return bool(np.mean(worse) <= (standard_error(worse.tolist()) or 0.0))

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


def _points(base: tuple[Any, dict[str, Any]], axes: Sequence[Axis]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The method and its values at every point of a grid."""
    for combination in itertools.product(*(axis.values for axis in axes)):
        method, values = base
        for axis, value in zip(axes, combination, strict=True):
            method, values = schedule.put(method, axis.path, value), {**values, axis.name: value}
        yield method, values


def _trials(method: Method, values: dict[str, Any], seeds: int, settings: Settings) -> list[Trial]:
    return [Trial(method, values, settings.seed + i) for i in range(seeds)]


def _missing_parts(
    points: Sequence[tuple[Any, dict[str, Any]]],
    axes: Sequence[Axis],
    held: Federation,
    seeds: int,
    settings: Settings,
    scores: dict[str, Any],
) -> list[Part]:
    """The parts of the grid that lack scores, program by program; raises whatever any of them would raise."""
    for point, _ in points:
        point.check()
    programs: dict[tuple[Any, ...], list[Trial]] = {}
    for point, values in points:
        fixed = tuple(values[axis.name] for axis in axes if axis.is_static)
        programs.setdefault(fixed, []).extend(_trials(point, values, seeds, settings))
    parts: list[Part] = []
    for number, trials in enumerate(programs.values()):
        if all(trial.name in scores for trial in trials):
            continue
        ready = prepare(trials[0].method, held, settings)
        if len(ready.tasks) > 1:
            raise UsageError(
                f"models={settings.models} are several, and tuning compares settings on one; give --model."
            )
        if ready.ledger is not None:
            raise UsageError(
                f"dp={ready.ledger.mode} would be spent anew by every run of a tuning, and no total is kept; tune "
                "without it, on data that need no protection."
            )
        size = _size_of_parts(ready, len(trials))
        own = [Part(f"{number}-{i}", trials[i : i + size], size) for i in range(0, len(trials), size)]
        with _keys_unchecked(), demand.counting(ready.method):
            _rehearse(ready, own[0].cells)
        parts += [part for part in own if not all(trial.name in scores for trial in part.trials)]
    return parts


def _size_of_parts(ready: Prepared, num: int) -> int:
    """How many of so many trials run side by side: the client state of that many fits, and all parts are alike."""
    size = max(1, trees.num_bytes(ready.record) * ready.task.num_clients)
    most = ready.settings.resident_bytes // size
    if most < 1:
        raise UsageError(
            f"The state of {ready.task.num_clients} clients takes {size} bytes and tuning keeps it on the devices; "
            f"raise resident-bytes to at least that."
        )
    return -(-num // -(-num // most))


def _keys_unchecked() -> AbstractContextManager[None]:
    """Under a vmap `lax.cond` becomes a select of its operands, which the check for reused keys takes for a use."""
    return jax.debug_key_reuse(False)


def _rehearse(ready: Prepared, cells: Sequence[Trial]) -> None:
    """Trace rounds and scores, so that whatever a method raises on this problem is raised before any of them runs."""
    mesh, plan, task = ready.plan.mesh, ready.plan, ready.task
    stacked, roots = _stacked(ready, cells)
    server = devices.shapes_everywhere(jax.eval_shape(_init, stacked, task, roots), mesh)
    records = _record_shapes(ready, len(cells))
    if ready.settings.rounds:
        t = devices.shapes_everywhere(np.int32(0), mesh)
        problem = stacked, task, ready.channel, ready.train
        _run_cells.trace(*problem, roots, t, t, server, records, ready.inputs.limits, plan=plan)
    _tally_cells.trace(stacked, task, ready.train, ready.test, roots, *_whom(ready), server, records, plan=plan)


def _scores_of_part(
    part: Part,
    held: Federation,
    settings: Settings,
    count: Callable[[int], None],
    stop: Callable[[], bool],
    kept: TrialDirectory | None,
) -> dict[str, Any]:
    """The scores of the trials of a part by name, kept as soon as they are there; none if it was stopped."""
    ready = prepare(part.trials[0].method, held, settings)
    begin = None if kept is None else partial(kept.checkpoint, part.place)
    with _keys_unchecked():
        scores = _scores_of(ready, part.cells, count, stop, begin)
    found = {trial.name: one for trial, one in zip(part.trials, scores, strict=False)}
    if kept is not None and found:
        kept.add(found)
        kept.drop(part.place)
    return found


def _scores_of(
    ready: Prepared,
    cells: Sequence[Trial],
    told: Callable[[int], None],
    stop: Callable[[], bool],
    begin: Callable[[Any], Checkpoint] | None,
) -> list[dict[str, Any]]:
    """What each cell scores after all rounds, run side by side; nothing if they were stopped.

    `begin` opens the checkpoint of a state, which they go on from.
    """
    mesh, plan, task, rounds = ready.plan.mesh, ready.plan, ready.task, ready.settings.rounds
    stacked, roots = _stacked(ready, cells)
    server = devices.everywhere(_init(stacked, task, roots), mesh)
    records = devices.zeros_shared_out(_record_shapes(ready, len(cells)), mesh, P(None, AXIS))
    checkpoint = None if begin is None else begin((server, records))
    with nullcontext() if checkpoint is None else checkpoint.held():
        completed, block, committed, stopped = 0, 1, time.perf_counter(), stop()
        if checkpoint is not None and checkpoint.round > 0:
            completed, state = checkpoint.round, checkpoint.read_server()
            server, records = devices.everywhere(state[0], mesh), devices.shared_out(state[1], mesh, P(None, AXIS))
        told(completed)
        while completed < rounds and not stopped:
            until, started = min(completed + block, rounds), time.perf_counter()
            span = devices.everywhere((np.int32(completed), np.int32(until)), mesh)
            problem = stacked, task, ready.channel, ready.train
            server, records = _run_cells(*problem, roots, *span, server, records, ready.inputs.limits, plan=plan)
            jax.block_until_ready(server)
            block, completed = next_block((time.perf_counter() - started) / (until - completed)), until
            told(completed)
            stopped = stop()
            if checkpoint is not None and (stopped or time.perf_counter() - committed > COMMIT_SECONDS):
                checkpoint.commit(devices.to_host((server, records), mesh), completed, 0, {})
                committed = time.perf_counter()
        if completed < rounds:
            return []
        places = _whom(ready)
        tallies = _tally_cells(stacked, task, ready.train, ready.test, roots, *places, server, records, plan=plan)
    num = ready.federation.num_clients
    host = jax.tree.map(lambda leaf: leaf[:, :num], devices.to_host(tallies, mesh))
    return [_record(jax.tree.map(lambda leaf, i=i: leaf[i], host)) for i in range(len(cells))]


def _stacked(ready: Prepared, cells: Sequence[Trial]) -> tuple[Any, Key]:
    """The methods of the cells as one, with their roots, on every device."""
    stacked = jax.tree.map(lambda *leaves: np.asarray(leaves, np.float32), *(cell.method for cell in cells))
    placed: tuple[Any, Key] = devices.everywhere(
        (stacked, jnp.stack([rng.root(cell.seed) for cell in cells])), ready.plan.mesh
    )
    return placed


def _record_shapes(ready: Prepared, num_cells: int) -> Any:
    """The shapes of the clients' records of so many cells."""
    lead = num_cells, ready.plan.rows(ready.task.num_clients)
    return devices.shapes_shared_out(ready.record, lead, ready.plan.mesh, P(None, AXIS))


def _whom(ready: Prepared) -> tuple[Array, Array]:
    """The round after which clients are scored, and the clients, shared out over the devices."""
    num, mesh = ready.federation.num_clients, ready.plan.mesh
    ids = devices.shared_out(np.resize(np.arange(num), ready.plan.rows(num)), mesh)
    return devices.everywhere(np.int32(ready.settings.rounds), mesh), ids


@jax.jit
def _init(methods: Any, task: Task, roots: Key) -> Any:
    return jax.vmap(lambda method, root: method.init_server(task, rng.key(root, Stream.INIT)))(methods, roots)


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

    def one(method: Method, root: Key, server: Any, records: Record) -> tuple[Any, Record]:
        # The plain function, since the compiler takes options from the outermost `jit` alone.
        rounds = inspect.unwrap(run_block)
        inputs = RoundInputs(method, (task,), channel, train, root, limits=limits)
        return rounds(inputs, start, stop, server, records, plan=plan)[:2]

    return jax.vmap(one)(methods, roots, server, records)


@partial(jax.jit, static_argnames="plan")
def _tally_cells(
    methods: Any,
    task: Task,
    train: Shards,
    held: Shards,
    roots: Key,
    t: Array,
    ids: Array,
    server: Any,
    records: Record,
    *,
    plan: Plan,
) -> ClientTallies:
    """The tallies of all cells and clients, (cells, clients, ...)."""

    def one(method: Method, root: Key, server: Any, records: Record) -> ClientTallies:
        mine = jax.tree.map(lambda leaf: leaf[ids], records)
        context = EvaluationContext(method, method, task, method.broadcast(server), root, t)
        slots = ClientSlot(ids, mine.joined, mine.client)
        return tally_clients(context, train, held, slots, layout=Layout(plan.mesh))

    return jax.vmap(one)(methods, roots, server, records)


def _record(tallies: Any) -> dict[str, Any]:
    personal = metrics.summarise(tallies.personal)
    population = None if tallies.population is None else metrics.summarise(tallies.population)
    return {
        "personal": personal.to_json() if personal else None,
        "global": population.to_json() if population else None,
    }
