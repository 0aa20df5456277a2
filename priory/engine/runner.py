"""A run under way: rounds, evaluations and commits, from the first round to the summary."""

import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from priory import methods, metrics
from priory.core.errors import UsageError
from priory.core.reading import JsonDict
from priory.engine import accounting, devices, divergence, grouping, manifest
from priory.engine.advice import Adviser
from priory.engine.clients import Resident, Stored
from priory.engine.divergence import Progress
from priory.engine.evaluator import NEWCOMERS, AnyScores, Evaluator
from priory.engine.history import History
from priory.engine.manifest import Recipe
from priory.engine.prepared import BLOCK, Prepared, prepare
from priory.engine.problem import names_of
from priory.engine.rounds import Trace
from priory.engine.run import Run, result
from priory.engine.run_log import RunLog
from priory.fed.method import Channel
from priory.fed.visit import is_rejected, reason_of
from priory.records import gone
from priory.store import Checkpoint, RunDirectory
from priory.track import Tracker

LOOK_SECONDS = 1.0  # about how long a block takes, so that Ctrl-C is noticed
COMMIT_SECONDS = 30.0  # how much work a crash may cost between evaluations
NAMED = 100  # most clients whose uncertainty a line of the metrics names


class Listener(Protocol):
    """Is called as a run advances; the command line draws a bar from it."""

    def advanced(self, completed: int, rounds: int, info: dict[str, float]) -> None:
        """A block of rounds ended."""

    def evaluated(self, line: dict[str, Any]) -> None:
        """A line was added to the metrics."""


@dataclasses.dataclass
class Runner:
    """Advances a run, evaluates it on the way, and commits it."""

    ready: Prepared
    manifest: dict[str, Any]
    log: RunLog
    client_states: Resident | Stored
    server: Any
    adviser: Adviser
    progress: Progress = dataclasses.field(default_factory=Progress)

    @classmethod
    def reopen(cls, recipe: Recipe, path: Path | str, model: Any = None, channel: Channel | None = None) -> "Runner":
        """Open the run in a directory as of its last commit."""
        # The noise so far, not what this version of an accountant would solve for.
        noise = RunDirectory(path).committed().get("noise")
        ready = prepare(recipe.method, recipe.federation, recipe.settings, model, channel, noise)
        return cls.begin(ready, path, resume=True)

    @classmethod
    def begin(cls, ready: Prepared, out: Path | str | None, resume: bool = False) -> "Runner":
        """Place the first server and the clients' records, or those of the last commit, and open the run directory."""
        server, directory, checkpoint = ready.first_server(), None, None
        table = manifest.write(ready.method, ready.federation, ready.settings, ready.model, ready.given, ready.plan)
        if out is not None and (resume or jax.process_index() == 0):
            directory = RunDirectory(out)
            if not resume:
                directory.create(table)
            checkpoint = Checkpoint(directory.checkpoint, server, ready.record, ready.federation.num_clients)
        states = ready.client_states(checkpoint.clients if checkpoint else None)
        log = RunLog(directory, checkpoint, ready.ledger)
        runner = cls(ready, table, log, states, server, Adviser(ready.method, ready.task))
        if resume:
            runner._restore()
        return runner

    @property
    def evaluator(self) -> Evaluator:
        """The run after the rounds so far."""
        return Evaluator(self.ready, self.client_states, self.server, self.log.completed)

    def run(self, listener: Listener | None, stop: Callable[[], bool], tracker: Tracker | None = None) -> Run:
        """Run the rounds until the end or a stop, and return the run; no other process may write it meanwhile."""
        checkpoint = self.log.checkpoint
        with checkpoint.held() if checkpoint and jax.process_index() == 0 else nullcontext():
            self._take_over()
            with nullcontext(listener) if tracker is None else self._followed(tracker, listener) as followed:
                self._run_rounds(followed, stop)
                if self.log.completed < self.ready.last_round:
                    self.log.history.keep()
                    return self._result(None, None, {})
                run = self._finished(followed)
                if tracker is not None:
                    tracker.finished(run.summary())
                return run

    def _followed(self, tracker: Tracker, listener: Listener | None = None) -> AbstractContextManager[Listener]:
        """Combine the listener and the tracker."""
        ready, directory = self.ready, self.log.directory
        spec = self.manifest["method"]["name"], Path(ready.federation.name).stem, f"s{ready.settings.seed}"
        title = directory.path.resolve().name if directory else "-".join(spec)
        return tracker.following(title, self.manifest, self.log.history, listener)

    def _run_rounds(self, listener: Listener | None, stop: Callable[[], bool]) -> None:
        """Run rounds, evaluations and commits until the end or a stop."""
        ready, log, block, committed = self.ready, self.log, 1, time.perf_counter()
        advice = ready.settings.advice(ready.method, ready.channel)
        if ready.ledger is not None:
            advice |= accounting.advice(ready.ledger, ready.task.num_clients)
        self.adviser.add(advice)
        while log.completed < ready.last_round and not devices.agreed(stop()):
            until = min(ready.settings.next_stop(log.completed, block), ready.last_round)
            started = time.perf_counter()
            with ready.clock.booking("train"):
                self.server, trace = self.client_states.run(ready.inputs, self.server, log.completed, until)
            pace = (time.perf_counter() - started) / (until - log.completed)
            block = devices.agreed(next_block(pace))
            log.completed = until
            self._note(trace)
            if listener is not None:
                listener.advanced(until, ready.last_round, log.info)
            if until < ready.last_round and ready.settings.evaluates_at(until):
                some = ready.settings.eval_clients
                self._advise()
                newcomers = self.evaluator.newcomer_scores() if ready.settings.eval_newcomers else {}
                self._append(self._line(*self.evaluator.scores(some), some) | _as_json(newcomers), listener)
                committed = self._commit()
            elif devices.agreed(time.perf_counter() - committed > COMMIT_SECONDS):
                committed = self._commit()
        self._commit()

    def _take_over(self) -> None:
        """Drop what a run that died left behind its last commit; every process read it, the first alone writes on."""
        log = self.log
        if log.directory is None or log.checkpoint is None:
            return
        if log.checkpoint.is_stale():
            raise UsageError(f"{log.directory.path} was written by another process meanwhile; resume it once more.")
        if jax.process_index() > 0:
            log.history = History(log.directory.metrics(log.metrics_bytes))
            log.directory = log.checkpoint = None
        log.take_over()

    def _finished(self, listener: Listener | None) -> Run:
        """Evaluate all clients and newcomers, write the summary, and return the run."""
        ready, log, evaluator = self.ready, self.log, self.evaluator
        personal, population = evaluator.scores()
        newcomers = evaluator.newcomer_scores()
        # Not part of a commit: a run killed here evaluates again and writes the same line in the same place.
        self._append(self._line(personal, population, None) | _as_json(newcomers), listener)
        self._advise()
        self._judge(personal, population, newcomers.get("newcomers"))
        run = self._result(personal, population, newcomers)
        run.extra.update(grouping.clusters_of(ready.method, ready.federation, evaluator.map_clients))
        if len(ready.tasks) > 1 and personal is not None:
            names = names_of(ready.settings, ready.model, ready.tasks)
            run.extra["architectures"] = grouping.by_architecture(names, personal)
        if log.directory is not None and log.checkpoint is not None:
            self._check_in_place()
            log.checkpoint.check_in_place()
            log.directory.write_summary(run.summary(), run.per_client())
            log.history.keep()
        return run

    def _check_in_place(self) -> None:
        """Raise if the files of the run were deleted meanwhile: it would end as if it could be read again.

        The checkpoint is checked by each commit.
        """
        if self.log.directory is not None:
            self.log.directory.check_in_place(self.log.metrics_bytes)
            if not (path := self.log.directory.path / "manifest.toml").exists():
                raise gone(path)

    def _note(self, trace: Trace) -> None:
        """Remember the last round's figures, the clients that were rejected with the reasons, and what came of it."""
        self.log.info = {name: float(values[-1]) for name, values in trace.info.items()}
        self.progress = self.progress.after(trace)
        rejected = is_rejected(trace.status)
        for client, status in zip(trace.ids[rejected], trace.status[rejected], strict=True):
            self.log.rejected[self.ready.federation.clients[client]] += 1
            self.log.reasons[reason_of(int(status))] += 1

    def _advise(self) -> None:
        """Warn of what the method makes of the last round's figures."""
        last = self.ready.last_round
        self.adviser.add(self.adviser.of_figures(self.log.info, self.log.completed / last if last else 1.0))

    def _judge(self, *scores: AnyScores) -> None:
        """Warn where training has diverged."""
        parts = dict(zip(("personal", "global", "newcomers"), scores, strict=True))
        sentence = divergence.sentence(self.ready.method, self.ready.federation, parts, self.progress)
        if sentence is not None:
            self.adviser.warn({divergence.DIVERGED: sentence})
            self.adviser.given[divergence.DIVERGED] = sentence

    def _line(self, personal: AnyScores, population: AnyScores, num: int | None) -> dict[str, Any]:
        """Return the line of the metrics for an evaluation of all clients, or of `num`."""
        uncertainty = {"uncertainty": self._uncertainty(personal, num)}
        return self.log.line(
            _as_json({"personal": personal, "global": population}) | uncertainty, self.ready.clock.seconds
        )

    def _uncertainty(self, personal: AnyScores, num: int | None) -> dict[str, float | None] | None:
        """Return how uncertain each evaluated client is of its test examples, by name; None where they are too many."""
        ids = self.evaluator.chosen(num)
        if personal is None or len(ids) > NAMED:
            return None
        values = personal.per_client["uncertainty"].tolist()
        named = zip((self.ready.federation.clients[client] for client in ids), values, strict=True)
        return {name: metrics.finite_or_none(value) for name, value in named}

    def _append(self, line: dict[str, Any], listener: Listener | None) -> None:
        self.log.append(line)
        if listener is not None:
            listener.evaluated(line)

    def _commit(self) -> float:
        """Commit everything so far, and return the time."""
        log, checkpoint = self.log, self.log.checkpoint
        if checkpoint is not None or jax.process_count() > 1:
            before = checkpoint.round if checkpoint else 0
            self.client_states.save(log.completed, max(before, 0))
        if checkpoint is not None:
            self._check_in_place()
            log.commit(devices.to_host(self.server, self.ready.plan.mesh), self._extra())
        return time.perf_counter()

    def _extra(self) -> dict[str, Any]:
        """Return the contents of a commit besides states and counters."""
        noise = {"noise": self.ready.ledger.noise} if self.ready.ledger else {}
        advice, progress = self.adviser.given, dataclasses.asdict(self.progress)
        return {"origin": self._origin(), "advice": advice, "progress": progress, **noise}

    def _origin(self) -> dict[str, Any]:
        """Return what distinguishes the checkpoints of two runs whose states have one shape."""
        return {
            "method": self.manifest["method"]["name"],
            "seed": self.ready.settings.seed,
            "data_checksum": self.ready.federation.checksum,
        }

    def _restore(self) -> None:
        log = self.log
        assert log.checkpoint is not None
        assert log.directory is not None
        if log.checkpoint.round < 0:
            return  # killed before the first commit: the manifest is all there is
        origin = log.checkpoint.extra.get("origin", self._origin())  # commits of older versions have none
        if _present(origin) != _present(self._origin()) or log.checkpoint.round > self.ready.settings.rounds:
            raise UsageError(
                f"The checkpoint in {log.directory.path} is not that of its manifest.toml but of another run; "
                "bring back its own, or run the manifest again in another directory."
            )
        extra = log.restore()
        # Commits of older versions have none; that their rounds changed nothing is unlikely.
        self.progress = Progress(**extra.get("progress", {"learned": True}))
        self.adviser.given = dict(extra.get("advice", {}))
        self.server = devices.everywhere(log.checkpoint.read_server(), self.ready.plan.mesh)
        self.client_states.restore(log.completed)

    def loaded(self, tracker: Tracker | None = None) -> Run:
        """Return the run as its directory has it, nothing computed."""
        directory, history = self.log.directory, self.log.history
        assert directory is not None
        summary, per_client = directory.summary() or {}, directory.per_client()
        if summary and [line["round"] for line in history[-1:]] != [summary["rounds"]]:
            raise UsageError(
                f"{directory.path / 'metrics.jsonl'} does not end with the round of summary.json, so it "
                "was cut; delete summary.json and resume the run."
            )
        if summary:
            history.keep()
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
                f"The scores in summary.json and clients.json of {directory.path} are damaged; delete both and "
                "resume the run."
            ) from None
        run = self._result(scores.pop("personal"), scores.pop("global"), scores)
        keep = {name: summary[name] for name in ("communication", "seconds", "extra") if name in summary}
        return dataclasses.replace(run, **keep)

    def _result(self, personal: AnyScores, population: AnyScores, newcomers: dict[str, AnyScores]) -> Run:
        scores = personal, population, newcomers
        return result(self.evaluator, self.log, self.adviser, scores, self.manifest, self._extra())


def _present(origin: JsonDict) -> JsonDict:
    """Return the origin of a commit with the present name of its method."""
    return origin | {"method": methods.canonical({"method": {"name": origin.get("method")}})["method"]["name"]}


def next_block(pace: float) -> int:
    """Return how many rounds to run before the next look at the clock, when a round takes `pace` seconds."""
    return int(np.clip(LOOK_SECONDS / max(pace, 1e-6), 1, BLOCK))


def _as_json(scores: dict[str, AnyScores]) -> dict[str, Any]:
    """Return scores by part, as a line of the metrics has them."""
    return {part: found.to_json() if found else None for part, found in scores.items()}
