"""180 faults on federations over the wire format: each ends, keeps every posterior, and has told of what went wrong.

untraced   the server dies at every point, requests come twice: nothing is to be seen of it
patient    a round needs everybody, so it is asked again after a fault, and all is as if there had been none
hasty      a round needs one reply and goes on without the others
"""

import json
from collections import Counter

import numpy as np
import pytest

from priory.core import trees
from priory.deploy import attendance
from priory.deploy.client_states import ClientStateStore
from priory.deploy.journal import read_events
from priory.deploy.loopback import Loopback
from priory.store import RunDirectory
from tests.deploy import faults
from tests.deploy.faults import DIES, HASTY, PATIENT, REFUSED, UNTRACED, FaultyLink, Repeated, planned, same_bits

SEEDS, EACH, CLIENTS, ROUNDS = range(18), 10, 4, 6
MODES = {"untraced": (0, 6, 12), "patient": (1, 4, 7, 10, 13), "hasty": (2, 3, 5, 8, 9, 11, 14, 15, 16, 17)}
KINDS = {"untraced": UNTRACED, "patient": PATIENT, "hasty": HASTY}
METHODS = ("fedavg", "fedhb-niw", "pfedbayes", "fedrep", "fedbnn", "sfedbayes", "ditto", "fedpop", "fedvi")
SETTINGS = {9: {"compress": "top:0.3"}, 12: {"compress": "qsgd:16"}, 3: {"robust": "median"}}


def mode_of(seed):
    return next(mode for mode, seeds in MODES.items() if seed in seeds)


def plan_of(seed):
    """Ten faults; within a mode all kinds come up equally often."""
    mode = mode_of(seed)
    deck, place = KINDS[mode], MODES[mode].index(seed)
    order = np.random.default_rng(0).permutation(np.resize(deck, EACH * len(MODES[mode])))
    kinds = [str(kind) for kind in order[place * EACH : (place + 1) * EACH]]
    return planned(seed, kinds, CLIENTS, ROUNDS, patient=mode != "hasty")


@pytest.fixture(autouse=True)
def _servers_look_often(monkeypatch):
    monkeypatch.setattr(attendance, "LOOK", 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_federation_survives_ten_faults(deployed, seed, tmp_path, tmp_path_factory):
    mode, name = mode_of(seed), METHODS[seed % len(METHODS)]
    made = deployed(name, num_clients=CLIENTS, rounds=ROUNDS, seed=seed, **SETTINGS.get(seed, {}))
    how = {"min_replies": 1 if mode == "hasty" else CLIENTS, "wait": 0.1}
    link = made.link = FaultyLink(made, plan_of(seed), seed)
    server, summary = faults.run_to_the_end(lambda: made.server(**how), link, most=EACH + 1)

    assert link.left == []
    for outcome in ("struck", "recovered"):
        assert sum(tally[outcome] for tally in link.account.tally.values()) == EACH
    assert server.log.completed == ROUNDS
    assert bool(trees.all_finite(server.server))
    check_account(server, summary, link, mode)
    check_states(made, server, link, tmp_path)
    check_server(made, server, link, mode, tmp_path)
    write_down(link.account.tally, seed, tmp_path_factory)


def check_account(server, summary, link, mode):
    """The log, the metrics and the summary tell of every fault, with its reason and its client, and of nothing else."""
    account, directory = link.account, server.journal.directory
    events = read_events(directory)
    refused = Counter((one["round"], one["client"], one["reason"]) for one in events if one["event"] == "refused")
    assert refused == account.events
    kinds = Counter(one["event"] for one in events)
    assert (kinds["started"], kinds["failed"], kinds["finished"]) == (link.deaths + 1, link.deaths, 1)
    assert {one["error"] for one in events if one["event"] == "failed"} == {k for k in account.tally if DIES in k}
    assert kinds["unscored"] == kinds["turned away"] == 0
    lines = [line for line in RunDirectory(directory).metrics() if line["usable"] is not None]
    assert [line["refused"] for line in lines] == account.lines
    assert [line["usable"] for line in lines] == [CLIENTS - len(line) for line in account.lines]
    assert summary["extra"]["reasons"] == server.log.reasons == account.reasons
    assert summary["extra"]["rejected"] == server.log.rejected == account.rejected
    assert set(summary["personal"]["clients"]) >= {"mean", "worst"}
    for kind, tally in account.tally.items():
        if kind in REFUSED:
            assert tally[REFUSED[kind]] == tally["struck"]
    if mode == "untraced":
        assert refused == {}
        assert account.lines == [{}] * ROUNDS


def check_states(made, server, link, tmp_path):
    """A client's state is its own, whole, and what the requests that it has heard make of a new client."""
    for number in range(CLIENTS):
        owner = made.client(number)
        record, generation = kept_by(owner, server).read(ROUNDS, owner._blank)
        again = made.client(number)
        again._state = tmp_path / "again" / str(number)
        for request in link.history[number]:
            assert not again.answer(request).error
        assert generation == 1 + link.history[number][-1].config["round"]
        assert same_bits(record, kept_by(again, server).read(ROUNDS, again._blank)[0])
        assert any(kept_by(owner, server).model.iterdir())


def kept_by(client, server):
    return ClientStateStore(client._state, client.number, server.run, client.charter.digest)


def check_server(made, server, link, mode, tmp_path):
    """The server is what the replies that counted make of a new one; where none is missed, what no fault does."""
    made.place = tmp_path / "repeated"
    clients = {node: made.client(client.number) for node, client in made.clients.items()}
    made.link = Repeated(clients, link.accepted)
    again = made.server(min_replies=1, attempts=1)
    again.go()
    assert same_bits(server.server, again.server)
    if mode != "hasty":
        made.place = tmp_path / "undisturbed"
        made.link = Loopback({node: made.client(client.number) for node, client in made.clients.items()})
        undisturbed = made.server()
        undisturbed.go()
        assert undisturbed.log.reasons == {}
        assert same_bits(server.server, undisturbed.server)


def write_down(tally, seed, tmp_path_factory):
    """Keep the tally beside those of other seeds, whichever process runs them; whoever is last prints the sum."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if base.name.startswith("popen-") else base) / "faults"
    place.mkdir(exist_ok=True)
    (place / f"{seed}.json").write_text(json.dumps(tally))
    found = [json.loads(path.read_text()) for path in place.glob("*.json")]
    if len(found) == len(SEEDS):
        total = {kind: sum((Counter(one.get(kind, {})) for one in found), Counter()) for kind in HASTY}
        (place / "table.md").write_text(table(total))
        print(f"\n{table(total)}\n{place / 'table.md'}")
        assert sum(one["struck"] for one in total.values()) == EACH * len(SEEDS)


def table(total):
    rows = ["| fault | struck | refused | as | recovered |", "|---|---|---|---|---|"]
    for kind, one in {**total, "all": sum(total.values(), Counter())}.items():
        reasons = {reason: num for reason, num in sorted(one.items()) if reason not in ("struck", "recovered")}
        said = ", ".join(f"{reason} {num}" for reason, num in reasons.items())
        rows.append(f"| {kind} | {one['struck']} | {sum(reasons.values())} | {said} | {one['recovered']} |")
    return "\n".join(rows)


@pytest.mark.slow
def test_there_are_180_faults_and_several_of_every_kind():
    kinds = Counter(fault.kind for seed in SEEDS for fault in plan_of(seed))
    assert sum(kinds.values()) == 180
    assert set(kinds) == set(HASTY)
    assert min(kinds.values()) >= 3
