"""A run before its first round: everything checked and decided, nothing compiled for it and nothing written."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from priory import methods
from priory.core import trees
from priory.core.rng import Key
from priory.data import Federation
from priory.engine import accounting, architectures, demand, devices
from priory.engine.accounting import Ledger
from priory.engine.architectures import Tasks
from priory.engine.clients import Resident, Stored, home_for
from priory.engine.clock import Clock
from priory.engine.problem import tasks_of
from priory.engine.rounds import Plan
from priory.engine.settings import Settings
from priory.evaluate import Standing, tally_clients
from priory.fed import robust, schedule
from priory.fed.method import Channel, Method, Task
from priory.fed.screen import Limits
from priory.fed.shard import Shards

BLOCK = 64  # most rounds between two looks at the clock
EVALUATION_BYTES = 1 << 28  # most bytes of client state that an evaluation holds at once


@dataclass(frozen=True)
class Prepared:
    """A run that was checked.

    Attributes:
        model: As it was given to `simulate`, or None.
        given: The channel that was given to `simulate`, or None.
        channel: What uploads go through: the one that was given, or that of the settings.
        validation: Shards that uncertain clients are judged by; None where nobody is left out.
        home: Where the clients' records will be.
        record: The shapes of one record.
    """

    method: Method
    federation: Federation
    settings: Settings
    model: Any
    given: Channel | None
    tasks: Tasks
    channel: Channel | None
    plan: Plan
    train: Shards
    test: Shards
    validation: Shards | None
    root: Key
    home: type[Resident] | type[Stored]
    record: Any
    ledger: Ledger | None
    clock: Clock

    @property
    def task(self) -> Task:
        """The problem of the first group."""
        return self.tasks[0]

    @property
    def limits(self) -> Limits:
        """What a message may be at most."""
        return self.settings.limits(self.task)

    @property
    def last_round(self) -> int:
        """The round that the run ends with: the last of those planned, or the last that a privacy budget allows."""
        return self.settings.rounds if self.ledger is None else self.ledger.rounds

    def rehearse(self) -> None:
        """Trace rounds and evaluations, so that whatever a method raises on this problem is raised before they run.

        Nothing is compiled, and a run that follows finds the traces.
        """
        with demand.counting(self.method):
            self._rehearse()

    def _rehearse(self) -> None:
        """Trace rounds and evaluations."""
        server = jax.eval_shape(first_server, self.method, self.task, self.root)
        if self.last_round > 0:
            with self.clock.booking("train"):
                problem = self.method, self.tasks, self.channel, self.train
                self.home.rehearse(problem, self.root, server, self.record, self.validation, self.limits, self.plan)
        with self.clock.booking("evaluate"):
            self._rehearse_scores(server)

    def _rehearse_scores(self, server: Any) -> None:
        num, everyone = self.federation.num_clients, len(self.federation.clients)
        self._rehearse_tallies(server, np.arange(num))
        newcomers = {"visits": self.settings.onboard_visits, "arriving": True}
        self._rehearse_tallies(server, np.arange(num, everyone), **newcomers)

    def _rehearse_tallies(self, server: Any, ids: np.ndarray, **how: Any) -> None:
        """Trace the evaluation of some clients, if there is anything to score."""
        if not self.federation.test.count[ids].any():
            return
        settled = schedule.resolve(self.method, self.plan.schedules, max(self.last_round - 1, 0), self.plan.rounds)
        down = jax.eval_shape(self.method.broadcast, server)
        down, t = devices.shapes_everywhere((down, np.int32(0)), self.plan.mesh)
        for group, task in enumerate(self.tasks):
            rows = at_once(self.record, self.plan, int(np.sum(ids % len(self.tasks) == group)))
            state = architectures.client_shape(self.method, task) if len(self.tasks) > 1 else self.record.client
            places = devices.shapes_shared_out((np.int32(0), np.bool_(False), state), (rows,), self.plan.mesh)
            standing = Standing(self.method, settled, task, down, self.train, self.root, t)
            traced = tally_clients.trace(
                standing, self.test, *places, mesh=self.plan.mesh, batch=self.plan.chunk, **how
            )
            demand.check_program(traced, self.method, self.settings)


def prepare(
    method: Method,
    federation: Federation,
    chosen: Settings,
    model: Any = None,
    given: Channel | None = None,
    noise: float | None = None,
) -> Prepared:
    """Check a method, its settings and its data, and decide how they are run.

    Args:
        noise: That of a run with differential privacy so far, in place of what this version would solve for.
    """
    chosen.check(federation.num_clients)
    method.check()
    demand.check_numbers(method, chosen)
    chosen.check_exclusion(method, int(federation.validation.count[: federation.num_clients].sum()))
    tasks = tasks_of(federation, chosen, model)
    participation = chosen.drawn_from(federation.num_clients, len(tasks))
    participation.check()
    mesh = devices.mesh_of_all()
    train, held, test = devices.shards_of(federation, mesh, "train", "validation", "test")
    name = methods.name_of(method)
    chosen.check_robust(method, name, given)
    architectures.check(method, name, tasks, train)
    clock = Clock()
    with clock.booking("train"), demand.counting(method):
        demand.check_program(architectures.traced_contact(method, tasks[0], train), method, chosen)
    schedules = chosen.schedules(method)
    plan = Plan(
        participation=participation,
        rounds=chosen.rounds if schedules else 0,  # nothing else depends on it, and 0 shares one program
        schedules=schedules,
        client_batch=chosen.client_batch or (1 if jax.default_backend() == "cpu" else federation.num_clients),
        weighting=chosen.weighting,
        stack=False,
        block=BLOCK,
        mesh=mesh,
        exclude=chosen.exclude_uncertain,
        robust=None if chosen.robust is None else robust.parse(chosen.robust),
    )
    root = devices.root_key(chosen.seed, mesh)
    asked = chosen if noise is None else dataclasses.replace(chosen, dp_noise=noise)
    ledger = accounting.open_ledger(asked, method, name, tasks[0], participation, given, train, root)
    uplink = chosen.channel_of(method, given) if ledger is None else ledger.channel()
    with clock.booking("train"):
        home, record = home_for(method, tasks, uplink, train, plan, chosen.resident_bytes)
        server = jax.eval_shape(first_server, method, tasks[0], root)
        num_records = plan.rows(federation.num_clients) if home is Resident else plan.places
        demand.check_state(server, record, num_records, method, chosen)
    return Prepared(
        method, federation, chosen, model, given, tasks, uplink, plan, train, test,
        held if chosen.exclude_uncertain else None,  # a round without it has nothing to judge by
        root, home, record, ledger, clock,
    )  # fmt: skip


def at_once(record: Any, plan: Plan, num: int) -> int:
    """How many of so many clients an evaluation takes in one call: a multiple of the devices, and their records fit."""
    size = max(1, trees.num_bytes(record))
    most = max(1, EVALUATION_BYTES // (size * plan.hands))
    return min(most, -(-num // plan.hands)) * plan.hands


@jax.jit
def first_server(method: Method, task: Task, key: Key) -> Any:
    """What the server keeps before the first round."""
    return method.init_server(task, key)
