"""The same seeds in the simulator and on Flower, with processes, TLS and node keys, give the same server."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

import priory
from priory import methods
from priory.core import rng
from priory.core.rng import Stream
from priory.deploy import charter as charters
from priory.deploy import examples
from priory.deploy.app import write_app
from priory.deploy.flower_processes import SETTINGS
from priory.deploy.journal import read_events
from priory.deploy.processes import Fleet
from priory.store import Checkpoint, RunDirectory
from tests.deploy.conftest import MODEL, kill_server_app, small_charter, small_federation
from tests.deploy.test_one_truth import assert_same_server
from tests.methods.problems import FEDAVGM

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]
CLIENTS, ROUNDS, PATIENCE = 2, 3, 300.0  # seconds for all rounds of a method
METHODS = [name for name in methods.REGISTRY if name != "pooled"]
METHODS += [pytest.param(FEDAVGM, id="a file")]  # which only the app has


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    place = tmp_path_factory.mktemp("flower")
    nodes = []
    for client in range(CLIENTS):
        rows = place / f"rows-{client}.npz"
        examples.save(examples.of_client(small_federation(CLIENTS), client), rows)
        state = str(place / f"state-{client}")
        nodes.append({"partition-id": client, "num-partitions": CLIENTS, "dealt": str(rows), "state": state})
    with Fleet(place / "fleet", nodes) as fleet:
        yield fleet
    assert fleet.processes() == []


@pytest.mark.parametrize("name", METHODS)
def test_simulator_and_flower_give_the_same_server(fleet, tmp_path, name):
    charter, out = small_charter(methods.make(name), CLIENTS, rounds=ROUNDS), tmp_path / "server"
    write_app(tmp_path / "app", charter, {}, out=str(out), authenticated=True)
    run = fleet.submit(tmp_path / "app", {"timeout": 120.0})
    wait_for_the_last_round(out, lambda: fleet.log_of(run))
    kill_server_app(fleet)  # scores are none of this test's business
    assert_same_server(server_in(out, charter), simulated(charter).server)
    assert [one["refused"] for one in RunDirectory(out).metrics()] == [{}] * ROUNDS


def simulated(charter):
    federation = small_federation(CLIENTS)
    return priory.simulate(charter.method, federation, rounds=ROUNDS, seed=1, eval_every=0, model=MODEL)


def wait_for_the_last_round(out, log):
    """Return when the last round is committed; a server that failed or takes too long says so."""
    until = time.monotonic() + PATIENCE
    while True:
        told = read_events(out)
        if any(one["event"] == "round" and one["round"] == ROUNDS - 1 for one in told):
            return
        assert not [one["error"] for one in told if one["event"] == "failed"]
        assert time.monotonic() < until, f"{told[-3:]}\n{log()[-3000:]}"
        time.sleep(0.2)


def server_in(out, charter):
    """The server of a run directory, from its checkpoint."""
    key = rng.key(charters.first_key(charter.settings.seed), Stream.INIT)
    like = jax.eval_shape(charter.method.init_server, charter.tasks[0], key)
    checkpoint = Checkpoint(RunDirectory(out).checkpoint, like, (), 0)
    assert checkpoint.round == ROUNDS
    return checkpoint.read_server()


ROWS = '''"""The rows of a simulated node."""

from priory.deploy import examples as sources


def examples(node, charter):
    return sources.load(f"{place}/rows-{{node['partition-id']}}.npz")
'''


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed; pip install 'flwr[simulation]' brings it")
def test_flowers_own_simulation_gives_the_same_server(tmp_path, monkeypatch):
    charter, out = small_charter(methods.get("fedrep")(), CLIENTS, rounds=ROUNDS), tmp_path / "server"
    package = write_app(tmp_path / "app", charter, {}, out=str(out))
    (package / "rows.py").write_text(ROWS.format(place=tmp_path))
    for client in range(CLIENTS):
        examples.save(examples.of_client(small_federation(CLIENTS), client), tmp_path / f"rows-{client}.npz")
    mark = f"PRIORY_TEST_OWNER={secrets.token_hex(8)}"
    monkeypatch.setenv(*mark.split("="))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    how = ["--stream", "--federation-config", f"num-supernodes={CLIENTS} client-resources-num-cpus=1"]
    try:
        command = [str(Path(sys.executable).parent / "flwr"), "run", str(tmp_path / "app"), "local", *how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert RunDirectory(out).summary() is not None, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    finally:
        left = ended(mark.encode())
    assert_same_server(server_in(out, charter), simulated(charter).server)
    assert left == []


def ended(mark):
    """The processes with a mark that survive being told to end, and then being killed: Flower leaves its own behind."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + 20
        while (alive := marked(mark)) and time.monotonic() < until:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
            time.sleep(0.5)
    return marked(mark)


def marked(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if int(path.parent.name) != os.getpid() and mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found
