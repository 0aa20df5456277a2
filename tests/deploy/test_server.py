"""The deployed server: whoever dies, lies, comes late or leaves, it ends as it should and tells what it lacked."""

import dataclasses
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.deploy import attendance, wire
from priory.deploy import charter as charters
from priory.deploy import server as serving
from priory.deploy.attendance import TooFewReplies
from priory.deploy.client_states import ClientStateStore
from priory.deploy.exchange import Reply, Request
from priory.deploy.journal import Journal, read_events, read_status
from priory.deploy.loopback import Loopback
from priory.deploy.roster import Roster
from priory.deploy.server import _draw
from priory.engine import accountants
from priory.fed import visit
from priory.store import Checkpoint, RunDirectory
from tests.deploy.conftest import range_of_squares

pytestmark = pytest.mark.filterwarnings("ignore::priory.fed.capabilities.AdviceWarning")
PRIVATE = {"dp_noise": 1.0, "dp_delta": 0.1}


class Killed(BaseException):
    """What a signal would do, without its mess."""


class Link(Loopback):
    """A link on which requests are counted and replies may be changed, lost or doubled.

    Attributes:
        asked: Kind, round and nodes of everything that was asked.
        change: What becomes of a reply: a list of (node, reply).
    """

    def __init__(self, made, change: Callable[[int, Request, Reply], list] | None = None) -> None:
        super().__init__(made.clients)
        self.asked: list[tuple[str, int, list[int]]] = []
        self.change = change or (lambda node, request, reply: [(node, reply)])
        made.link = self

    def ask(self, requests: Mapping[int, Request], timeout: float) -> Iterator[tuple[int, Reply]]:
        for kind, t in {(one.kind, one.config["round"]) for one in requests.values()}:
            self.asked.append((kind, t, sorted(requests)))
        for node, reply in super().ask(requests, timeout):
            yield from self.change(node, requests[node], reply)

    def trained(self) -> list[tuple[int, list[int]]]:
        """The rounds that were asked, and of whom."""
        return [(t, nodes) for kind, t, nodes in self.asked if kind == "train"]


@pytest.fixture(autouse=True)
def _hurries(monkeypatch):
    monkeypatch.setattr(attendance, "LOOK", 0.01)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # nothing here loses power


def lines(made) -> list[dict]:
    return RunDirectory(made.place / "server").metrics()


def events(made, name: str) -> list[dict]:
    return [one for one in read_events(made.place / "server") if one["event"] == name]


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def kept(made, run: str) -> dict[str, bytes]:
    """The states of all clients."""
    found = {}
    for number in range(made.charter.question.num_clients):
        place = ClientStateStore(made.place / f"node-{number}", number, run, made.charter.digest).place
        found |= {f"{number}/{path.name}": path.read_bytes() for path in sorted(place.glob("state-*"))}
    return found


def numbers(states: dict[str, bytes]) -> dict[str, bytes]:
    """States without the name of their run."""
    return {name: raw[8 + int.from_bytes(raw[:8], "little") :] for name, raw in states.items()}


def spoil(name: str, when: Callable[[int, Request], bool] = lambda node, request: True):
    """A change that turns the training replies of some into something that is refused."""
    bad = {
        "node": lambda reply: Reply(error="My disk is full."),
        "garbage": lambda reply: dataclasses.replace(reply, arrays=dict.fromkeys(reply.arrays, b"garbage")),
        "stale": lambda reply: dataclasses.replace(reply, config=dict(reply.config) | {"round": 77}),
        "lost": None,
    }[name]

    def change(node: int, request: Request, reply: Reply) -> list:
        if request.kind != "train" or not when(node, request):
            return [(node, reply)]
        return [] if bad is None else [(node, bad(reply))]

    return change


# Killed and started again.


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The server and the clients of a run that nothing happened to."""
    from priory.methods import get
    from tests.deploy.conftest import Deployed, small_charter, small_federation

    made = Deployed(tmp_path_factory.mktemp("undisturbed"), small_charter(get("ditto")()), small_federation())
    server = made.server()
    server.go()
    return bits(server.server), numbers(kept(made, server.run))


def die_in_ask(made, after: int):
    """Dies in round 1 after so many replies."""
    heard = []

    def change(node, request, reply):
        if request.kind == "train" and request.config["round"] == 1:
            heard.append(node)
            if len(heard) > after:
                raise Killed
        return [(node, reply)]

    return lambda patch: Link(made, change)


def die_in(owner, name: str, when: Callable[..., bool], afterwards: bool = False):
    """Dies before or after some call."""

    def arrange(patch):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            if not afterwards and when(*args, **kwargs):
                raise Killed
            found = real(*args, **kwargs)
            if afterwards and when(*args, **kwargs):
                raise Killed
            return found

        patch.setattr(owner, name, call)

    return arrange


def on_round(t):
    return lambda self, server, completed, *_: completed == t


POINTS = {
    "before it asks": lambda made: die_in(Journal, "stand", lambda self, phase, **about: phase == "asking"),
    "before the first reply": lambda made: die_in_ask(made, 0),
    "after the first reply": lambda made: die_in_ask(made, 1),
    "before it aggregates": lambda made: die_in(serving, "_server_step", lambda *_, **__: True),
    "before the line of metrics": lambda made: die_in(RunDirectory, "append_metrics", lambda self, line, at: True),
    "before the commit": lambda made: die_in(Checkpoint, "commit", on_round(2)),
    "after the commit": lambda made: die_in(Checkpoint, "commit", on_round(2), afterwards=True),
    "before it evaluates": lambda made: die_in(Journal, "stand", lambda self, phase, **about: phase == "evaluating"),
    "before the summary": lambda made: die_in(RunDirectory, "write_summary", lambda self, *_: True),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_server_that_is_killed_and_started_again_ends_as_if_nothing_had_happened(
    deployed, monkeypatch, undisturbed, point
):
    made = deployed("ditto")
    with monkeypatch.context() as patch:
        POINTS[point](made)(patch)
        with pytest.raises(Killed):
            made.server().go()
    made.clients = {100 + number: made.client(number) for number in range(2)}
    made.link = Loopback(made.clients)
    server = made.server()
    server.go()
    assert bits(server.server) == undisturbed[0]
    assert numbers(kept(made, server.run)) == undisturbed[1]
    assert [line["round"] for line in lines(made)] == [1, 2, 3, 3]


def test_a_server_that_died_in_its_commit_goes_on_from_the_one_before(deployed, monkeypatch, undisturbed):
    from priory import store

    made, real = deployed("ditto"), store.write_atomically

    def torn(path: Path, content):
        if path.name == "commit.json" and json.loads(content)["round"] == 2:
            raise Killed
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_atomically", torn)
        with pytest.raises(Killed):
            made.server().go()
    server = made.server()
    assert server.log.completed == 1
    server.go()
    assert bits(server.server) == undisturbed[0]


def test_a_full_disk_ends_it_and_it_goes_on_when_there_is_room(deployed, monkeypatch, undisturbed):
    made = deployed("ditto")

    real = Checkpoint.commit

    def commit(self, server, completed, *rest):
        if completed == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, server, completed, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "commit", commit)
        with pytest.raises(OSError, match="No space left"):
            made.server().go()
    told = read_status(made.place / "server")
    assert told["phase"] == "failed"
    assert "No space left" in told["error"]
    again = made.server()
    again.go()
    assert bits(again.server) == undisturbed[0]


def test_a_run_keeps_its_name(deployed):
    made = deployed()
    assert made.server().run == made.server().run


def test_a_run_that_is_finished_is_only_scored_again(deployed):
    made = deployed(rounds=1)
    made.server().go()
    told = lines(made)
    link = Link(made)
    server = made.server()
    before = bits(server.server)
    server.go()
    assert [kind for kind, *_ in link.asked] == ["hello", "evaluate"]
    assert bits(server.server) == before
    assert [line["personal"] for line in lines(made)] == [line["personal"] for line in told]


# Too few replies.


def test_too_few_replies_end_in_a_sentence_and_the_run_goes_on(deployed):
    made = deployed()
    Link(made, spoil("node", lambda node, request: request.config["round"] == 1))
    with pytest.raises(
        TooFewReplies,
        match=r"Round 1 has 0 usable replies after 2 attempts and needs 1 \(client \d: node; client \d: node",
    ):
        made.server(attempts=2).go()
    told = read_status(made.place / "server")
    assert told["phase"] == "failed"
    assert told["error"].endswith("start the server again, which goes on from this round.")
    link = Link(made)
    made.server().go()
    assert [t for t, _ in link.trained()] == [1, 2]


def test_an_attempt_asks_only_who_is_missing(deployed):
    made = deployed(num_clients=3)
    link = Link(made, spoil("lost", lambda node, request: node == 101 and request.config["attempt"] < 2))
    made.server(min_replies=3).go()
    assert link.trained() == [(t, nodes) for t in range(3) for nodes in ([100, 101, 102], [101], [101])]
    assert [one["usable"] for one in lines(made)[:3]] == [3, 3, 3]


@pytest.mark.parametrize(("min_replies", "attempts"), [(0, 1), (1, 1), (2, 2)])
def test_a_round_is_asked_again_only_while_there_are_too_few(deployed, min_replies, attempts):
    made = deployed(rounds=1)
    link = Link(made, spoil("lost", lambda node, request: node == 100 and request.config["attempt"] == 0))
    made.server(min_replies=min_replies).go()
    assert len(link.trained()) == attempts


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"min_replies": 3}, "min-replies=3 does not fit a cohort of 2; choose at most that, or 0 for half"),
        ({"min_replies": -1}, "min-replies=-1 does not fit"),
        ({"timeout": 0.0}, "timeout=0.0 is not above 0; choose a positive number"),
        ({"wait": float("nan")}, "wait=nan is not above 0"),
        ({"attempts": 0}, "attempts=0 is not above 0"),
    ],
)
def test_operations_that_no_federation_can_be_run_with_are_refused(deployed, how, sentence):
    made = deployed()
    with pytest.raises(UsageError, match=sentence):
        made.server(**how)
    assert not (made.place / "server").exists()


def test_without_nodes_it_waits_and_then_says_so(deployed):
    made = deployed()
    made.link = Loopback({})
    with pytest.raises(TooFewReplies, match=r"0 clients are there after 0.05 seconds and 1 are needed; start their"):
        made.server(wait=0.05).go()


# Who is there.


def test_a_node_that_joins_late_takes_part_from_then_on(deployed):
    made = deployed()
    link = Link(made)
    late = link.clients.pop(101)

    def change(node, request, reply):
        if request.kind == "train" and request.config["round"] == 0:
            link.clients[101] = late
        return [(node, reply)]

    link.change = change
    made.server(wait=0.05).go()
    assert link.trained() == [(0, [100]), (1, [100, 101]), (2, [100, 101])]
    assert [one["refused"] for one in lines(made)[:3]] == [{"1": "absent"}, {}, {}]


def test_a_node_that_leaves_is_counted_as_absent(deployed):
    made = deployed()
    link = Link(made)

    def change(node, request, reply):
        if request.kind == "train" and node == 101:
            del link.clients[101]
            return []
        return [(node, reply)]

    link.change = change
    made.server(wait=0.05).go()
    assert [one["client"] for one in events(made, "left")] == [1]
    assert [one["refused"] for one in lines(made)[:3]] == [{"1": "timeout"}, {"1": "absent"}, {"1": "absent"}]
    assert lines(made)[-1]["rejected"] == {"1": 3}


def test_two_nodes_that_claim_one_client_are_told_apart(deployed):
    made = deployed()
    link = Link(made)
    link.clients[777] = made.client(1)
    made.server().go()
    (turned,) = events(made, "turned away")
    assert turned["node"] == "777"
    assert "Node 777 says that it is client 1, which is bound to node 101" in turned["sentence"]
    assert all(777 not in nodes for _, nodes in link.trained())


@pytest.mark.parametrize("authenticated", [False, True])
def test_a_client_passes_on_to_another_node_only_where_nodes_have_no_keys(deployed, authenticated):
    made = deployed(rounds=1)
    made.server(authenticated=authenticated).go()
    made.clients[555] = made.clients.pop(101)
    server = made.server(authenticated=authenticated, wait=0.05)
    server.go()
    assert json.loads((made.place / "server" / "nodes.json").read_text())["1"] == ("101" if authenticated else "555")
    assert len(events(made, "turned away")) == authenticated


def test_a_client_that_gets_a_new_key_during_a_run_goes_on_under_it(deployed):
    made = deployed(rounds=3)

    def change(node, request, reply):
        if (node, request.kind, request.config["round"]) == (100, "train", 0):
            made.clients[555] = made.clients[101]  # the old node is still there
            Roster.open(made.place / "server", authenticated=True).rebind(1, 555)
        return [(node, reply)]

    link = Link(made, change)
    made.server(authenticated=True).go()
    assert link.trained() == [(0, [100, 101]), (1, [100, 555]), (2, [100, 555])]
    assert [(one["client"], one["node"]) for one in events(made, "left")] == [(1, "101")]
    assert [one["node"] for one in events(made, "turned away")] == ["101"]
    assert [one["refused"] for one in lines(made)] == [{}] * len(lines(made))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"client": 9}, "client 9, which nobody is"),
        ({"client": -1}, "client -1, which nobody is"),
        ({"client": True}, "client True, which nobody is"),
        ({"client": "1"}, "client 1, which nobody is"),
        ({"client": "x" * 10_000}, "which nobody is"),
        ({"run": "another"}, "It answers run=another where"),
    ],
    ids=["unknown", "negative", "truth", "text", "long", "stale"],
)
def test_a_node_that_does_not_say_who_it_is_is_turned_away(deployed, config, sentence):
    made = deployed(rounds=1)

    def change(node, request, reply):
        lies = node == 101 and request.kind == "hello"
        return [(node, dataclasses.replace(reply, config=dict(reply.config) | config) if lies else reply)]

    Link(made, change)
    made.server(wait=0.05).go()
    (turned,) = events(made, "turned away")
    assert sentence in turned["sentence"]
    assert len(turned["sentence"]) < 200


@pytest.mark.parametrize("examples", [b"bytes", [1, 2], "many", None])
def test_whatever_a_node_says_of_its_rows_ends_no_federation(deployed, examples):
    made = deployed(rounds=1)

    def change(node, request, reply):
        return [(node, dataclasses.replace(reply, config=dict(reply.config) | {"examples": examples}))]

    Link(made, change)
    made.server().go()
    assert [one["examples"] for one in events(made, "joined")] == [None, None]


def test_a_node_of_another_app_is_turned_away_with_its_sentence(deployed):
    made = deployed(rounds=1)
    other = deployed(rounds=1, max_norm=7.0)
    made.clients[101] = other.clients[101]
    made.server(wait=0.05).go()
    assert "their apps differ" in events(made, "turned away")[0]["sentence"]


# What is refused.


@pytest.mark.parametrize("reason", ["node", "garbage", "stale"])
def test_a_refused_reply_is_counted_by_client_and_reason(deployed, reason):
    made = deployed()
    Link(made, spoil(reason, lambda node, request: node == 101 and request.config["round"] == 1))
    made.server().go()
    first, second, third, last = lines(made)
    assert [one["refused"] for one in (first, second, third)] == [{}, {"1": reason}, {}]
    assert [one["usable"] for one in (first, second, third)] == [2, 1, 2]
    assert (last["rejected"], last["reasons"]) == ({"1": 1}, {reason: 1})
    (event,) = events(made, "refused")
    assert (event["client"], event["node"], event["round"], event["reason"]) == (1, "101", 1, reason)


def test_a_round_goes_on_without_a_refused_client(deployed):
    made, alone = deployed(rounds=1), deployed(rounds=1)
    Link(made, spoil("garbage", lambda node, request: node == 101))
    server = made.server()
    server.go()
    alone.place = made.place / "alone"
    alone.link = Loopback({100: alone.clients[100]})
    other = alone.server(wait=0.05)
    other.go()
    assert bits(server.server) == bits(other.server)


def test_a_second_reply_of_one_node_counts_for_nothing(deployed, undisturbed):
    made = deployed("ditto")
    Link(made, lambda node, request, reply: [(node, reply)] * (2 if request.kind == "train" else 1))
    server = made.server()
    server.go()
    assert bits(server.server) == undisturbed[0]
    assert lines(made)[-1]["reasons"] == {"duplicate": 6}


@pytest.mark.parametrize("stranger", [999, 101])
def test_a_reply_of_a_node_that_was_not_asked_counts_for_nothing(deployed, stranger):
    made = deployed(rounds=1, cohort=1)
    asked_of = made.server()._drawn(0)
    other = 100 + (1 - next(iter(asked_of))) if stranger == 101 else stranger

    def change(node, request, reply):
        return [(other, reply), (node, reply)] if request.kind != "hello" else [(node, reply)]

    Link(made, change)
    summary = made.server().go()
    assert lines(made)[0]["reasons"] == {"stranger": 1}
    assert lines(made)[0]["usable"] == 1
    assert summary["personal"] is not None
    scored = RunDirectory(made.place / "server").per_client()["personal"]["client"]
    assert scored == ["0", "1"]


def test_scores_that_are_not_finite_are_left_out(deployed):
    made = deployed(rounds=1)

    def change(node, request, reply):
        if request.kind == "evaluate" and node == 100:
            sums = {name: wire.from_bytes(name, raw) for name, raw in reply.arrays.items()}
            sums = {name: np.full_like(a, np.nan) if a.dtype.kind == "f" else a for name, a in sums.items()}
            reply = dataclasses.replace(reply, arrays=wire.encode(sums))
        return [(node, reply)]

    Link(made, change)
    summary = made.server().go()
    assert RunDirectory(made.place / "server").per_client()["personal"]["client"] == ["1"]
    assert summary["personal"]["accuracy"] >= 0
    assert events(made, "unscored")[0]["sentence"] == "Its sums are not finite."


def test_without_any_score_a_run_still_ends(deployed):
    made = deployed(rounds=1)
    Link(made, lambda node, request, reply: [] if request.kind == "evaluate" else [(node, reply)])
    summary = made.server().go()
    assert summary["personal"] is None
    assert read_status(made.place / "server")["phase"] == "finished"


def test_figures_that_no_method_reports_are_not_written_down(deployed):
    made = deployed(rounds=1)
    Link(
        made,
        lambda node, request, reply: [
            (node, dataclasses.replace(reply, metrics=dict(reply.metrics) | {"x" * 99: 1.0}))
        ],
    )
    made.server().go()
    assert set(lines(made)[0]["info"]) == {"bits", "loss"}


def test_a_server_that_would_not_be_finite_is_the_old_one(deployed, monkeypatch):
    made = deployed(rounds=2)
    real = serving._server_step

    def blown_up(context, server, received, key, **how):
        if lines(made):
            received = replace(received, payload=jax.tree.map(lambda leaf: leaf + np.inf, received.payload))
        return real(context, server, received, key, **how)

    monkeypatch.setattr(serving, "_server_step", blown_up)
    server = made.server()
    server.go()
    (event,) = events(made, "discarded")
    assert event["round"] == 1
    assert server.log.completed == 2
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(server.server))


# The directory.


def test_a_second_server_on_the_same_directory_is_refused_and_harms_nothing(deployed):
    made = deployed()
    link = Link(made)
    seen = []

    def change(node, request, reply):
        if request.kind == "train":
            with pytest.raises(UsageError, match="is being run by another process; wait for its end") as caught:
                made.server()
            seen.append(str(caught.value))
        return [(node, reply)]

    link.change = change
    made.server().go()
    assert len(seen) == 6
    assert read_status(made.place / "server")["phase"] == "finished"
    assert [line["round"] for line in lines(made)] == [1, 2, 3, 3]


def test_a_server_that_was_made_before_another_ran_is_refused(deployed):
    made = deployed()
    early = made.server()
    made.server().go()
    with pytest.raises(UsageError, match="was written by another server meanwhile; start this one again"):
        early.go()
    assert read_status(made.place / "server")["phase"] == "finished"


@pytest.mark.parametrize("changed", [{"seed": 2}, {"rounds": 1}, {"max_norm": 9.0}], ids=["seed", "rounds", "app"])
def test_another_app_seed_or_number_of_rounds_on_the_same_directory_is_refused(deployed, changed):
    made = deployed()
    made.server().go()
    with pytest.raises(UsageError, match=r"holds round 3 of another app, seed or number of rounds; choose another"):
        deployed(**changed).server()


def test_more_rounds_go_on_from_the_last(deployed):
    deployed().server().go()
    longer = deployed(rounds=4)
    link = Link(longer)
    longer.server().go()
    assert [t for t, _ in link.trained()] == [3]


def test_the_directory_of_another_method_is_refused(deployed):
    deployed().server()
    with pytest.raises(UsageError, match=r"holds another method|belongs to another run"):
        deployed("fedhb-niw").server()


def test_the_charter_is_written_beside_the_checkpoint(deployed):
    from priory.deploy import charter as charters

    made = deployed()
    made.server()
    assert charters.load(made.place / "server").digest == made.charter.digest


def test_status_tells_every_phase_in_turn(deployed, monkeypatch):
    made, seen, real = deployed(rounds=1, eval_every=1), [], Journal.stand
    monkeypatch.setattr(Journal, "stand", lambda self, phase, **about: seen.append(phase) or real(self, phase, **about))
    made.server().go()
    assert seen == ["waiting", "asking", "aggregating", "waiting", "evaluating", "finished"]
    told = read_status(made.place / "server")
    assert (told["method"], told["round"], told["rounds"], told["error"]) == ("fedavg", 1, 1, "")


@pytest.mark.parametrize(("every", "scored"), [(0, []), (1, [1, 2]), (2, [2])])
def test_evaluations_on_the_way_are_lines_of_their_own(deployed, every, scored):
    made = deployed(eval_every=every)
    made.server().go()
    on_the_way = [line["round"] for line in lines(made)[:-1] if line["personal"]]
    assert on_the_way == scored
    assert lines(made)[-1]["personal"]["accuracy"] >= 0


# Differential privacy.


def test_local_privacy_runs_to_its_end_and_tells_its_price(deployed):
    made = deployed(dp="local", **PRIVATE)
    summary = made.server().go()
    assert summary["extra"]["privacy"]["epsilon"] > 0
    assert lines(made)[2]["epsilon"] == pytest.approx(summary["extra"]["privacy"]["epsilon"])


def test_local_noise_comes_from_secrets_and_not_from_the_seed(tmp_path, deployed):
    made = deployed(dp="local", rounds=1, **PRIVATE)
    servers = []
    for number in range(2):
        made.place = tmp_path / str(number)
        made.clients = {100 + client: made.client(client) for client in range(2)}
        made.link = Loopback(made.clients)
        server = made.server()
        server.go()
        servers.append(bits(server.server))
    assert servers[0] != servers[1]


def test_central_noise_comes_from_nothing_that_clients_know(tmp_path, deployed):
    made = deployed(dp="central", rounds=1, **PRIVATE)
    servers = []
    for number in range(2):
        made.place = tmp_path / str(number)
        made.clients = {100 + client: made.client(client) for client in range(2)}
        made.link = Loopback(made.clients)
        server = made.server()
        server.go()
        servers.append(bits(server.server))
    assert servers[0] != servers[1]


def test_the_sum_of_central_privacy_is_that_of_the_clients_and_the_noise_what_was_asked_for(deployed):
    made = deployed(dp="central", rounds=1, dp_noise=1.0, dp_delta=0.1, dp_clip=1e-4)
    server = made.server()
    before = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(server.server)])
    server.go()
    after = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(server.server)])
    ledger, size = made.charter.ledger, len(before)
    squares = float(np.sum(((after - before).astype(np.float64) * ledger.expected / ledger.sd) ** 2))
    low, high = range_of_squares(size, signal=1.0)  # two clients' clipped differences are at most σ in all
    assert low < squares < high


def known_to_all(made, t):
    """Return the cohort that everybody who knows the seed of the run would expect."""
    root = charters.first_key(made.charter.settings.seed)
    return set(np.asarray(_draw(root, t, participation=made.charter.participation)[0].ids).tolist())


def test_cohorts_that_are_to_amplify_privacy_come_from_a_secret(deployed):
    made = deployed(num_clients=8, cohort=2, dp="central", rounds=1, **PRIVATE)
    assert made.charter.ledger.spending.amplified
    server = made.server()
    drawn = [set(server._drawn(t)) for t in range(64)]
    hits = sum(len(cohort & known_to_all(made, t)) for t, cohort in enumerate(drawn))
    # Two cohorts of 2 of 8 share 1/2 on average, with variance 2 · 1/4 · 3/4 · 6/7.
    assert abs(hits - 64 / 2) < 4.5 * (64 * 2 * 0.25 * 0.75 * 6 / 7) ** 0.5
    assert [set(made.server()._drawn(t)) for t in range(64)] == drawn  # a server that is started again
    assert stat.S_IMODE((made.place / "server" / "secret").stat().st_mode) == 0o600


def test_the_run_directory_is_for_its_owner_alone(deployed, open_umask):
    made = deployed(rounds=1)
    out = made.place / "server"
    made.server()
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    out.chmod(0o755)  # as an earlier version left it
    made.server()
    assert stat.S_IMODE(out.stat().st_mode) == 0o700


def test_a_directory_with_files_of_others_stays_as_it_is(deployed):
    made = deployed(rounds=1)
    out = made.place / "server"
    out.mkdir(mode=0o755)
    (out / "thesis.tex").touch()
    made.server()
    assert stat.S_IMODE(out.stat().st_mode) == 0o755


def test_cohorts_that_everybody_knows_amplify_nothing(deployed):
    made = deployed("ditto", num_clients=8, cohort=2, dp="central", rounds=9, **PRIVATE)
    ledger, server = made.charter.ledger, made.server()
    assert not ledger.spending.amplified
    drawn = [set(server._drawn(t)) for t in range(9)]
    assert drawn == [known_to_all(made, t) for t in range(9)]
    most = max(sum(client in cohort for cohort in drawn) for client in range(8))
    assert ledger.spent(9) == pytest.approx(accountants.concentrated_epsilon(most / 2, 0.1))


def test_central_noise_that_was_drawn_in_vain_is_never_seen(deployed, monkeypatch):
    made = deployed(dp="central", rounds=2, **PRIVATE)
    asked: list[tuple[int, dict]] = []
    Link(made, lambda node, request, reply: asked.append((request.config["round"], request.arrays)) or [(node, reply)])
    real, drawn = Checkpoint.commit, []

    def commit(self, server, completed, *rest):
        if completed == 1:
            drawn.append(wire.encode({"down": server}))
            if len(drawn) == 1:
                raise Killed
        real(self, server, completed, *rest)

    monkeypatch.setattr(Checkpoint, "commit", commit)
    with pytest.raises(Killed):
        made.server().go()
    made.server().go()
    assert drawn[0] != drawn[1]
    assert [arrays for t, arrays in asked if t == 1 and arrays] == [drawn[1]] * 2


def test_a_private_run_that_was_killed_hears_the_same_bytes_again(deployed, monkeypatch):
    made = deployed(dp="local", rounds=2, **PRIVATE)
    seen: list[tuple[int, dict]] = []
    sums: list[list[bytes]] = []
    Link(made, lambda node, request, reply: seen.append((node, dict(reply.arrays))) or [(node, reply)])
    real = Checkpoint.commit

    def commit(self, server, completed, *rest):
        if completed == 1:
            sums.append(bits(server))
            if len(sums) == 1:
                raise Killed
        real(self, server, completed, *rest)

    monkeypatch.setattr(Checkpoint, "commit", commit)
    with pytest.raises(Killed):
        made.server().go()
    first, seen[:] = [one for one in seen if one[1]], []
    made.server().go()
    assert [one for one in seen if one[1]][:2] == first
    assert sums[0] == sums[1]


def test_a_private_client_tells_no_figures_and_no_scores(deployed):
    made = deployed(dp="local", rounds=1, **PRIVATE)
    heard: list[Reply] = []
    Link(made, lambda node, request, reply: heard.append(reply) or [(node, reply)])
    summary = made.server().go()
    assert all(not reply.metrics for reply in heard)
    assert all("examples" not in reply.config for reply in heard)
    assert summary["personal"] is None


def test_a_private_client_whose_update_blew_up_is_heard_like_any_other(deployed):
    from priory import FedAvg
    from priory.fed.local import Optimiser, Work

    method = FedAvg(optimiser=Optimiser(step_size=1e38), work=Work(epochs=3))
    made = deployed(method=method, dp="local", rounds=1, **PRIVATE)
    heard: list[Reply] = []
    Link(made, lambda node, request, reply: heard.append(reply) or [(node, reply)])
    made.server().go()
    trained = [reply for reply in heard if "status" in reply.config]
    assert [reply.config["status"] for reply in trained] == [visit.COUNTED] * 2
    assert lines(made)[0]["usable"] == 2


def test_central_screening_refuses_a_message_above_the_clipping_norm(deployed):
    made = deployed(dp="central", rounds=1, **PRIVATE)

    def change(node, request, reply):
        if request.kind == "train" and node == 101:
            message = wire.decode(reply.arrays, made.charter.uplink)
            large = jax.tree.map(lambda leaf: leaf + np.float32(10), message.payload)
            reply = dataclasses.replace(reply, arrays=wire.encode(dataclasses.replace(message, payload=large)))
        return [(node, reply)]

    Link(made, change)
    made.server().go()
    assert lines(made)[0]["refused"] == {"1": "norm"}


def test_nobody_stands_in_for_another_under_privacy(deployed):
    made = deployed(num_clients=3, cohort=1, dp="central", rounds=1, **PRIVATE)
    (drawn,) = made.server()._drawn(0)
    made.clients.pop(100 + drawn)
    made.link = Loopback(made.clients)
    with pytest.raises(TooFewReplies, match="0 clients are there"):
        made.server(wait=0.05).go()


def test_somebody_stands_in_for_who_is_not_there(deployed):
    made = deployed(num_clients=3, cohort=1, rounds=1)
    (drawn,) = made.server()._drawn(0)
    link = Link(made)
    link.clients.pop(100 + drawn)
    made.server(wait=0.05).go()
    ((_, nodes),) = link.trained()
    assert len(nodes) == 1
    assert events(made, "stands in")[0]["absent"] == drawn


def test_a_run_ends_where_its_budget_does(deployed):
    made = deployed(dp="central", dp_noise=3.0, dp_delta=0.1, dp_epsilon=1.0, rounds=30)
    assert 0 < made.charter.ledger.rounds < 30
    summary = made.server().go()
    assert summary["rounds"] == made.charter.ledger.rounds
    assert summary["extra"]["privacy"]["epsilon"] <= 1.0
