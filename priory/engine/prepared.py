"""A run before its first round: everything checked and decided, nothing compiled for it and nothing written."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from priory import methods
from priory.core import rng, trees
from priory.core.rng import Key, Stream
from priory.data import Federation
from priory.engine import accounting, architectures, demand, devices
from priory.engine.accounting import Ledger
from priory.engine.architectures import Tasks
from priory.engine.clients import Resident, Stored, home_for
from priory.engine.clock import Clock
from priory.engine.problem import tasks_of
from priory.engine.rounds import Plan, RoundInputs
from priory.engine.settings import Settings
from priory.evaluate import ClientSlot, EvaluationContext, Layout, tally_clients
from priory.fed import robust, schedule
from priory.fed.method import Channel, Method, Task
from priory.fed.shard import Shards
from priory.models.model import default_spec, several
from priory.records import RecordStore

BLOCK = 64  # most rounds between two looks at the clock
EVALUATION_BYTES = 1 << 28  # most bytes of client state that an evaluation holds at once


@dataclass(frozen=True)
class Prepared:
    """A run that was checked.

    Attributes:
        model: As it was given to `simulate`, or None.
        given: The channel that was given to `simulate`, or None.
        inputs: What the rounds read: method, problem, channel, examples, key and limits.
        test: Examples that score the models.
        home: Where the clients' records will be.
        record: The shapes of one record.
    """

    federation: Federation
    settings: Settings
    model: Any
    given: Channel | None
    inputs: RoundInputs
    test: Shards
    plan: Plan
    home: type[Resident] | type[Stored]
    record: Any
    ledger: Ledger | None
    clock: Clock

    @property
    def method(self) -> Method:
        """The method as it was given."""
        return self.inputs.method

    @property
    def tasks(self) -> Tasks:
        """The problem of each group of clients."""
        return self.inputs.tasks

    @property
    def task(self) -> Task:
        """The problem of the first group; of all, where there are no others."""
        return self.inputs.tasks[0]

    def task_of(self, client: int) -> Task:
        """The problem of a client."""
        return self.tasks[client % len(self.tasks)]

    def model_text(self, client: int) -> str | None:
        """The text that names the network of a client; None where it was given as an object."""
        if self.model is not None:
            return None
        if self.settings.models is not None:
            return several(self.settings.models)[client % len(self.tasks)]
        federation = self.federation
        return self.settings.model or default_spec(federation.input_shape, federation.num_classes or 1)

    @property
    def channel(self) -> Channel | None:
        """What uploads go through: the channel that was given, or that of the settings."""
        return self.inputs.channel

    @property
    def train(self) -> Shards:
        """Training examples of all clients."""
        return self.inputs.train

    @property
    def root(self) -> Key:
        """The root key of the run."""
        return self.inputs.root

    def first_server(self) -> Any:
        """What the server keeps before the first round, on all devices."""
        with self.clock.booking("train"):
            first = first_server_of(self.method, self.task, rng.key(self.root, Stream.INIT))
            return devices.everywhere(first, self.plan.mesh)

    def client_states(self, store: RecordStore | None = None) -> Resident | Stored:
        """What clients keep before the first round.

        Args:
            store: Where commits put it; None where nothing is written.
        """
        return self.home(self.record, self.federation.num_clients, self.plan, store)

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
        server = jax.eval_shape(first_server_of, self.method, self.task, self.root)
        if self.last_round > 0:
            with self.clock.booking("train"):
                self.home.rehearse(self.inputs, server, self.record, self.plan)
        with self.clock.booking("evaluate"):
            self._rehearse_scores(server)

    def _rehearse_scores(self, server: Any) -> None:
        num, everyone = self.federation.num_clients, len(self.federation.clients)
        self._rehearse_tallies(server, np.arange(num))
        self._rehearse_tallies(server, np.arange(num, everyone), onboard_visits=self.settings.onboard_visits)

    def _rehearse_tallies(self, server: Any, ids: np.ndarray, onboard_visits: int | None = None) -> None:
        """Trace the evaluation of some clients, if there is anything to score."""
        if not self.federation.test.count[ids].any():
            return
        settled = schedule.resolve(self.method, self.plan.schedules, max(self.last_round - 1, 0), self.plan.rounds)
        down = jax.eval_shape(self.method.broadcast, server)
        down, t = devices.shapes_everywhere((down, np.int32(0)), self.plan.mesh)
        layout = Layout(self.plan.mesh, self.plan.chunk)
        for group, task in enumerate(self.tasks):
            rows = at_once(self.record, self.plan, int(np.sum(ids % len(self.tasks) == group)))
            state = architectures.client_shape(self.method, task) if len(self.tasks) > 1 else self.record.client
            one = np.int32(0), np.bool_(False), state
            slots = ClientSlot(*devices.shapes_shared_out(one, (rows,), self.plan.mesh))
            context = EvaluationContext(self.method, settled, task, down, self.root, t)
            shards = self.train, self.test
            traced = tally_clients.trace(context, *shards, slots, layout=layout, onboard_visits=onboard_visits)
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
    ledger = accounting.open_ledger(asked, method, tasks[0], participation, given, train)
    uplink = chosen.channel_of(method, given) if ledger is None else ledger.channel()
    with clock.booking("train"):
        home, record = home_for(method, tasks, uplink, train, plan, chosen.resident_bytes)
        server = jax.eval_shape(first_server_of, method, tasks[0], root)
        num_records = plan.rows(federation.num_clients) if home is Resident else plan.places
        demand.check_state(server, record, num_records, method, chosen)
    validation = held if chosen.exclude_uncertain else None  # a round without it has nothing to judge by
    inputs = RoundInputs(method, tasks, uplink, train, root, validation, chosen.limits(tasks[0]))
    return Prepared(federation, chosen, model, given, inputs, test, plan, home, record, ledger, clock)


def at_once(record: Any, plan: Plan, num: int) -> int:
    """How many of so many clients an evaluation takes in one call: a multiple of the devices, and their records fit."""
    size = max(1, trees.num_bytes(record))
    most = max(1, EVALUATION_BYTES // (size * plan.hands))
    return min(most, -(-num // plan.hands)) * plan.hands


@jax.jit
def first_server_of(method: Method, task: Task, key: Key) -> Any:
    """Return what the server keeps before the first round."""
    return method.init_server(task, key)
