"""A run under way: rounds, evaluations and commits, from the first round to the summary."""

import dataclasses
import math
import resource
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from priory import methods, metrics
from priory.certificate import Counts, counts_of_clients
from priory.core import rng, trees
from priory.core.errors import UsageError
from priory.core.rng import Key, Stream
from priory.data import Federation
from priory.effects import Effects, effects_of_clients, effects_of_server, gather
from priory.engine import accounting, architectures, devices, divergence, grouping, manifest
from priory.engine.accounting import Ledger
from priory.engine.architectures import Tasks
from priory.engine.clients import Resident, Stored
from priory.engine.clock import Clock
from priory.engine.cohort import subset
from priory.engine.divergence import Progress
from priory.engine.history import History
from priory.engine.prepared import BLOCK, Prepared, at_once, first_server, prepare
from priory.engine.problem import names_of
from priory.engine.rounds import Plan, Trace
from priory.engine.run import NEWCOMERS, Run
from priory.engine.settings import Settings
from priory.evaluate import (
    ClientTallies,
    Standing,
    draws_of_clients,
    evidence_of_clients,
    evidence_of_server,
    rows_of_clients,
    tally_clients,
)
from priory.fed import schedule
from priory.fed.capabilities import AdviceWarning, Advises
from priory.fed.method import Channel, Method, Task
from priory.fed.screen import Limits
from priory.fed.shard import Shards
from priory.fed.visit import is_rejected, reason_of
from priory.metrics import RegressionScores, RegressionTally, Scores, Tally
from priory.models.model import Params, several
from priory.records import gone
from priory.store import Checkpoint, RunDirectory
from priory.track import Tracker
from priory.uncertainty import Answers, ForeignInputs, collect, validation_of

LOOK_SECONDS = 1.0  # about how long a block takes, so that Ctrl-C is heard
COMMIT_SECONDS = 30.0  # how much work a crash may cost between evaluations
NAMED = 100  # most clients whose uncertainty a line of the metrics names

AnyScores = Scores | RegressionScores | None


class Listener(Protocol):
    """Hears of progress; the command line draws a bar from it."""

    def advanced(self, completed: int, rounds: int, info: dict[str, float]) -> None:
        """A block of rounds ended."""

    def evaluated(self, line: dict[str, Any]) -> None:
        """A line was added to the metrics."""


@dataclass
class Session:
    """A run under way."""

    method: Method
    federation: Federation
    settings: Settings
    tasks: Tasks
    models: tuple[str, ...]
    channel: Channel | None
    plan: Plan
    train: Shards
    test: Shards
    validation: Shards | None
    root: Key
    home: Resident | Stored
    server: Any
    directory: RunDirectory | None
    checkpoint: Checkpoint | None
    record: Any
    manifest: dict[str, Any]
    clock: Clock
    ledger: Ledger | None = None
    completed: int = 0
    metrics_bytes: int = 0
    info: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    advice: dict[str, str] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    history: History = field(default_factory=History)

    @classmethod
    def prepare(
        cls,
        method: Method,
        federation: Federation,
        chosen: Settings,
        model: Any,
        channel: Channel | None,
        out: Path | str | None,
        resume: bool,
    ) -> "Session":
        """Everything checked and placed, nothing run."""
        # The noise so far, not what this version of an accountant would solve for.
        noise = RunDirectory(out).committed().get("noise") if resume and out is not None else None
        return cls.begin(prepare(method, federation, chosen, model, channel, noise), out, resume)

    @classmethod
    def begin(cls, ready: Prepared, out: Path | str | None, resume: bool) -> "Session":
        """Place the first server and the clients' records, and open the run directory."""
        federation, plan, record = ready.federation, ready.plan, ready.record
        with ready.clock.booking("train"):
            key = rng.key(ready.root, Stream.INIT)
            server = devices.everywhere(first_server(ready.method, ready.task, key), plan.mesh)
        directory = checkpoint = None
        table = manifest.write(ready.method, federation, ready.settings, ready.model, ready.given, plan)
        if out is not None and (resume or jax.process_index() == 0):
            directory = RunDirectory(out)
            if not resume:
                directory.create(table)
            checkpoint = Checkpoint(directory.checkpoint, server, record, federation.num_clients)
        home = ready.home(record, federation.num_clients, plan, checkpoint.clients if checkpoint else None)
        names = names_of(ready.settings, ready.model, ready.tasks)
        made = cls(
            ready.method, federation, ready.settings, ready.tasks, names, ready.channel, plan, ready.train, ready.test,
            ready.validation, ready.root, home, server, directory, checkpoint, record, table, ready.clock, ready.ledger,
        )  # fmt: skip
        if resume:
            made._restore()
        return made

    def run(self, listener: Listener | None, stop: Callable[[], bool], tracker: Tracker | None = None) -> Run:
        """The run after its rounds, or as far as it was when told to stop; no other process may write it meanwhile."""
        with self.checkpoint.held() if self.checkpoint and jax.process_index() == 0 else nullcontext():
            if self.directory is not None:
                self._take_over()
            with nullcontext(listener) if tracker is None else self._followed(tracker, listener) as told:
                self._run_rounds(told, stop)
                if self.completed < self.last_round:
                    self.history.keep()
                    return self._result(None, None, {})
                run = self._finished(told)
                if tracker is not None:
                    tracker.finished(run.summary())
                return run

    def _followed(self, tracker: Tracker, listener: Listener | None = None) -> AbstractContextManager[Listener]:
        """The listener and the tracker as one."""
        spec = self.manifest["method"]["name"], Path(self.federation.name).stem, f"s{self.settings.seed}"
        title = self.directory.path.resolve().name if self.directory else "-".join(spec)
        return tracker.following(title, self.manifest, self.history, listener)

    def _run_rounds(self, listener: Listener | None, stop: Callable[[], bool]) -> None:
        """Rounds, evaluations and commits until the end or until told to stop."""
        block, committed = 1, time.perf_counter()
        told = self.settings.advice(self.method, self.channel)
        if self.ledger is not None:
            told |= accounting.advice(self.ledger, self.task.num_clients)
        accounting.warn(told, self.advice)
        while self.completed < self.last_round and not devices.agreed(stop()):
            until = min(self.settings.next_stop(self.completed, block), self.last_round)
            started = time.perf_counter()
            with self.clock.booking("train"):
                problem, span = (self.method, self.tasks, self.channel, self.train), (self.completed, until)
                self.server, trace = self.home.run(problem, self.root, self.server, *span, self.validation, self.limits)
            pace = (time.perf_counter() - started) / (until - self.completed)
            block = devices.agreed(next_block(pace))
            self.completed = until
            self._note(trace)
            if listener is not None:
                listener.advanced(until, self.last_round, self.info)
            if until < self.last_round and self.settings.evaluates_at(until):
                some = self.settings.eval_clients
                self._advise()
                told = _told(self._evaluate_newcomers()) if self.settings.eval_newcomers else {}
                self._append(self._line(*self._evaluate(some), some) | told, listener)
                committed = self._commit()
            elif devices.agreed(time.perf_counter() - committed > COMMIT_SECONDS):
                committed = self._commit()
        self._commit()

    def _take_over(self) -> None:
        """Drop what a run that died left behind its last commit; every process read it, the first alone writes on."""
        assert self.directory is not None
        assert self.checkpoint is not None
        if self.checkpoint.is_stale():
            raise UsageError(f"{self.directory.path} was written by another process meanwhile; resume it once more.")
        lines = self.directory.metrics(self.metrics_bytes)
        if jax.process_index() > 0:
            self.directory, self.checkpoint, self.history = None, None, History(lines)
            return
        self.history = History(directory=self.directory, length=self.metrics_bytes)
        self.checkpoint.clients.discard_after(self.completed)
        self.directory.cut_metrics(self.metrics_bytes)

    def _finished(self, listener: Listener | None) -> Run:
        """The run with its last evaluation, of all clients and of newcomers, and its summary on disk."""
        personal, population = self._evaluate(None)
        newcomers = self._evaluate_newcomers()
        line = self._line(personal, population, None) | _told(newcomers)
        # Not part of a commit: a run killed here evaluates again and writes the same line in the same place.
        self._append(line, listener)
        self._advise()
        self._judge(personal, population, newcomers.get("newcomers"))
        run = self._result(personal, population, newcomers)
        run.extra.update(grouping.clusters_of(self.method, self.federation, self._of_each))
        if len(self.tasks) > 1 and personal is not None:
            run.extra["architectures"] = grouping.by_architecture(self.models, personal)
        if self.directory is not None:
            assert self.checkpoint is not None
            self._check_in_place()
            self.checkpoint.check_in_place()
            self.directory.write_summary(run.summary(), run.per_client())
            self.history.keep()
        return run

    def _check_in_place(self) -> None:
        """Raise if somebody deleted the files of the run meanwhile: it would end as if it could be read again.

        The checkpoint is checked by each commit.
        """
        assert self.directory is not None
        self.directory.check_in_place(self.metrics_bytes)
        if not (path := self.directory.path / "manifest.toml").exists():
            raise gone(path)

    def _evaluate(self, num: int | None) -> tuple[AnyScores, AnyScores]:
        """Personal and global scores of all clients, or of a fixed random choice of `num`."""
        ids = self._chosen(num)
        if not self._has_test_examples(ids):
            return None, None
        total = self._tallies(ids)
        return _summarised(total.personal), _summarised(total.population)

    def _chosen(self, num: int | None) -> np.ndarray:
        everyone = np.arange(self.federation.num_clients)
        if num is None or num >= len(everyone):
            return everyone
        return np.sort(np.asarray(subset(rng.key(self.root, Stream.CHOICE), len(everyone), num)))

    def _evaluate_newcomers(self) -> dict[str, AnyScores]:
        """Scores of the clients that were held out, one for each way in, by the name of `NEWCOMERS`."""
        ids = np.arange(self.federation.num_clients, len(self.federation.clients))
        if not self._has_test_examples(ids):
            return dict.fromkeys(NEWCOMERS)
        total = self._tallies(ids, visits=self.settings.onboard_visits, arriving=True)
        ways = (total.personal, total.unlabelled, total.population)
        return {part: _summarised(tallies) for part, tallies in zip(NEWCOMERS, ways, strict=True)}

    def _has_test_examples(self, ids: np.ndarray) -> bool:
        """Whether there is anything to score; compiling an evaluation of nothing takes seconds."""
        return bool(np.asarray(self.federation.test.count)[ids].any())

    def _tallies(self, ids: np.ndarray, **how: Any) -> ClientTallies:
        with self.clock.booking("evaluate"):
            total: ClientTallies = self._of_each(ids, self._asking(tally_clients, self.test, **how))
        return total

    def evidence(self) -> tuple[np.ndarray, float]:
        """The evidence of each client that takes part, and of the server, where the rounds so far have led."""
        per_client = self._of_each(np.arange(self.task.num_clients), self._asking(evidence_of_clients))
        server = evidence_of_server(self.settled, self.task, self._broadcast()[0])
        return per_client, float(devices.to_host(server, self.plan.mesh))

    def effects(self, level: float, keep: bool) -> Effects:
        """Return the random effects of each client that takes part, where the rounds so far have led.

        Warns of the advice on these rounds that this process has not given yet.

        Args:
            keep: Whether to keep the draws.
        """
        told = self._advice(progress=1.0)  # what is shown is taken for the answer, whatever rounds are still to come
        self._warn({kind: sentence for kind, sentence in told.items() if kind not in self.warned})
        mesh, num = self.plan.mesh, self.task.num_clients
        shared = devices.everywhere(np.float32(level), mesh)
        found = self._of_each(np.arange(num), self._asking(effects_of_clients, shared, keep=keep))
        server = devices.to_host(effects_of_server(self.method, self.task, self._broadcast()[0]), mesh)
        examples = np.asarray(self.federation.train.count[:num])
        return gather(found, server, self.federation.clients[:num], examples, level, told)

    def counts(self, ids: np.ndarray, draws: int) -> Counts:
        """What certificates of newcomers are computed from, stacked, where the rounds so far have led."""
        visits = self.settings.onboard_visits
        found: Counts = self._of_each(ids, self._asking(counts_of_clients, visits=visits, num=draws))
        return found

    def draws(self, num: int) -> Params:
        """So many networks of each participant's posterior, leaves (clients, num, ...), where the rounds have led."""
        drawn: Params = self._of_each(np.arange(self.task.num_clients), self._asking(draws_of_clients, num=num))
        return drawn

    def answers(self, foreign: ForeignInputs | None) -> dict[str, Answers]:
        """What the models say of every held-out example, by part as in the summary, where the rounds so far have led.

        Args:
            foreign: What the personal models of participants are asked about besides.
        """
        num, everyone = self.task.num_clients, len(self.federation.clients)
        inputs = None if foreign is None else devices.everywhere(foreign.shard(self.test.pool), self.plan.mesh)
        found = self._answers(np.arange(num), inputs)
        parts = {"personal": "personal", "global": "population"}
        told = {name: found[part] for name, part in parts.items() if part in found}
        if everyone > num:
            found = self._answers(np.arange(num, everyone), None, visits=self.settings.onboard_visits, arriving=True)
            ways = zip(NEWCOMERS, ("personal", "unlabelled", "population"), strict=True)
            told |= {name: found[part] for name, part in ways if part in found}
        return told

    def _answers(self, ids: np.ndarray, foreign: Any, **how: Any) -> dict[str, Answers]:
        held = devices.everywhere((self.test, validation_of(self.federation, self.test)), self.plan.mesh)
        ask = self._asking(rows_of_clients, held, foreign, **how)
        return collect(self.federation, ids, self._of_each, ask)

    def _asking(self, function: Callable[..., Any], *shared: Any, **how: Any) -> Callable[..., Any]:
        """A function for `_of_each`: `function(standing, *shared, ids, joined, states)` where the rounds have led."""
        down, step = self._broadcast()

        def ask(task: Task, *places: Any, **more: Any) -> Any:
            standing = Standing(self.method, self.settled, task, down, self.train, self.root, step)
            return function(standing, *shared, *places, mesh=self.plan.mesh, batch=self.plan.chunk, **how, **more)

        return ask

    def _broadcast(self) -> tuple[Any, Any]:
        """What would be broadcast now and the number of rounds done, on every device."""
        return devices.everywhere((self.method.broadcast(self.server), np.int32(self.completed)), self.plan.mesh)

    def _of_each(self, ids: np.ndarray, function: Callable[..., Any]) -> Any:
        """What `function(task, ids, joined, states)` gives for each client, on the host; so many at once as fit."""
        mesh, found, order = self.plan.mesh, [], []
        for group, task in enumerate(self.tasks):
            places = np.flatnonzero(ids % len(self.tasks) == group)
            for piece in self._pieces(ids[places]):
                padded = np.resize(piece, self._rows(len(places)))
                # A newcomer has no record: any will do, since one that has not joined is enrolled.
                record = self.home.take(np.where(padded < task.num_clients, padded, 0), self.completed)
                placed = devices.shared_out((padded, padded < task.num_clients), mesh)
                states = self._states(record.client, task)
                some = function(task, placed[0], jnp.logical_and(record.joined, placed[1]), states)
                found.append(jax.tree.map(lambda leaf, piece=piece: leaf[: len(piece)], devices.to_host(some, mesh)))
            order.append(places)
        back = np.argsort(np.concatenate(order))

        def joined(*leaves: np.ndarray) -> np.ndarray:
            whole = np.concatenate(leaves) if len(leaves) > 1 else leaves[0]
            return whole[back] if len(self.tasks) > 1 else whole  # one group is in order already

        return jax.tree.map(joined, *found)

    def _states(self, stacked: Any, task: Task) -> Any:
        """The states of clients that have the network of a task."""
        if len(self.tasks) == 1:
            return stacked
        return _unpacked(self.method, task, stacked)

    @property
    def last_round(self) -> int:
        """The round that the run ends with: the last of those planned, or the last that a privacy budget allows."""
        return self.settings.rounds if self.ledger is None else self.ledger.rounds

    @property
    def limits(self) -> Limits:
        """What a message may be at most."""
        return self.settings.limits(self.task)

    @property
    def task(self) -> Task:
        """The problem of the first group; of all, where there are no others."""
        return self.tasks[0]

    def task_of(self, client: int) -> Task:
        """The problem of a client."""
        return self.tasks[client % len(self.tasks)]

    def model_text(self, client: int) -> str | None:
        """What names the network of a client; None where it was given as an object."""
        if "model" in self.manifest["given"]:
            return None
        run = self.manifest["run"]
        return several(run["models"])[client % len(self.tasks)] if "models" in run else str(run["model"])

    @property
    def settled(self) -> Any:
        """The method as the schedules have it in the last round so far: how a client that comes now would update."""
        last = max(self.completed - 1, 0)
        return schedule.resolve(self.method, self.plan.schedules, last, self.plan.rounds)

    def _rows(self, num: int) -> int:
        """Clients evaluated in one call: a multiple of the devices, small enough for their records to fit."""
        return at_once(self.record, self.plan, num)

    def _pieces(self, ids: np.ndarray) -> list[np.ndarray]:
        step = max(1, self._rows(len(ids)))
        return [ids[i : i + step] for i in range(0, len(ids), step)]

    def _note(self, trace: Trace) -> None:
        """Remember the last round's figures, the clients that were rejected with the reasons, and what came of it."""
        self.info = {name: float(values[-1]) for name, values in trace.info.items()}
        self.progress = self.progress.after(trace)
        rejected = is_rejected(trace.status)
        for client, status in zip(trace.ids[rejected], trace.status[rejected], strict=True):
            name, reason = self.federation.clients[client], reason_of(int(status))
            self.rejected[name] = self.rejected.get(name, 0) + 1
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def _advise(self) -> None:
        """Warn of what the method makes of the last round's figures, once for each kind; the newest words are kept."""
        told = self._advice(self.completed / self.last_round if self.last_round else 1.0)
        self._warn({kind: sentence for kind, sentence in told.items() if kind not in self.advice})
        self.advice.update(told)

    def _judge(self, *scores: AnyScores) -> None:
        """Warn where training has diverged."""
        parts = dict(zip(("personal", "global", "newcomers"), scores, strict=True))
        told = divergence.sentence(self.method, self.federation, parts, self.progress)
        if told is not None:
            self._warn({divergence.DIVERGED: told})
            self.advice[divergence.DIVERGED] = told

    def _advice(self, progress: float) -> dict[str, str]:
        """Return the sentences that the method has for the last round's figures, with this share of the rounds done."""
        if not isinstance(self.method, Advises):
            return {}
        return self.method.advice(self.task, self.info | {"progress": progress})

    def _warn(self, told: dict[str, str]) -> None:
        for sentence in told.values():
            warnings.warn(sentence, AdviceWarning, stacklevel=3)
        self.warned |= told.keys()

    def _line(self, personal: AnyScores, population: AnyScores, num: int | None) -> dict[str, Any]:
        """What the metrics say of an evaluation of all clients, or of `num`."""
        return {
            "round": self.completed,
            "personal": personal.to_json() if personal else None,
            "global": population.to_json() if population else None,
            "uncertainty": self._uncertainty(personal, num),
            "info": {name: metrics.finite_or_none(value) for name, value in self.info.items()},
            "rejected": dict(self.rejected),
            "reasons": dict(self.reasons),
            **({"epsilon": metrics.finite_or_none(self.ledger.spent(self.completed))} if self.ledger else {}),
            "seconds": {name: round(value, 3) for name, value in self.clock.seconds.items()},
        }

    def _uncertainty(self, personal: AnyScores, num: int | None) -> dict[str, float | None] | None:
        """How uncertain each evaluated client is of its test examples, by name; None where they are too many."""
        ids = self._chosen(num)
        if personal is None or len(ids) > NAMED:
            return None
        values = personal.per_client["uncertainty"].tolist()
        named = zip((self.federation.clients[client] for client in ids), values, strict=True)
        return {name: metrics.finite_or_none(value) for name, value in named}

    def _append(self, line: dict[str, Any], listener: Listener | None) -> None:
        if self.directory is not None:
            self.metrics_bytes = self.directory.append_metrics(line, self.metrics_bytes)
        self.history.append(line, self.metrics_bytes)
        if listener is not None:
            listener.evaluated(line)

    def _commit(self) -> float:
        """The time at which everything so far became safe."""
        if self.checkpoint is not None or jax.process_count() > 1:
            before = self.checkpoint.round if self.checkpoint else 0
            self.home.save(self.completed, max(before, 0))
        if self.checkpoint is not None:
            self._check_in_place()
            server = devices.to_host(self.server, self.plan.mesh)
            assert self.directory is not None
            digest = self.directory.metrics_sha256(self.metrics_bytes)
            self.checkpoint.commit(server, self.completed, self.metrics_bytes, self._extra(), digest)
        return time.perf_counter()

    def _extra(self) -> dict[str, Any]:
        """What a commit holds beside the states: the last round's figures are part of the last line of the metrics."""
        noise = {"noise": self.ledger.noise} if self.ledger else {}
        told = {"info": self.info, "rejected": self.rejected, "reasons": self.reasons, "advice": self.advice}
        told["progress"] = dataclasses.asdict(self.progress)
        return {"origin": self._origin(), **told, **noise}

    def _origin(self) -> dict[str, Any]:
        """What tells the checkpoints of two runs apart whose states have one shape."""
        return {
            "method": self.manifest["method"]["name"],
            "seed": self.settings.seed,
            "data_checksum": self.federation.checksum,
        }

    def _restore(self) -> None:
        assert self.checkpoint is not None
        assert self.directory is not None
        if self.checkpoint.round < 0:
            return  # killed before the first commit: the manifest is all there is
        origin = self.checkpoint.extra.get("origin", self._origin())  # commits of older versions have none
        if origin != self._origin() or self.checkpoint.round > self.settings.rounds:
            raise UsageError(
                f"The checkpoint in {self.directory.path} is not that of its manifest.toml but of another run; "
                "bring back its own, or run the manifest again in another directory."
            )
        self.completed, self.metrics_bytes = self.checkpoint.round, self.checkpoint.metrics_bytes
        self.info = dict(self.checkpoint.extra.get("info", {}))
        self.rejected = dict(self.checkpoint.extra.get("rejected", {}))
        self.reasons = dict(self.checkpoint.extra.get("reasons", {}))  # commits of older versions have none
        # Commits of older versions have none; that their rounds changed nothing is unlikely.
        self.progress = Progress(**self.checkpoint.extra.get("progress", {"learned": True}))
        self.advice = dict(self.checkpoint.extra.get("advice", {}))
        self.server = devices.everywhere(self.checkpoint.read_server(), self.plan.mesh)
        self.home.restore(self.completed)
        self.directory.metrics(self.metrics_bytes)  # raises if it was cut or damaged
        self.history = History(directory=self.directory)

    def loaded(self, tracker: Tracker | None = None) -> Run:
        """The run as its directory tells it, nothing computed."""
        assert self.directory is not None
        summary, per_client = self.directory.summary() or {}, self.directory.per_client()
        if summary and [line["round"] for line in self.history[-1:]] != [summary["rounds"]]:
            raise UsageError(
                f"{self.directory.path / 'metrics.jsonl'} does not end with the round of summary.json, so it "
                "was cut; delete summary.json and resume the run."
            )
        if summary:
            self.history.keep()
        if tracker is not None:
            with self._followed(tracker):
                tracker.finished(summary)
        try:
            scores = {
                name: metrics.from_json(summary[name], per_client.get(name, {})) if summary.get(name) else None
                for name in ("personal", "global", *NEWCOMERS)
            }
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            raise UsageError(
                f"The scores in summary.json and clients.json of {self.directory.path} are damaged; delete both and "
                "resume the run."
            ) from None
        run = self._result(scores.pop("personal"), scores.pop("global"), scores)
        keep = {name: summary[name] for name in ("communication", "seconds", "extra") if name in summary}
        return dataclasses.replace(run, **keep)

    def save(self, path: Path, run: Run) -> None:
        """Write a run that was kept in memory as a run directory."""
        directory = RunDirectory(path)
        directory.create(self.manifest)
        checkpoint = Checkpoint(directory.checkpoint, self.server, self.record, self.task.num_clients)
        ids = np.arange(self.task.num_clients)
        for piece in self._pieces(ids):
            records = devices.to_host(
                self.home.take(np.resize(piece, self._rows(len(ids))), self.completed), self.plan.mesh
            )
            there = np.flatnonzero(records.joined[: len(piece)])
            joined = jax.tree.map(lambda leaf, there=there: leaf[there], records)
            checkpoint.clients.write(piece[there], joined, self.completed, 0)
        length = 0
        for line in self.history:
            length = directory.append_metrics(line, length)
        server = devices.to_host(self.server, self.plan.mesh)
        checkpoint.commit(server, self.completed, length, self._extra(), directory.metrics_sha256(length))
        checkpoint.close()
        if self.completed == self.last_round:
            directory.write_summary(run.summary(), run.per_client())

    def _result(self, personal: AnyScores, population: AnyScores, newcomers: dict[str, AnyScores]) -> Run:
        pools = self.method.pools
        down = jax.eval_shape(self.method.broadcast, self.server)
        up = self.info.get("bits", math.nan) / 8
        return Run(
            method=self.method,
            name=methods.name_of(self.method),
            federation=self.federation,
            task=self.task,
            settings=self.settings,
            server=self.server,
            completed=self.completed,
            personal=personal,
            population=population,
            **{part: newcomers.get(part) for part in NEWCOMERS},
            history=self.history,
            communication={
                "down_bytes": None if pools else trees.num_bytes(down),
                "up_bytes": None if pools or not math.isfinite(up) else int(up),
            },
            seconds=dict(self.clock.seconds),
            peak_rss_bytes=_peak_rss(),
            extra={
                "rejected": dict(self.rejected),
                "reasons": dict(self.reasons),
                **({"advice": dict(self.advice)} if self.advice else {}),
                **({"privacy": self.ledger.summary(self.completed)} if self.ledger else {}),
            },
            path=self.directory.path if self.directory else None,
            train=self.train,
            root=self.root,
            session=self,
        )

    def record_of(self, client: int) -> tuple[np.ndarray, Any]:
        """Whether a client has joined, and its state."""
        rows = np.full(self.plan.hands, client)
        record = devices.to_host(self.home.take(rows, self.completed), self.plan.mesh)
        states = self._states(record.client, self.task_of(client))
        return record.joined[0], jax.tree.map(lambda leaf: leaf[0], states)


def next_block(pace: float) -> int:
    """How many rounds to run before the next look at the clock, when a round takes so many seconds."""
    return int(np.clip(LOOK_SECONDS / max(pace, 1e-6), 1, BLOCK))


def _told(newcomers: dict[str, AnyScores]) -> dict[str, Any]:
    """What a line of the metrics says of newcomers."""
    return {part: scores.to_json() if scores else None for part, scores in newcomers.items()}


def _summarised(tallies: Tally | RegressionTally | None) -> AnyScores:
    return None if tallies is None else metrics.summarise(tallies)


def _peak_rss() -> int:
    """The most memory that this process has held, which includes earlier runs in it; macOS counts bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@jax.jit
def _unpacked(method: Method, task: Task, stacked: Any) -> Any:
    return jax.vmap(partial(architectures.unpack, like=architectures.client_shape(method, task)))(stacked)
