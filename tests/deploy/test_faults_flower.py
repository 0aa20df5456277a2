"""More than 20 faults on federations of real processes: nodes, server and SuperLink killed, disks full, clocks wrong.

With the 180 of test_faults.py there are 200. Replies go wrong in the app itself: its client.py is wrapped in one that
has a plan, and each fault of it strikes once.
"""

import contextlib
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from priory import methods
from priory.core import rng, trees
from priory.core.rng import Stream
from priory.deploy import charter as charters
from priory.deploy import examples
from priory.deploy.app import write_app
from priory.deploy.client import Client
from priory.deploy.client_states import ClientStateStore
from priory.deploy.journal import read_events, read_status
from priory.deploy.processes import Fleet
from priory.store import Checkpoint, RunDirectory
from tests.deploy.conftest import kill_server_app, small_charter, small_federation
from tests.deploy.faults import REFUSED

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]
ROOT = Path(__file__).parents[2]
CLIENTS, ROUNDS, TIMEOUT, PATIENCE = 3, 6, 60.0, 600.0  # the last two in seconds
SILENT = {"late": {"timeout"}, "process dies": {"timeout", "node"}, "raises": {"node"}}
# Round and client: what goes wrong.
FIRST = {
    (0, 0): "not a number", (0, 1): "wrong keys", (0, 2): "wrong type", (1, 1): "garbage", (2, 1): "process dies",
    (3, 0): "late", (5, 0): "wrong shape", (5, 1): "disk full",
}  # fmt: skip
SECOND = {
    (0, 0): "truncated", (0, 1): "infinite", (1, 0): "huge norm", (1, 2): "negative weight", (3, 1): "raises",
    (4, 0): "disk full", (4, 1): "enormous weight", (5, 0): "oversized", (5, 1): "not a number",
}  # fmt: skip
CLIENT = '''
"""A client that goes wrong as planned, once for each round and client of the plan."""

import errno, os, sys, time
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from flwr.clientapp import ClientApp

from priory.deploy.flower import NUMPY, client_app, reply_of, to_records
from {package}.rows import examples

sys.path.insert(0, {root!r})
from tests.deploy.faults import mangled

PLAN, STRUCK, LATE = {plan!r}, Path({struck!r}), {late!r}
app = ClientApp()
honest = client_app(Path(__file__).parent, examples)


def planned(message, context):
    slot = int(message.content["config"]["round"]), int(context.node_config["partition-id"])
    if message.metadata.message_type != "train" or slot not in PLAN:
        return None
    try:
        (STRUCK / f"{{slot[0]}}-{{slot[1]}}").touch(exist_ok=False)
    except FileExistsError:
        return None
    return PLAN[slot]


def answer(message, context):
    match planned(message, context):
        case None:
            return honest(message, context)
        case "raises":
            raise RuntimeError("Something went wrong on purpose.")
        case "process dies":
            os._exit(7)
        case "late":
            reply = honest(message, context)
            time.sleep(LATE)
            return reply
        case "disk full":
            return without_space(message, context)
        case kind:
            reply = mangled(reply_of(honest(message, context)), kind, np.random.default_rng(0))
    records = to_records(replace(reply, arrays={{}}))
    # Flower carries whatever an array claims to hold.
    records["arrays"] = ArrayRecord(
        {{name: Array(dtype="float32", shape=(1,), stype=NUMPY, data=raw) for name, raw in reply.arrays.items()}}
    )
    return Message(records, reply_to=message)


def without_space(message, context):
    """Its state's file system is filled to the last byte, or no file may have one."""
    filler = Path(context.node_config["state"]) / "filler"
    if not os.path.ismount(filler.parent):
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            return honest(message, context)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with filler.open("wb", buffering=0) as handle:
        try:
            for _ in range(1000):
                handle.write(bytes(1024))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    try:
        return honest(message, context)
    finally:
        filler.unlink()


for kind in (app.train, app.evaluate, app.query):
    kind()(answer)
'''

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void) {
    static volatile long *mapped;
    if (!mapped) {
        int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
        mapped = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        close(file);
    }
    return *mapped;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, now);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) now->tv_sec += offset();
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}
"""


@dataclass
class Federation:
    """A federation of processes, and the run directory of its server."""

    fleet: Fleet
    app: Path
    out: Path
    charter: charters.Charter
    states: list[Path]
    struck: Path

    def submit(self):
        config = {"min-replies": 1, "timeout": TIMEOUT, "wait": 120.0, "attempts": 4}
        self.run = self.fleet.submit(self.app, config)

    def await_asking(self, t):
        self._await(lambda status: (status["phase"], status["round"]) == ("asking", t), f"round {t}")

    def await_end(self):
        self._await(lambda status: status["phase"] == "finished", "the end")

    def await_event(self, kind, **about):
        until = time.monotonic() + PATIENCE
        while not any(about.items() <= one.items() for one in self.events(kind)):
            assert time.monotonic() < until, f"no {kind} with {about}"
            time.sleep(0.1)

    def _await(self, reached, what):
        until = time.monotonic() + PATIENCE
        while True:
            status = read_status(self.out) if (self.out / "status.json").exists() else {"phase": "none", "round": -1}
            if reached(status):
                return
            assert status["phase"] != "failed", status
            assert time.monotonic() < until, f"{what} did not come: {status}\n{self.fleet.log_of(self.run)[-2000:]}"
            time.sleep(0.1)

    def events(self, kind):
        return [one for one in read_events(self.out) if one["event"] == kind]

    def server(self):
        key = rng.key(charters.first_key(self.charter.settings.seed), Stream.INIT)
        like = jax.eval_shape(self.charter.method.init_server, self.charter.tasks[0], key)
        checkpoint = Checkpoint(RunDirectory(self.out).checkpoint, like, (), 0)
        return checkpoint.round, checkpoint.read_server()

    def record(self, client):
        """The state that a client has kept, whole and its own, and after how many rounds."""
        owner = Client(self.charter, client, lambda: None, self.states[client])
        run = RunDirectory(self.out).committed()["run"]
        return ClientStateStore(self.states[client], client, run, self.charter.digest).read(ROUNDS, owner._blank)


@pytest.fixture
def federation(tmp_path):
    """Makes a federation whose clients go wrong as planned; state directories are small where this is allowed."""
    with contextlib.ExitStack() as stack:

        def make(name, plan, environments=()):
            charter = small_charter(methods.get(name)(), CLIENTS, rounds=ROUNDS)
            struck = tmp_path / "struck"
            struck.mkdir()
            package = write_app(tmp_path / "app", charter, {}, out=str(tmp_path / "server"), authenticated=True)
            words = {"package": package.name, "root": str(ROOT), "plan": plan, "struck": str(struck)}
            (package / "client.py").write_text(CLIENT.format(**words, late=TIMEOUT + 5))
            nodes, states = [], []
            for client in range(CLIENTS):
                rows, state = tmp_path / f"rows-{client}.npz", tmp_path / f"state-{client}"
                examples.save(examples.of_client(small_federation(CLIENTS), client), rows)
                state.mkdir()
                states.append(state)
                stack.enter_context(little_space(state))
                told = {"dealt": str(rows), "state": str(state)}
                nodes.append({"partition-id": client, "num-partitions": CLIENTS, **told})
            fleet = Fleet(tmp_path / "fleet", nodes)
            fleet.environments = list(environments) or fleet.environments
            stack.callback(lambda: nothing_is_left(fleet))
            stack.enter_context(fleet)
            return Federation(fleet, tmp_path / "app", tmp_path / "server", charter, states, struck)

        yield make


def nothing_is_left(fleet):
    assert fleet.processes() == []


@contextlib.contextmanager
def little_space(directory):
    """A file system of its own for a directory, unless we may not make one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(directory)], check=True)


def check(made, plan, excused):
    """All rounds are done, the server is finite, states are whole, and all that went wrong is written down.

    Args:
        excused: Clients that also miss rounds for what befell their processes.
    """
    completed, server = made.server()
    assert completed == ROUNDS
    assert bool(trees.all_finite(server))
    assert {path.name for path in made.struck.iterdir()} == {f"{t}-{client}" for t, client in plan}
    refused = made.events("refused")
    for (t, client), kind in plan.items():
        said = [one for one in refused if (one["round"], one["client"]) == (t, client)]
        assert [one["reason"] in SILENT.get(kind, {REFUSED.get(kind)}) for one in said] == [True], (t, client, kind)
    others = [one for one in refused if (one["round"], one["client"]) not in plan]
    assert [one for one in others if one["client"] not in excused or one["reason"] not in LOST] == []
    summary = RunDirectory(made.out).summary()
    assert Counter(one["reason"] for one in refused) == summary["extra"]["reasons"]
    full = [one["sentence"] for one in refused if plan.get((one["round"], one["client"])) == "disk full"]
    assert all("cannot keep its state" in sentence for sentence in full)
    assert len(RunDirectory(made.out).metrics()) == ROUNDS + 1  # with the scores at the end
    for client in range(CLIENTS):
        record, generation = made.record(client)
        assert bool(trees.all_finite(record))
        assert generation == ROUNDS - (plan.get((ROUNDS - 1, client)) == "disk full") or client in excused


LOST = ("absent", "timeout", "node", "stranger")


def test_a_federation_goes_on_after_a_node_and_the_server_were_killed(federation):
    made = federation("fedrep", FIRST)
    made.submit()
    made.await_asking(1)
    made.fleet.kill_node(2)
    before = [path.read_bytes() for path in sorted(made.states[2].rglob("state-*"))]
    made.fleet.start_node(2, patience=180)
    assert [path.read_bytes() for path in sorted(made.states[2].rglob("state-*"))][: len(before)] == before
    made.await_asking(4)
    assert kill_server_app(made.fleet) == 1
    made.submit()
    made.await_end()
    check(made, FIRST, excused={2})
    assert [one["round"] for one in made.events("started")] == [0, 4]
    missed = [one for one in made.events("refused") if one["client"] == 2 and one["round"] > 0]
    assert missed
    assert missed[0]["round"] == 1
    assert made.record(2)[1] == ROUNDS  # it is back
    print_faults(made, FIRST, ["node killed", "server killed"])


def test_a_federation_goes_on_after_the_superlink_was_killed_and_a_clock_jumped(federation, tmp_path):
    clock = Clock.made(tmp_path)
    made = federation("fedavg", SECOND, [{}, {}, clock.environment if clock else {}])
    made.submit()
    made.await_asking(2)
    made.fleet.restart_superlink()
    made.submit()
    made.await_asking(3)
    if clock:
        clock.jump(3600)
        made.await_event("left", client=2)
        said = made.fleet.log("superlink")
        assert '"POST /v1/fleet/pull-messages HTTP/1.1" 401' in said  # its signatures are of another hour
        assert "SuperNode terminated" in made.fleet.log("node-2")  # though its process is still there
        clock.jump(0)
        made.fleet.kill_node(2)
        made.fleet.start_node(2, patience=180)
    made.await_end()
    check(made, SECOND, excused={2} if clock else ())
    if clock:
        assert Counter(one["client"] for one in made.events("joined")) == {0: 2, 1: 2, 2: 3}
    assert [one["round"] for one in made.events("started")] == [0, 2]
    print_faults(made, SECOND, ["SuperLink killed", *(["clock jumped"] if clock else [])])


@dataclass
class Clock:
    """A clock of the day that can be set while programs look at it; the one that measures spans goes on as ever.

    libfaketime 0.9.10 is no use here: where it leaves that one alone, Python's sleep fails, and where not, waits hang.
    """

    library: Path
    offset: Path

    @classmethod
    def made(cls, directory):
        """One for all that see its environment; None where there is no compiler."""
        source, clock = directory / "clock.c", cls(directory / "clock.so", directory / "offset")
        source.write_text(CLOCK)
        compiler = shutil.which("cc")
        if compiler is None:
            return None
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", clock.library, source, "-ldl"], check=True)
        clock.jump(0)
        return clock

    @property
    def environment(self):
        return {"LD_PRELOAD": str(self.library), "CLOCK_OFFSET": str(self.offset)}

    def jump(self, seconds):
        """Set it so far ahead, in place: the file is mapped by whoever looks at it."""
        with self.offset.open("r+b" if self.offset.exists() else "wb") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))


def print_faults(made, plan, killed):
    print(f"\n{len(plan) + len(killed)} faults: {', '.join([*plan.values(), *killed])}")
    print(Counter(one["reason"] for one in made.events("refused")))


def test_there_are_20_faults():
    assert len(FIRST) + len(SECOND) + 3 >= 20
