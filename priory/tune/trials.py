"""Trials that are run side by side: settings that differ in traced values, and seeds, as one compiled program."""

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from priory import metrics
from priory.core import rng
from priory.core.rng import Key, Stream
from priory.core.struct import replace
from priory.engine import demand, devices
from priory.engine.prepared import Prepared
from priory.engine.rounds import AXIS, SCHEDULING, Plan, RoundInputs, run_block
from priory.engine.runner import COMMIT_SECONDS, next_block
from priory.evaluate import ClientSlot, ClientTallies, EvaluationContext, Layout, tally_clients
from priory.fed.method import Method, Task
from priory.fed.shard import Shards
from priory.fed.visit import Record
from priory.store import Checkpoint


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


@contextmanager
def _keys_unchecked() -> Iterator[None]:
    """Under a vmap `lax.cond` becomes a select of its operands, which the check for reused keys takes for a use."""
    with jax.debug_key_reuse(False):
        yield


@_keys_unchecked()
def rehearse(ready: Prepared, trials: Sequence[Trial]) -> None:
    """Trace rounds and scores, so that whatever a method raises on this problem is raised before any of them runs."""
    mesh, plan = ready.plan.mesh, ready.plan
    with demand.counting(ready.method):
        stacked = _stacked(ready, trials)
        server = devices.shapes_everywhere(jax.eval_shape(_init, ready.task, *stacked), mesh)
        state = server, _record_shapes(ready, len(trials))
        if ready.settings.rounds:
            t = devices.shapes_everywhere(np.int32(0), mesh)
            _run_trials.trace(ready.inputs, *stacked, (t, t), state, plan=plan)
        _tally_trials.trace(_scored(ready), *stacked, state, plan=plan)


@_keys_unchecked()
def scores_of(
    ready: Prepared,
    trials: Sequence[Trial],
    told: Callable[[int], None],
    stop: Callable[[], bool],
    begin: Callable[[Any], Checkpoint] | None,
) -> list[dict[str, Any]]:
    """Return what each trial scores after all rounds, run side by side; nothing if they were stopped.

    `begin` opens the checkpoint of a state, which they go on from.
    """
    mesh, plan, rounds = ready.plan.mesh, ready.plan, ready.settings.rounds
    stacked = _stacked(ready, trials)
    server = devices.everywhere(_init(ready.task, *stacked), mesh)
    records = devices.zeros_shared_out(_record_shapes(ready, len(trials)), mesh, P(None, AXIS))
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
            server, records = _run_trials(ready.inputs, *stacked, span, (server, records), plan=plan)
            jax.block_until_ready(server)
            block, completed = next_block((time.perf_counter() - started) / (until - completed)), until
            told(completed)
            stopped = stop()
            if checkpoint is not None and (stopped or time.perf_counter() - committed > COMMIT_SECONDS):
                checkpoint.commit(devices.to_host((server, records), mesh), completed, 0, {})
                committed = time.perf_counter()
        if completed < rounds:
            return []
        tallies = _tally_trials(_scored(ready), *stacked, (server, records), plan=plan)
    num = ready.federation.num_clients
    host = jax.tree.map(lambda leaf: leaf[:, :num], devices.to_host(tallies, mesh))
    return [_record(jax.tree.map(lambda leaf, i=i: leaf[i], host)) for i in range(len(trials))]


def _stacked(ready: Prepared, trials: Sequence[Trial]) -> tuple[Any, Key]:
    """Return the methods of the trials as one, and their roots, on every device."""
    stacked = jax.tree.map(lambda *leaves: np.asarray(leaves, np.float32), *(trial.method for trial in trials))
    placed: tuple[Any, Key] = devices.everywhere(
        (stacked, jnp.stack([rng.root(trial.seed) for trial in trials])), ready.plan.mesh
    )
    return placed


def _record_shapes(ready: Prepared, num: int) -> Any:
    """Return the shapes of the clients' records of so many trials."""
    lead = num, ready.plan.rows(ready.task.num_clients)
    return devices.shapes_shared_out(ready.record, lead, ready.plan.mesh, P(None, AXIS))


def _scored(ready: Prepared) -> tuple[Task, Shards, Shards, Array, Array]:
    """Return all that the scores of the trials share; last, rounds done and clients, shared out over the devices."""
    num, mesh = ready.federation.num_clients, ready.plan.mesh
    ids = devices.shared_out(np.resize(np.arange(num), ready.plan.rows(num)), mesh)
    return ready.task, ready.train, ready.test, devices.everywhere(np.int32(ready.settings.rounds), mesh), ids


@jax.jit
def _init(task: Task, methods: Any, roots: Key) -> Any:
    return jax.vmap(lambda method, root: method.init_server(task, rng.key(root, Stream.INIT)))(methods, roots)


@partial(jax.jit, static_argnames="plan", donate_argnames="state", compiler_options=SCHEDULING)
def _run_trials(
    inputs: RoundInputs, methods: Any, roots: Key, span: tuple[Array, Array], state: tuple[Any, Record], *, plan: Plan
) -> tuple[Any, Record]:
    """Return servers and records of all trials after the rounds of the span, whose end is not included."""

    def one(method: Method, root: Key, server: Any, records: Record) -> tuple[Any, Record]:
        # The plain function, since the compiler takes options from the outermost `jit` alone.
        rounds = inspect.unwrap(run_block)
        return rounds(replace(inputs, method=method, root=root), *span, server, records, plan=plan)[:2]

    return jax.vmap(one)(methods, roots, *state)


@partial(jax.jit, static_argnames="plan")
def _tally_trials(
    scored: tuple[Task, Shards, Shards, Array, Array],
    methods: Any,
    roots: Key,
    state: tuple[Any, Record],
    *,
    plan: Plan,
) -> ClientTallies:
    """Return the tallies of all trials and clients, (trials, clients, ...)."""
    task, train, held, t, ids = scored

    def one(method: Method, root: Key, server: Any, records: Record) -> ClientTallies:
        mine = jax.tree.map(lambda leaf: leaf[ids], records)
        context = EvaluationContext(method, method, task, method.broadcast(server), root, t)
        return tally_clients(context, train, held, ClientSlot(ids, mine.joined, mine.client), layout=Layout(plan.mesh))

    return jax.vmap(one)(methods, roots, *state)


def _record(tallies: Any) -> dict[str, Any]:
    personal = metrics.summarise(tallies.personal)
    population = None if tallies.population is None else metrics.summarise(tallies.population)
    return {
        "personal": personal.to_json() if personal else None,
        "global": population.to_json() if population else None,
    }
