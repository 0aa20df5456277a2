"""On real Flower, with processes, TLS and node keys: a client gets a new key while its federation trains."""

import shutil
import stat
import subprocess
import sys
import time

import pytest

from priory import methods
from priory.deploy import examples
from priory.deploy.app import write_app
from priory.deploy.flower_processes import FlowerError
from priory.deploy.journal import read_events, read_status
from priory.deploy.processes import Fleet
from priory.deploy.roster import Roster
from priory.store import RunDirectory
from tests.deploy.conftest import small_charter, small_federation

pytest.importorskip("flwr")
# Slow: eight processes of Flower's, some of them started twice, and rounds of several seconds.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]
CLIENTS, ROUNDS, PATIENCE = 2, 2, 300.0  # the last in seconds, for any one thing to happen


def test_a_key_is_renewed_during_a_run_and_the_old_one_is_turned_away(tmp_path, open_umask):
    charter, out = small_charter(methods.get("fedavg")(), CLIENTS, rounds=ROUNDS), tmp_path / "server"
    write_app(tmp_path / "app", charter, {}, out=str(out), authenticated=True)
    nodes = []
    for client in range(CLIENTS):
        rows, state = tmp_path / f"rows-{client}.npz", tmp_path / f"state-{client}"
        examples.save(examples.of_client(small_federation(CLIENTS), client), rows)
        nodes.append({"partition-id": client, "num-partitions": CLIENTS, "dealt": str(rows), "state": str(state)})
    with Fleet(tmp_path / "fleet", nodes) as fleet:
        old, other = fleet.node_ids
        shutil.copy(fleet.keys[0], tmp_path / "old-key")
        # No round ends without both clients, so the run waits for the new key.
        fleet.submit(tmp_path / "app", {"min-replies": CLIENTS, "timeout": 30.0, "attempts": 9, "wait": PATIENCE})
        await_in(out, lambda: any(one["event"] == "round" for one in read_events(out)))

        said = keys(fleet, "renew", "--node", "client-0", "--out", str(out))
        new = Roster.open(out, authenticated=True).bound[0]
        assert f"client 0 is bound to node {new} in" in said
        assert f"(node {old}) is unregistered" in said
        await_in(out, lambda: any(one["event"] == "left" and one["client"] == 0 for one in read_events(out)))
        fleet.kill_node(0)
        own, fleet.keys[0] = fleet.keys[0], tmp_path / "old-key"
        with pytest.raises(FlowerError, match="Failed to activate SuperNode"):
            fleet.start_node(0)
        assert "No SuperNode found with the given public key" in fleet.log("superlink")
        fleet.keys[0] = own
        fleet.start_node(0)
        assert fleet.node_ids == [new, other]

        await_in(out, lambda: read_status(out)["phase"] == "finished")
        listed = keys(fleet, "list")
        assert f"online, node {new}" in listed
        assert str(old) not in listed
        assert "not in this directory" not in listed
        assert {path.name for path in fleet.directory.glob("state.db*")} >= {"state.db", "state.db-wal"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in fleet.directory.glob("state.db*")} == {0o600}
    assert new != old
    assert Roster.open(out, authenticated=True).bound == {0: new, 1: other}
    joined = [(one["client"], one["node"]) for one in read_events(out) if one["event"] == "joined"]
    assert set(joined) == {(0, str(old)), (1, str(other)), (0, str(new))}
    assert [one["usable"] for one in RunDirectory(out).metrics()][:ROUNDS] == [CLIENTS] * ROUNDS
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("fleet", "server", "state-0")} == {0o700}


def keys(fleet, command, *arguments):
    """What `priory flower keys` prints, as an operator calls it."""
    place = [str(fleet.keys[0].parent), "--superlink", "fleet"]
    argv = [sys.executable, "-m", "priory", "flower", "keys", command, *place, *arguments]
    done = subprocess.run(argv, env=fleet._environment("command"), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def await_in(out, reached):
    """Return when something was written in a run directory; a run that failed says so."""
    until = time.monotonic() + PATIENCE
    while not ((out / "status.json").exists() and reached()):
        assert time.monotonic() < until, read_events(out)[-5:]
        failed = [one["error"] for one in read_events(out) if one["event"] == "failed"]
        assert not failed
        time.sleep(0.2)
