"""The log of a run: its lines of metrics, its counters and its commits, in simulation and in deployment."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from priory import metrics
from priory.engine.accounting import Ledger
from priory.engine.history import History
from priory.store import Checkpoint, RunDirectory


class RunLog:
    """Where a run is, what happened in it, and how much of that is safe.

    Attributes:
        directory: The run directory; None where nothing is written.
        checkpoint: Of server and clients; None where nothing is written.
        ledger: What privacy costs; None without differential privacy.
        completed: Rounds done.
        info: Figures of the last round.
        rejected: How many updates of each client did not count, by name.
        reasons: How often each reason for that was given.
        metrics_bytes: Length of the metrics that belong to this run.
        history: The lines of the metrics.
    """

    def __init__(self, directory: RunDirectory | None, checkpoint: Checkpoint | None, ledger: Ledger | None) -> None:
        self.directory, self.checkpoint, self.ledger = directory, checkpoint, ledger
        self.completed, self.metrics_bytes = 0, 0
        self.info: dict[str, float] = {}
        self.rejected: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.history = History() if directory is None else History(directory=directory, length=0)

    def line(self, about: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
        """Return a line of the metrics: scores and what else belongs to the round, then figures and counters."""
        spent = {} if self.ledger is None else {"epsilon": metrics.finite_or_none(self.ledger.spent(self.completed))}
        return {
            "round": self.completed,
            **about,
            "info": {name: metrics.finite_or_none(value) for name, value in self.info.items()},
            **self.counters(),
            **spent,
            "seconds": rounded(seconds),
        }

    def append(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        if self.directory is not None:
            self.metrics_bytes = self.directory.append_metrics(line, self.metrics_bytes)
        self.history.append(line, self.metrics_bytes)

    def commit(self, server: Any, extra: Mapping[str, Any]) -> None:
        """Make server, clients and lines so far what a run goes on from; `extra` is kept besides the counters."""
        if self.checkpoint is not None and self.directory is not None:
            contents = {"info": self.info, **self.counters(), **extra}
            digest = self.directory.metrics_sha256(self.metrics_bytes)
            self.checkpoint.commit(server, self.completed, self.metrics_bytes, contents, digest)

    def copied_to(self, directory: RunDirectory, checkpoint: Checkpoint) -> "RunLog":
        """Return the same log in a directory of its own, with all its lines."""
        copy = RunLog(directory, checkpoint, self.ledger)
        copy.completed, copy.info, copy.rejected, copy.reasons = self.completed, self.info, self.rejected, self.reasons
        for line in self.history:
            copy.append(line)
        return copy

    def restore(self) -> dict[str, Any]:
        """Go on from the last commit, and return what it holds besides the states."""
        assert self.checkpoint is not None
        assert self.directory is not None
        self.completed, self.metrics_bytes = self.checkpoint.round, self.checkpoint.metrics_bytes
        extra = self.checkpoint.extra
        self.info = dict(extra.get("info", {}))
        self.rejected = Counter(extra.get("rejected", {}))
        self.reasons = Counter(extra.get("reasons", {}))  # commits of older versions have none
        self.directory.metrics(self.metrics_bytes)  # raises if it was cut or damaged
        self.history = History(directory=self.directory)
        return extra

    def take_over(self) -> None:
        """Drop what a run that died wrote after its last commit."""
        if self.directory is not None and self.checkpoint is not None:
            self.history = History(directory=self.directory, length=self.metrics_bytes)
            self.checkpoint.clients.discard_after(self.completed)
            self.directory.cut_metrics(self.metrics_bytes)

    def summary_entries(self) -> dict[str, Any]:
        """Return the entries of a summary on the whole run."""
        privacy = {} if self.ledger is None else {"privacy": self.ledger.summary(self.completed)}
        return {**self.counters(), **privacy}

    def counters(self) -> dict[str, dict[str, int]]:
        """Return the updates that did not count, by client and by reason."""
        return {"rejected": dict(self.rejected), "reasons": dict(self.reasons)}


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Round seconds by kind of work to the millisecond."""
    return {name: round(value, 3) for name, value in seconds.items()}
