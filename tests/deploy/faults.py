"""Faults on purpose: a link on which planned things go wrong, once each, and an account of what the server should say.

Nodes are killed and made anew from their directories, replies are lost, late, doubled, old or damaged, disks are full,
and the server dies at any point of a round. `Account` follows from outside what the server ought to count.
"""

import errno
import io
import shutil
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from priory.deploy import wire
from priory.deploy.client import Client
from priory.deploy.client_states import ClientStateStore
from priory.deploy.exchange import Reply, Request
from priory.deploy.server import Server

DIES = "server killed "
SERVER = tuple(
    DIES + point
    for point in (
        "before it asked", "between two replies", "before the commit", "in the commit", "after the commit",
        "while evaluating",
    )
)  # fmt: skip
NODE = ("node killed before it wrote", "node killed while it wrote", "node killed after it wrote")
UNTRACED = (*SERVER, "request sent twice", "node restarted")
LOST = ("reply lost", "reply late", *NODE)
# What a reply is turned into, and the reason for which it must then be refused.
REFUSED = {
    "not a number": "not finite",
    "infinite": "not finite",
    "wrong keys": "keys",
    "wrong shape": "shape",
    "wrong type": "dtype",
    "huge norm": "norm",
    "negative weight": "weight",
    "enormous weight": "weight",
    "oversized": "oversized",
    "garbage": "garbage",
    "truncated": "garbage",
    "error": "node",
    "replayed": "stale",
    "disk full": "node",
}
# Nobody can tell these from an honest reply; bits that make no sense are refused for what they became.
BYZANTINE = ("another client's bytes", "bits flipped")
PATIENT = (
    *UNTRACED,
    *LOST,
    *REFUSED,
    "reply sent twice",
)  # after which a round that asks again is as it would have been
HASTY = (*PATIENT, *BYZANTINE, *BYZANTINE)


class ServerKilled(BaseException):
    """The server's process is gone."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, in the first visit of a round to a client.

    Attributes:
        client: Whom it strikes; -1 is the server.
        absent: Rounds that a killed node stays away after this one.
    """

    kind: str
    round: int
    client: int = -1
    absent: int = 0


def planned(seed: int, kinds: list[str], num_clients: int, rounds: int, patient: bool) -> list[Fault]:
    """A fault of each kind at random places, so that each of them strikes; one node at a time is away."""
    random, taken, gone, found = np.random.default_rng(seed), set(), set(), []
    for kind in sorted(kinds, key=lambda kind: kind not in NODE):  # these need most room
        if kind in SERVER:
            t = rounds if kind == DIES + "while evaluating" else int(random.integers(rounds))
            found.append(Fault(kind, t))
            continue
        for _ in range(1000):
            t, client = int(random.integers(rounds)), int(random.integers(num_clients))
            absent = 0 if patient or kind not in NODE else int(random.integers(3))
            away = {(t + i, client) for i in range(1, absent + 1)}
            # What is late arrives in the next round, which is left alone; what is replayed was sent once.
            slots = {(t, client), *away} | ({(t + 1, client)} if kind == "reply late" else set())
            fits = not slots & taken and max(slots)[0] < rounds
            alone = not {t for t, _ in away} & {t for t, _ in gone}
            known = kind != "replayed" or any((s, client) not in gone for s in range(t))
            if fits and alone and known:
                break
        else:
            raise AssertionError(f"no room for {kind!r}")
        taken |= slots
        gone |= away | ({(t, client)} if kind in NODE else set())
        found.append(Fault(kind, t, client, absent))
    return found


@dataclass
class Account:
    """What the server should have written down.

    Attributes:
        events: Refusals in the log, (round, client, reason); also of lives that ended before their round did.
        reasons: Of them, those that were committed.
        rejected: Clients that committed rounds went without.
        lines: The refused of each committed round.
        tally: For each kind of fault: how often it struck, and the reasons given for it.
    """

    events: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    rejected: Counter = field(default_factory=Counter)
    lines: list[dict[str, str]] = field(default_factory=list)
    tally: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))

    def __post_init__(self) -> None:
        self._open: list[Fault] = []
        self.begin({})

    def begin(self, fates: dict[int, str]) -> None:
        """A round is opened; nothing of an earlier one that was not committed counts."""
        self.fates, self._pending, self.causes = fates, Counter(), {}

    def silent(self, client: int, reason: str) -> None:
        """Nothing has come of a client yet, in this attempt."""
        if self.fates.get(client) != "":
            self.fates[client] = reason

    def struck(self, fault: Fault) -> None:
        """Something goes wrong."""
        self.tally[fault.kind]["struck"] += 1
        self.causes[fault.client] = fault.kind
        self._open.append(fault)

    def recovered(self, client: int) -> None:
        """A client, or the server, does what it should after all that has befallen it."""
        for fault in self._open:
            self.tally[fault.kind]["recovered"] += fault.client == client

    def replied(self, t: int, client: int, reason: str) -> None:
        """A reply reaches the server; "" is one that counts."""
        if reason and self.fates[client] != "":
            self.fates[client] = reason
        if reason:
            self._refused(t, client, reason)
        else:
            self.fates[client] = ""

    def counted(self, t: int) -> None:
        """The server adds a round up, shortly before it commits it."""
        for client, fate in self.fates.items():
            if fate in ("absent", "timeout"):
                self._refused(t, client, fate)

    def committed(self) -> None:
        """A round is valid."""
        missed = {client: fate for client, fate in self.fates.items() if fate}
        self.lines.append({str(client): fate for client, fate in missed.items()})
        self.rejected.update(map(str, missed))
        self.reasons.update(self._pending)
        self._pending = Counter()

    def _refused(self, t: int, client: int, reason: str) -> None:
        self.events[t, client, reason] += 1
        self._pending[reason] += 1
        if client in self.causes:
            self.tally[self.causes[client]][reason] += 1


class FaultyLink:
    """A link to the clients of a deployed federation that fails as planned."""

    def __init__(self, made: Any, plan: list[Fault], seed: int) -> None:
        self._made, self._clients = made, made.clients
        self._numbers = {node: client.number for node, client in self._clients.items()}
        self._random = np.random.default_rng([seed, 1])
        self._faults = {(fault.round, fault.client): fault for fault in plan if fault.client >= 0}
        self._kills = [fault for fault in plan if fault.client < 0]
        self.deaths = 0
        self._away: dict[int, Fault] = {}  # node → why
        self._late: dict[int, Reply] = {}
        self._first: dict[int, Reply] = {}
        self._asked: set[tuple[int, int]] = set()
        self._opened = -1
        self.account = Account()
        self.history: dict[int, list[Request]] = defaultdict(list)  # what made each client's state
        self.accepted: dict[tuple[int, int], Reply] = {}

    def serve(self, server: Server) -> None:
        """The link of a new server, whose commits are watched."""
        self._server, self._opened = server, -1
        self._commit = server._checkpoint.commit
        server._checkpoint.commit = self._committing  # type: ignore[method-assign]

    @property
    def left(self) -> list[Fault]:
        """Faults that have not struck yet."""
        return [*self._faults.values(), *self._kills]

    def nodes(self) -> list[int]:
        """Those that are up; a node that was killed comes back with nothing but its directory."""
        for node, fault in list(self._away.items()):
            if self._server.log.completed > fault.round + fault.absent:
                del self._away[node]
                self._clients[node] = self._made.client(self._numbers[node])
        return [node for node in self._clients if node not in self._away]

    def ask(self, requests: Mapping[int, Request], timeout: float) -> Iterator[tuple[int, Reply]]:
        """What comes back of the requests."""
        kind = next((request.kind for request in requests.values()), "")
        if kind != "train":
            if kind == "evaluate":
                self._die("while evaluating", self._server.log.completed)
            for node, request in requests.items():
                reply = self._clients[node].answer(request)
                if kind == "evaluate" and not reply.error:
                    self.account.recovered(self._numbers[node])
                yield node, reply
            return
        t = int(next(iter(requests.values())).config["round"])
        self._open(t, requests)
        self._die("before it asked", t)
        last = int(self._random.integers(len(requests)))
        for place, (node, request) in enumerate(requests.items()):
            client = self._numbers[node]
            for reply, reason in self._answers(t, node, request):
                if not reason:
                    self.accepted[t, client] = reply
                self.account.replied(t, client, reason)
                yield node, reply
            if place == last:
                self._die("between two replies", t)

    def _open(self, t: int, requests: Mapping[int, Request]) -> None:
        if self._opened != t:
            self.account.begin(dict.fromkeys(self._numbers.values(), "absent"))
            self.accepted = {key: reply for key, reply in self.accepted.items() if key[0] < t}
            self._opened = t
        for node, client in self._numbers.items():
            self.account.silent(client, "timeout" if node in requests else "absent")
            if node in self._away:
                self.account.causes[client] = self._away[node].kind

    def _answers(self, t: int, node: int, request: Request) -> list[tuple[Reply, str]]:
        """The replies of a node to a request, each with the reason for which it should be refused."""
        client = self._numbers[node]
        late = node in self._late and self._late[node].config["round"] < t
        before = [(self._late.pop(node), "stale")] if late else []
        fault = self._faults.pop((t, client), None)
        if fault is None:
            if before:
                self.account.causes[client] = "reply late"
            return [*before, (self._answer(node, request), "")]
        self.account.struck(fault)
        match fault.kind:
            case "node killed before it wrote":
                self._kill(node, fault)
                return []
            case "node killed while it wrote":
                kept = self._kept(client, request)
                kept.place.mkdir(parents=True, exist_ok=True)
                (kept.place / f".state-{t + 1:08d}.safetensors.12345").write_bytes(b"cut sh")
                self._kill(node, fault)
                return []
            case "disk full":
                return [(self._answer_without_space(node, request), "node")]
            case "replayed":
                return [(self._first[node], "stale")]
        honest = self._answer(node, request)
        match fault.kind:
            case "node killed after it wrote":
                self._kill(node, fault)
                return []
            case "node restarted":
                self._clients[node] = self._made.client(client)
                return [(honest, "")]
            case "request sent twice":
                assert self._answer(node, request) == honest
                return [(honest, "")]
            case "reply lost":
                return []
            case "reply late":
                self._late[node] = honest
                return []
            case "reply sent twice":
                return [(honest, ""), (honest, "duplicate")]
            case "another client's bytes":
                return [(self._of_another(node, request), "")]
            case "error":
                return [(Reply(honest.config, error="Something\nwent wrong."), "node")]
            case "bits flipped":
                return [flipped(honest, self._random, self._made.charter.limits)]
        return [(mangled(honest, fault.kind, self._random), REFUSED[fault.kind])]

    def _answer(self, node: int, request: Request) -> Reply:
        """An honest answer; a state that goes back is one of a round that is asked again."""
        t, client = int(request.config["round"]), self._numbers[node]
        kept = self._kept(client, request)
        before = kept.generations()
        reply = self._clients[node].answer(request)
        assert not reply.error, reply.error
        after = kept.generations()
        assert after[-1] == t + 1
        assert len(after) <= 2
        assert not before or after[-1] > before[-1] or (t, client) in self._asked
        self._asked.add((t, client))
        self._first.setdefault(node, reply)
        self.history[client] = [one for one in self.history[client] if one.config["round"] < t] + [request]
        return reply

    def _answer_without_space(self, node: int, request: Request) -> Reply:
        """The answer of a client whose disk is full, after which its directory is as it was."""
        kept = self._kept(self._numbers[node], request)
        before = _files(kept.place)
        with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
            reply = self._clients[node].answer(request)
        assert "No space left on device" in reply.error
        assert _files(kept.place) == before
        return reply

    def _of_another(self, node: int, request: Request) -> Reply:
        """What the next client would answer, which never hears of it."""
        other = self._made.client((self._numbers[node] + 1) % len(self._numbers))
        with tempfile.TemporaryDirectory() as copy:
            if other._state.exists():
                shutil.copytree(other._state, copy, dirs_exist_ok=True)
            other._state = Path(copy)
            return other.answer(request)

    def _kill(self, node: int, fault: Fault) -> None:
        """Nothing is left of a node but its directory."""
        self._clients[node] = self._made.client(self._numbers[node])
        if fault.absent:
            self._away[node] = fault

    def _kept(self, client: int, request: Request) -> ClientStateStore:
        owner = self._made.client(client)
        return ClientStateStore(owner._state, client, str(request.config["run"]), self._made.charter.digest)

    def _committing(self, server: Any, completed: int, *rest: Any) -> None:
        """What the server does to make a round valid, cut short at three points."""
        if completed == len(self.account.lines):  # scores at the end are written down once more
            return self._commit(server, completed, *rest)
        t = completed - 1
        self.account.counted(t)
        self._die("before the commit", t)
        stores = self._server._checkpoint.clients
        with mock.patch.object(stores, "sync", side_effect=lambda: self._die("in the commit", t)):
            self._commit(server, completed, *rest)
        self.account.committed()
        self._die("after the commit", t)

    def _die(self, point: str, t: int) -> None:
        for fault in self._kills:
            if (fault.kind, fault.round) == (DIES + point, t):
                self._kills.remove(fault)
                self.account.struck(fault)
                self.deaths += 1
                raise ServerKilled(fault.kind)


def mangled(reply: Reply, kind: str, random: np.random.Generator) -> Reply:
    """A reply with something in it that is not right."""
    arrays = {name: wire.from_bytes(name, raw) for name, raw in reply.arrays.items()}
    floats = [name for name, array in arrays.items() if array.dtype == np.float32 and name != "weight" and array.size]
    name = str(random.choice(floats))
    changed, raw = arrays[name].copy(), reply.arrays[name]
    place = tuple(random.integers(size) for size in changed.shape)
    match kind:
        case "not a number" | "infinite":
            changed[place] = np.nan if kind == "not a number" else random.choice([-np.inf, np.inf])
        case "wrong keys":
            kept = {other: one for other, one in reply.arrays.items() if other != name}
            return replace(reply, arrays=kept | ({f"{name}x": raw} if random.integers(2) else {}))
        case "wrong shape":
            changed = np.concatenate([changed.ravel(), np.zeros(1, np.float32)])
        case "wrong type":
            changed = changed.astype(str(random.choice(["float16", "float64", "int32", ">f4"])))
        case "huge norm":
            changed = changed + np.float32(10.0 ** random.integers(9, 30))
        case "negative weight" | "enormous weight":
            name, changed = "weight", np.float32(-1 if kind == "negative weight" else 1e30)
        case "oversized":
            changed = np.zeros(1 << 20, np.float32)
        case "garbage":
            return _with_bytes(reply, name, random.bytes(int(random.integers(1, 500))))
        case "truncated":
            return _with_bytes(reply, name, raw[: random.integers(len(raw))])
    return replace(reply, arrays={**reply.arrays, **wire.encode({name: changed})})


def flipped(reply: Reply, random: np.random.Generator, limits: Any) -> tuple[Reply, str]:
    """A reply with three bits of one array turned over, maybe of its numbers, and what NumPy says it holds now."""
    floats = [name for name, raw in reply.arrays.items() if wire.from_bytes(name, raw).dtype == np.float32]
    name = str(random.choice(floats))
    raw = bytearray(reply.arrays[name])
    start = int(random.choice([0, len(raw) - np.load(io.BytesIO(raw)).nbytes]))
    for bit in 8 * start + random.choice(8 * (len(raw) - start), 3, replace=False):
        raw[bit // 8] ^= 1 << (bit % 8)
    return _with_bytes(reply, name, bytes(raw)), _reason(name, reply.arrays[name], bytes(raw), limits)


def _reason(name: str, honest: bytes, raw: bytes, limits: Any) -> str:
    expected = np.load(io.BytesIO(honest))
    try:
        with warnings.catch_warnings(action="error"):
            array = np.load(io.BytesIO(raw), allow_pickle=False)
        if raw[:8] != honest[:8] or array.nbytes != expected.nbytes:
            return "garbage"
    except Exception:
        return "garbage"
    if array.dtype != expected.dtype or array.shape != expected.shape:
        return "dtype" if array.dtype != expected.dtype else "shape"
    if not np.isfinite(array).all():
        return "not finite"
    if name == "weight":
        return "" if 0 <= array <= limits.weight else "weight"
    return "norm" if np.linalg.norm(array.astype(float)) > limits.norm else ""


def _with_bytes(reply: Reply, name: str, raw: bytes) -> Reply:
    return replace(reply, arrays={**reply.arrays, name: raw})


def _files(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(place.glob("**/*")) if path.is_file()}


@dataclass
class Repeated:
    """A link that brings the replies of an earlier run to a new server, and nothing else."""

    clients: dict[int, Client]
    accepted: Mapping[tuple[int, int], Reply]

    def nodes(self) -> list[int]:
        return list(self.clients)

    def ask(self, requests: Mapping[int, Request], timeout: float) -> Iterator[tuple[int, Reply]]:
        for node, request in requests.items():
            key = int(request.config["round"]), self.clients[node].number
            if request.kind != "train":
                yield node, self.clients[node].answer(request)
            elif key in self.accepted:
                reply = self.accepted[key]
                yield node, replace(reply, config={**reply.config, "run": request.config["run"]})


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees hold the same numbers, to the last bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def run_to_the_end(make: Callable[[], Server], link: FaultyLink, most: int) -> tuple[Server, dict[str, Any]]:
    """The last of at most so many servers, and its summary."""
    for _ in range(most):
        server = make()
        link.serve(server)
        try:
            summary = server.go()
        except ServerKilled:
            continue
        link.account.recovered(-1)
        return server, summary
    raise AssertionError(f"{most} servers died")
