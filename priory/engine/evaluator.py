"""Functions of a run's clients, mapped over them in pieces that fit into memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from priory import metrics
from priory.certificate import Counts, counts_of_clients
from priory.core import rng
from priory.core.rng import Stream
from priory.effects import Effects, effects_of_clients, effects_of_server, gather
from priory.engine import architectures, devices
from priory.engine.clients import Resident, Stored
from priory.engine.cohort import subset
from priory.engine.prepared import Prepared, at_once
from priory.evaluate import (
    ClientSlot,
    ClientTallies,
    EvaluationContext,
    Layout,
    draws_of_clients,
    evidence_of_clients,
    evidence_of_server,
    rows_of_clients,
    tally_clients,
)
from priory.fed import schedule
from priory.fed.method import Method, Task
from priory.metrics import RegressionScores, RegressionTally, Scores, Tally
from priory.models.model import Params
from priory.uncertainty import Answers, ForeignInputs, collect, validation_of

NEWCOMERS = ("newcomers", "newcomers_unlabelled", "newcomers_global")  # with labels, with inputs alone, with nothing

AnyScores = Scores | RegressionScores | None


@dataclass(frozen=True)
class Evaluator:
    """A run after some of its rounds, of whose clients functions are computed.

    Attributes:
        ready: The problem and how it is run.
        client_states: What clients keep.
        server: What the server keeps.
        completed: Rounds done.
    """

    ready: Prepared
    client_states: Resident | Stored
    server: Any
    completed: int

    @property
    def settled(self) -> Method:
        """Return the method as the schedules have it in the last round so far, by which a newcomer updates."""
        ready, last = self.ready, max(self.completed - 1, 0)
        return schedule.resolve(ready.method, ready.plan.schedules, last, ready.plan.rounds)

    def context(self, task: Task) -> EvaluationContext:
        """Return what evaluations of clients with the network of a task share, on all devices."""
        ready = self.ready
        down, t = devices.everywhere((ready.method.broadcast(self.server), np.int32(self.completed)), ready.plan.mesh)
        return EvaluationContext(ready.method, self.settled, task, down, ready.root, t)

    def scores(self, num: int | None = None) -> tuple[AnyScores, AnyScores]:
        """Return personal and global scores of all clients, or of a fixed random choice of `num`."""
        ids = self.chosen(num)
        if not self._has_test_examples(ids):
            return None, None
        total = self.tallies(ids)
        return summarised(total.personal), summarised(total.population)

    def newcomer_scores(self) -> dict[str, AnyScores]:
        """Return scores of the clients that were held out, one for each way in, by the name of `NEWCOMERS`."""
        ids = self._newcomers()
        if not self._has_test_examples(ids):
            return dict.fromkeys(NEWCOMERS)
        total = self.tallies(ids, onboard_visits=self.ready.settings.onboard_visits)
        ways = (total.personal, total.unlabelled, total.population)
        return {part: summarised(tallies) for part, tallies in zip(NEWCOMERS, ways, strict=True)}

    def tallies(self, ids: np.ndarray, onboard_visits: int | None = None) -> ClientTallies:
        """Return the sums that scores are made from; arguments as for `tally_clients`."""
        ready = self.ready
        with ready.clock.booking("evaluate"):
            ask = self._in_context(tally_clients, ready.train, ready.test, onboard_visits=onboard_visits)
            total: ClientTallies = self.map_clients(ids, ask)
        return total

    def evidence(self) -> tuple[np.ndarray, float]:
        """Return the evidence of each client that takes part, and of the server."""
        ready = self.ready
        per_client = self.map_clients(self._participants(), self._in_context(evidence_of_clients, ready.train))
        server = evidence_of_server(self.settled, ready.task, self.context(ready.task).down)
        return per_client, float(devices.to_host(server, ready.plan.mesh))

    def effects(self, level: float, keep: bool, advice: dict[str, str]) -> Effects:
        """Return the random effects of each client that takes part, with the advice that belongs to them.

        Args:
            keep: Whether to keep the draws.
        """
        ready, ids = self.ready, self._participants()
        shared = ready.train, devices.everywhere(np.float32(level), ready.plan.mesh)
        found = self.map_clients(ids, self._in_context(effects_of_clients, *shared, keep=keep))
        server = effects_of_server(ready.method, ready.task, self.context(ready.task).down)
        server, examples = devices.to_host(server, ready.plan.mesh), np.asarray(ready.federation.train.count[ids])
        return gather(found, server, ready.federation.clients[: len(ids)], examples, level, advice)

    def counts(self, ids: np.ndarray, draws: int) -> Counts:
        """Return the counts from which certificates of newcomers are computed, stacked."""
        ready = self.ready
        how = {"visits": ready.settings.onboard_visits, "num": draws}
        found: Counts = self.map_clients(ids, self._in_context(counts_of_clients, ready.train, **how))
        return found

    def draws(self, num: int) -> Params:
        """Draw `num` networks from the posterior of each participant, leaves (clients, num, ...)."""
        ask = self._in_context(draws_of_clients, self.ready.train, num=num)
        drawn: Params = self.map_clients(self._participants(), ask)
        return drawn

    def answers(self, foreign: ForeignInputs | None) -> dict[str, Answers]:
        """Return what the models predict for every held-out example, by part as in the summary.

        Args:
            foreign: Inputs that the personal models of participants predict besides.
        """
        ready, newcomers = self.ready, self._newcomers()
        inputs = None if foreign is None else devices.everywhere(foreign.shard(ready.test.pool), ready.plan.mesh)
        found = self._answers(self._participants(), inputs)
        parts = {"personal": "personal", "global": "population"}
        answers = {name: found[part] for name, part in parts.items() if part in found}
        if len(newcomers):
            found = self._answers(newcomers, None, onboard_visits=ready.settings.onboard_visits)
            ways = zip(NEWCOMERS, ("personal", "unlabelled", "population"), strict=True)
            answers |= {name: found[part] for name, part in ways if part in found}
        return answers

    def _answers(self, ids: np.ndarray, foreign: Any, onboard_visits: int | None = None) -> dict[str, Answers]:
        ready = self.ready
        held = ready.test, validation_of(ready.federation, ready.test)
        data = (ready.train, *devices.everywhere(held, ready.plan.mesh))
        ask = self._in_context(rows_of_clients, data, foreign, onboard_visits=onboard_visits)
        return collect(ready.federation, ids, self.map_clients, ask)

    def _in_context(self, function: Callable[..., Any], *shared: Any, **how: Any) -> Callable[..., Any]:
        """Return a function for `map_clients` that calls `function(context, *shared, slots)`."""
        layout, context = Layout(self.ready.plan.mesh, self.ready.plan.chunk), self.context(self.ready.task)

        def ask(task: Task, slots: ClientSlot, **more: Any) -> Any:
            return function(replace(context, task=task), *shared, slots, layout=layout, **how, **more)

        return ask

    def map_clients(self, ids: np.ndarray, function: Callable[[Task, ClientSlot], Any]) -> Any:
        """Return `function(task, slots)` of each client, on the host; so many clients at once as fit into memory."""
        ready, found, order = self.ready, [], []
        mesh, num = ready.plan.mesh, ready.task.num_clients
        for group, task in enumerate(ready.tasks):
            places = np.flatnonzero(ids % len(ready.tasks) == group)
            for piece, padded in self.pieces(ids[places]):
                # A newcomer has no record: any will do, since one that has not joined is enrolled.
                record = self.client_states.take(np.where(padded < num, padded, 0), self.completed)
                padded, is_known = devices.shared_out((padded, padded < num), mesh)
                slots = ClientSlot(padded, jnp.logical_and(record.joined, is_known), self._states(record.client, task))
                some = devices.to_host(function(task, slots), mesh)
                found.append(jax.tree.map(lambda leaf, piece=piece: leaf[: len(piece)], some))
            order.append(places)
        back = np.argsort(np.concatenate(order))

        def joined(*leaves: np.ndarray) -> np.ndarray:
            whole = np.concatenate(leaves) if len(leaves) > 1 else leaves[0]
            return whole[back] if len(ready.tasks) > 1 else whole  # one group is in order already

        return jax.tree.map(joined, *found)

    def pieces(self, ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Split clients into pieces whose records fit into memory, each as it is and filled up to a common length."""
        step = at_once(self.ready.record, self.ready.plan, len(ids))
        return [(ids[i : i + step], np.resize(ids[i : i + step], step)) for i in range(0, len(ids), max(1, step))]

    def slot(self, client: int) -> ClientSlot:
        """Return the slot of a client; a client that took no part has the network of its number and no state."""
        ready, is_known = self.ready, client < self.ready.task.num_clients
        rows = np.full(ready.plan.hands, client if is_known else client % len(ready.tasks))
        record = devices.to_host(self.client_states.take(rows, self.completed), ready.plan.mesh)
        state = jax.tree.map(lambda leaf: leaf[0], self._states(record.client, ready.task_of(client)))
        return ClientSlot(jnp.int32(client), jnp.asarray(record.joined[0] & is_known), state)

    def _states(self, stacked: Any, task: Task) -> Any:
        """Return the states of clients that have the network of a task."""
        return stacked if len(self.ready.tasks) == 1 else _unpacked(self.ready.method, task, stacked)

    def chosen(self, num: int | None) -> np.ndarray:
        """Return the clients of an evaluation of `num`; all by default."""
        ids = self._participants()
        if num is None or num >= len(ids):
            return ids
        return np.sort(np.asarray(subset(rng.key(self.ready.root, Stream.CHOICE), len(ids), num)))

    def _participants(self) -> np.ndarray:
        return np.arange(self.ready.federation.num_clients)

    def _newcomers(self) -> np.ndarray:
        return np.arange(self.ready.federation.num_clients, len(self.ready.federation.clients))

    def _has_test_examples(self, ids: np.ndarray) -> bool:
        """Return whether there is anything to score; compiling an evaluation of nothing takes seconds."""
        return bool(np.asarray(self.ready.federation.test.count)[ids].any())


def summarised(tallies: Tally | RegressionTally | None) -> AnyScores:
    """Return the scores of tallies, if there are any."""
    return None if tallies is None else metrics.summarise(tallies)


@jax.jit
def _unpacked(method: Method, task: Task, stacked: Any) -> Any:
    return jax.vmap(partial(architectures.unpack, like=architectures.client_shape(method, task)))(stacked)
