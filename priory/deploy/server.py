"""The server of a deployed federation: rounds over a link to nodes that fail, on a state that survives its own death.

A round asks the clients that were drawn and are there, takes what is fit to count, aggregates, and commits. Until it is
committed a round leaves no trace on the server, and clients answer a round that is asked twice as they did the first
time. So a server that is killed at any moment and started again ends as if nothing had happened.
"""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory.core import rng
from priory.core.errors import UsageError
from priory.core.files import check_no_links, private_directory
from priory.core.rng import Key, Stream
from priory.deploy import charter as charters
from priory.deploy import noise, wire
from priory.deploy.accept import Accepted, Refused, validate_reply
from priory.deploy.attendance import Attendance, TooFewReplies
from priory.deploy.charter import Charter
from priory.deploy.client_states import SECRET, secret_in
from priory.deploy.exchange import Kind, Link, Reply, Request
from priory.deploy.journal import Journal
from priory.deploy.roster import Roster
from priory.deploy.scores import Scored, scored
from priory.engine.clock import Clock
from priory.engine.cohort import Participation, Slots
from priory.engine.manifest import version_of
from priory.engine.prepared import first_server_of
from priory.engine.run_log import RunLog, rounded
from priory.fed import robust, schedule
from priory.fed.method import Message, Method
from priory.fed.server_step import server_step
from priory.store import Checkpoint, RunDirectory

STANDS_IN = 1  # sets the order of stand-ins apart from the draw


@dataclass(frozen=True)
class Operations:
    """How the operator wants it run; nothing here changes what is learned when all goes well.

    Attributes:
        out: Run directory of the server.
        min_replies: Usable replies that a round needs; 0 for half of the cohort.
        timeout: Seconds that a round waits for replies.
        attempts: How often a round with too few usable replies is asked.
        wait: Seconds to wait for nodes: for all before the first round, for enough before any other.
        authenticated: Whether nodes prove who they are, so that a client belongs to one key.
    """

    out: Path
    min_replies: int = 0
    timeout: float = 600.0
    attempts: int = 3
    wait: float = 120.0
    authenticated: bool = False

    def check(self, cohort: int) -> None:
        """Raise on what no federation can be run with."""
        if not 0 <= self.min_replies <= cohort:
            raise UsageError(
                f"min-replies={self.min_replies} does not fit a cohort of {cohort}; choose at most that, or 0 for half."
            )
        for name in ("timeout", "wait", "attempts"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}={getattr(self, name)} is not above 0; choose a positive number.")


@dataclass
class Round:
    """What came of one round.

    Attributes:
        accepted: Replies that count, by client.
        refused: The last reason why a client's reply did not, by client; silence is "absent" or "timeout".
    """

    accepted: dict[int, Accepted] = field(default_factory=dict)
    refused: dict[int, Refused] = field(default_factory=dict)

    @property
    def usable(self) -> int:
        """Replies that carry a message."""
        return sum(one.message is not None for one in self.accepted.values())


class Server:
    """A run of a federation under way."""

    def __init__(self, charter: Charter, link: Link, how: Operations) -> None:
        how.check(charter.participation.cohort)
        self.charter, self._link, self._how = charter, link, how
        self._directory = RunDirectory(how.out)
        check_no_links(how.out)
        private_directory(how.out, ours=self._directory.checkpoint.exists())
        self.journal = Journal(how.out)
        self._root = charters.first_key(charter.settings.seed)
        first = first_server_of(charter.method, charter.tasks[0], rng.key(self._root, Stream.INIT))
        self._checkpoint = Checkpoint(self._directory.checkpoint, first, (), 0)
        self.server: Any = first
        self.log = RunLog(self._directory, self._checkpoint, charter.ledger)
        self.run = self._named()
        with self._checkpoint.held():
            self._restore()
        roster = Roster.open(how.out, how.authenticated)
        self._there = Attendance(link, roster, self.journal, charter.question.num_clients, how.wait)
        self._clock = Clock()
        self._bytes = {"down_bytes": 0, "up_bytes": 0}

    @property
    def rounds(self) -> int:
        """The round that the run ends with: the last of those planned, or the last that a privacy budget allows."""
        ledger = self.charter.ledger
        return self.charter.settings.rounds if ledger is None else ledger.rounds

    def go(self) -> dict[str, Any]:
        """The summary of the run after all its rounds; whatever ends it earlier is in the journal."""
        with self._checkpoint.held():
            if self._checkpoint.is_stale():
                raise UsageError(f"{self._how.out} was written by another server meanwhile; start this one again.")
            with self._told():
                return self._finish()

    def _finish(self) -> dict[str, Any]:
        """The rounds that are left, and the summary."""
        told = {"run": self.run, "method": self.charter.name, "round": self.log.completed, "rounds": self.rounds}
        self.journal.stand("waiting", **told, error="")
        self.journal.tell("started", **told, charter=self.charter.digest, version=version_of("priory"))
        self._there.wait(self._hello(), wanted=self.charter.question.num_clients, needed=self._enough)
        log = self.log
        while log.completed < self.rounds:
            self._round(log.completed)
            every = self.charter.settings.eval_every
            if every and log.completed % every == 0 and log.completed < self.rounds:
                self._commit(self._evaluate(final=False))
        summary = self._finished()
        self.journal.stand("finished", round=log.completed)
        self.journal.tell("finished", round=log.completed, **log.counters())
        return summary

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Report an error that ends the run to the operator, and raise it again."""
        try:
            yield
        except BaseException as error:
            said = " ".join(f"{error}".split()) or type(error).__name__
            self.journal.stand("failed", error=said)
            self.journal.tell("failed", round=self.log.completed, error=said)
            raise

    @property
    def _enough(self) -> int:
        return self._how.min_replies or -(-self.charter.participation.cohort // 2)

    def _round(self, t: int) -> None:
        """Ask, collect, aggregate and commit round t."""
        started = time.monotonic()
        with self._clock.booking("train"):
            method = self._scheduled(t)
            down = _broadcast(method, self.server)
            drawn = self._cohort(t)
            came = self._collected(t, method, down, drawn)
            self.journal.stand("aggregating", round=t, usable=came.usable)
            discarded = self._aggregate(t, method, down, came)
            self._count(t, came)
            if discarded:
                reason = "the new server is not finite, so the old one is kept"
                self.journal.tell("discarded", round=t, reason=reason)
        self.log.completed = t + 1
        self._commit(Scored(), came)
        self.journal.tell(
            "round", round=t, asked=len(drawn), usable=came.usable, seconds=round(time.monotonic() - started, 3),
            refused={str(client): one.reason for client, one in came.refused.items()},
        )  # fmt: skip
        self.journal.stand("waiting", round=self.log.completed)

    def _scheduled(self, t: int) -> Method:
        """Return the method as the schedules have it in round t."""
        chosen = self.charter.settings
        return schedule.resolve(self.charter.method, chosen.schedules(self.charter.method), t, chosen.rounds)

    def _cohort(self, t: int) -> dict[int, bool]:
        """The clients of round t: those drawn, and for each that is not there one that is.

        Nobody stands in for another under differential privacy, whose price is that of the draw alone.
        """
        drawn = self._drawn(t)
        self._there.wait(self._hello(), needed=min(self._enough, sum(drawn.values())))
        there, order = self._there.nodes, _order(self._root, t, num=self.charter.question.num_clients)
        spare = (int(client) for client in np.asarray(order))
        others = [client for client in spare if client in there and client not in drawn]
        gone = [client for client in drawn if client not in there]
        if self.charter.ledger is None:
            for client, other in zip(gone, others, strict=False):
                drawn[other] = drawn.pop(client)
                self.journal.tell("stands in", round=t, client=other, absent=client)
        return drawn

    def _drawn(self, t: int) -> dict[int, bool]:
        """The clients of round t, and whether each of them uploads.

        Every client knows the seed of the run. Where sampling is to amplify privacy, cohorts come from a secret.
        """
        ledger = self.charter.ledger
        root = self._secret() if ledger is not None and ledger.spending.amplified else self._root
        slots = _draw(root, t, participation=self.charter.participation)
        columns = (map(np.asarray, (group.ids, group.filled, group.uploads)) for group in slots)
        rows = [row for group in columns for row in zip(*group, strict=True)]
        return {int(client): bool(uploads) for client, filled, uploads in rows if filled}

    def _collected(self, t: int, method: Method, down: Any, drawn: Mapping[int, bool]) -> Round:
        """The replies of a round; asked again, of those that are missing, while too few are usable."""
        came, needed = Round(), min(self._enough, sum(drawn.values()))
        arrays = wire.encode({"down": jax.tree.map(np.asarray, down)})
        for attempt in range(self._how.attempts):
            self._there.wait(self._hello(), needed=needed, among=drawn)
            nodes = self._there.nodes
            missing = {client: up for client, up in drawn.items() if client not in came.accepted}
            for client in missing:
                came.refused[client] = Refused("timeout" if client in nodes else "absent", "No reply came.")
            config = self._config("train", t) | {"attempt": attempt}
            requests = {
                nodes[client]: Request("train", config | {"uploads": uploads}, arrays)
                for client, uploads in missing.items()
                if client in nodes
            }
            self.journal.stand("asking", round=t, attempt=attempt, asked=len(requests))
            self._bytes["down_bytes"] = sum(map(len, arrays.values()))
            for node, reply in self._link.ask(requests, self._how.timeout):
                self._take(came, t, method, down, node, reply, requests)
            if came.usable >= needed:
                return came
            self.journal.tell("short", round=t, attempt=attempt, usable=came.usable, needed=needed)
        why = "; ".join(f"client {client}: {one.reason}" for client, one in list(came.refused.items())[:3])
        raise TooFewReplies(
            f"Round {t} has {came.usable} usable replies after {self._how.attempts} attempts and needs {needed} "
            f"({why}); see to the nodes and start the server again, which goes on from this round."
        )

    def _take(
        self, came: Round, t: int, method: Method, down: Any, node: int, reply: Reply, requests: Mapping[int, Request]
    ) -> None:
        """Sort a reply into what counts and what does not."""
        client = self._there.clients.get(node)
        if client is None or node not in requests or client in came.accepted:
            kind = "duplicate" if client in came.accepted else "stranger"
            self._refuse(
                t, -1 if client is None else client, node, Refused(kind, "Nothing was asked of it, or it has answered.")
            )
            return
        asked = dict(requests[node].config) | {"kind": "train"}
        found = validate_reply(self.charter, method, self.charter.task_of(client), down, reply, client, asked)
        if isinstance(found, Refused):
            came.refused[client] = found
            self._refuse(t, client, node, found)
            return
        came.accepted[client] = found
        came.refused.pop(client, None)

    def _refuse(self, t: int, client: int, node: int, found: Refused) -> None:
        self.log.reasons[found.reason] += 1
        self.journal.tell(
            "refused", round=t, client=client, node=str(node), reason=found.reason, sentence=found.sentence
        )

    def _count(self, t: int, came: Round) -> None:
        """Count the clients that a round went without."""
        for client, one in came.refused.items():
            if one.reason in ("absent", "timeout"):
                self._refuse(t, client, -1, one)
            self.log.rejected[str(client)] += 1

    def _aggregate(self, t: int, method: Method, down: Any, came: Round) -> bool:
        """Take the next server, and return whether it was discarded.

        Unused places of the stack of messages have weight 0, so that one program serves all rounds.
        """
        charter, accepted = self.charter, [one for _, one in sorted(came.accepted.items())]
        known = {"bits", *charter.contact().info}
        figures = _means([{name: one.metrics[name] for name in one.metrics if name in known} for one in accepted])
        self._bytes["up_bytes"] = max((one.num_bytes for one in accepted), default=0)
        sent = [one.message for one in accepted if one.message is not None]
        shapes = Message(charter.contact().message.payload, charter.uplink.weight, jnp.int32(0))
        unused = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        places = max(charter.participation.capacity, len(sent))
        filled = sent + [unused] * (places - len(sent))
        received: Any = jax.tree.map(lambda *leaves: np.stack(leaves), *filled)
        ledger, rule = charter.ledger, charter.settings.robust
        if ledger is not None and ledger.mode == "central":  # nothing of it leaves before the round is committed
            total = noise.release(received.payload, ledger.clip, ledger.sd, ledger.grid, ledger.parts)
            received = jax.tree.map(lambda leaf: np.float32(leaf / ledger.expected), total)
        context = charter.round_context(method, down, self._root, t, channel=charter.channel)
        key = rng.key(self._root, Stream.SERVER, t)
        chosen = None if rule is None else robust.parse(rule)
        self.server, info, discarded = _server_step(context, self.server, received, key, rule=chosen)
        self.log.info = figures | {name: float(value) for name, value in info.items()}
        return bool(discarded)

    def _secret(self) -> Key:
        """Return the key that the cohorts of central privacy come from; it must not be known to who sees broadcasts."""
        return secret_in(self._how.out / SECRET)

    def _hello(self) -> Request:
        return Request("hello", self._config("hello", self.log.completed))

    def _config(self, kind: Kind, t: int) -> dict[str, Any]:
        settings = self.charter.settings
        return {
            "kind": kind, "run": self.run, "round": t, "rounds": settings.rounds, "seed": settings.seed,
            "version": version_of("priory"), "charter": self.charter.digest,
        }  # fmt: skip

    def _evaluate(self, final: bool) -> Scored:
        """The scores of the clients that are there; after the last round each of them keeps its model."""
        self.journal.stand("evaluating", round=self.log.completed)
        with self._clock.booking("evaluate"):
            self._there.meet(self._hello())
            down = _broadcast(self.charter.method, self.server)
            config = self._config("evaluate", self.log.completed) | {"final": final}
            request = Request("evaluate", config, wire.encode({"down": jax.tree.map(np.asarray, down)}))
            asked = dict(self._there.clients)
            replies = self._link.ask(dict.fromkeys(asked, request), self._how.timeout)
            return scored(self.charter, replies, asked, config, self.journal)

    def _finished(self) -> dict[str, Any]:
        found = self._evaluate(final=True)
        self._append(found)  # no commit: a server killed here scores again and puts it in the same place
        summary = {
            "method": self.charter.name,
            "rounds": self.log.completed,
            **found.to_json(),
            "communication": dict(self._bytes),
            "seconds": rounded(self._clock.seconds),
            "extra": {"run": self.run, **self.log.summary_entries()},
        }
        self._directory.write_summary(summary, found.per_client())
        return summary

    def _append(self, found: Scored, came: Round | None = None) -> None:
        """Add a line to the metrics."""
        refused = {} if came is None else {str(client): one.reason for client, one in came.refused.items()}
        replies = {"usable": None if came is None else came.usable, "refused": refused}
        self.log.append(self.log.line(found.to_json() | replies, self._clock.seconds))

    def _commit(self, found: Scored, came: Round | None = None) -> None:
        """Add a line to the metrics, and make it and the server what the next server goes on from."""
        self._append(found, came)
        self.log.commit(jax.tree.map(np.asarray, self.server), self._origin())

    def _origin(self) -> dict[str, Any]:
        """Return what distinguishes this run from others."""
        return {"run": self.run, "charter": self.charter.digest, "seed": self.charter.settings.seed}

    def _named(self) -> str:
        """The name of this run, under which clients keep their states: one for a run directory, and no other has it."""
        return str(self._checkpoint.extra.get("run") or f"{self.charter.name}-{secrets.token_hex(4)}")

    def _restore(self) -> None:
        """Go on from the last commit, or make the first: the name of the run is safe before any client receives it."""
        log, checkpoint = self.log, self._checkpoint
        if checkpoint.round < 0:
            if not (self._how.out / "manifest.toml").exists():
                self.charter.save(self._how.out)
            log.commit(jax.tree.map(np.asarray, self.server), self._origin())
            return
        same = all(checkpoint.extra.get(name) == self._origin()[name] for name in ("charter", "seed"))
        if not same or checkpoint.round > self.charter.settings.rounds:
            raise UsageError(
                f"out={str(self._how.out)!r} holds round {checkpoint.round} of another app, seed or number of rounds; "
                "choose another directory, or submit the app that began it."
            )
        log.restore()
        self.server = checkpoint.read_server()
        log.take_over()


def _means(found: list[dict[str, float]]) -> dict[str, float]:
    """The mean over clients of each figure that all of them report."""
    names = set.intersection(*(set(one) for one in found)) if found else set()
    return {name: float(np.mean([one[name] for one in found])) for name in sorted(names)}


@partial(jax.jit, static_argnames="participation")
def _draw(root: Key, t: Array, *, participation: Participation) -> tuple[Slots, ...]:
    return participation.draw_groups(rng.key(root, Stream.COHORT, t))


@partial(jax.jit, static_argnames="num")
def _order(root: Key, t: Array, *, num: int) -> Array:
    """Return the order in which clients replace those that are absent."""
    return jax.random.permutation(rng.key(root, Stream.COHORT, t, STANDS_IN), num)


_server_step = jax.jit(server_step, static_argnames="rule")


@jax.jit
def _broadcast(method: Method, server: Any) -> Any:
    return method.broadcast(server)
