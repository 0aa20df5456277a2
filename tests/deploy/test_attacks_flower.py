"""Attacks on a federation of real processes, from outside and from the same machine, while it trains."""

import contextlib
import os
import socket
import ssl
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from priory import methods
from priory.deploy import examples
from priory.deploy.app import write_app
from priory.deploy.gateway import find_nginx, traffic_of
from priory.deploy.journal import read_events
from priory.deploy.processes import Fleet
from tests.deploy.conftest import small_charter, small_federation

pytest.importorskip("flwr")
pytestmark = [
    pytest.mark.slow,  # a real SuperLink and two real nodes for some minutes
    pytest.mark.xdist_group("flower"),
    pytest.mark.skipif(find_nginx() is None, reason="nginx is not installed"),
]
CLIENTS, ROUNDS, HUGE = 2, 3, 600 << 20
TASKS = ["flwr-serverapp", "flwr-clientapp"]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A federation that trained under attack, and how each kind of attack was answered."""
    place = tmp_path_factory.mktemp("attacked")
    charter = small_charter(methods.get("fedavg")(), CLIENTS, rounds=ROUNDS)
    write_app(place / "app", charter, {}, out=str(place / "server"), authenticated=True)
    nodes = []
    for client in range(CLIENTS):
        rows = place / f"rows-{client}.npz"
        examples.save(examples.of_client(small_federation(CLIENTS), client), rows)
        nodes.append({"partition-id": client, "dealt": str(rows), "state": str(place / f"state-{client}")})
    answers, over = {}, threading.Event()
    with Fleet(place / "fleet", nodes, traffic=traffic_of(charter)) as fleet:
        memory = peak_memory(fleet)
        attackers = [
            threading.Thread(target=keep_trying, args=(answers.setdefault(name, Counter()), attack, over))
            for name, attack in attacks(fleet).items()
        ]
        for attacker in attackers:
            attacker.start()
        try:
            run = fleet.submit(place / "app", {"out": str(place / "server")})
            state = fleet.wait(run, 600)
        finally:
            over.set()
            for attacker in attackers:
                attacker.join()
        answers["with the secret"] = Counter([acquire(fleet, fleet.port, fleet.directory / "superexec.secret")])
        grown = peak_memory(fleet) - memory
    return {"state": state, "answers": answers, "grown": grown, "out": place / "server", "left": fleet.processes()}


def attacks(fleet):
    """What each attacker does again and again, by name."""
    outside, wrong = fleet.gateway_port, fleet.directory / "wrong.secret"
    wrong.write_bytes(b"x" * 32)
    return {
        "hijack from outside": lambda: acquire(fleet, outside),
        "control from outside": lambda: control(fleet, outside),
        "600 MB from outside": lambda: huge(fleet, outside),
        "slow from outside": lambda: slow(fleet, outside),
        "flood from outside": lambda: flood(fleet, outside),
        "hijack on the server": lambda: acquire(fleet, fleet.port),
        "hijack with another secret": lambda: acquire(fleet, fleet.port, wrong),
        "hijack on a node": lambda: acquire(fleet, fleet.node_ports[0], plain=True),
    }


def keep_trying(answers, attack, over):
    """Count the answers to an attack that is made twice a second, at most a thousand times."""
    for _ in range(1000):
        if over.wait(0.5):
            return
        try:
            answers[attack()] += 1
        except (httpx.TransportError, OSError) as error:
            answers[type(error).__name__] += 1


def acquire(fleet, port, secret=None, plain=False):
    """The status of a request for the task of a ServerApp or ClientApp, as Flower's own SuperExec makes it."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    signed = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    if secret:
        verb = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        signed.append(SuperExecAuthHttpInterceptor(master_secret=secret.read_bytes(), protected_methods=verb))
    authority = None if plain else certificate(fleet).read_bytes()
    client = RuntimeHttpClient.from_server_address(f"127.0.0.1:{port}", plain, authority, signed)
    with contextlib.closing(client):
        try:
            client.AcquireTask(AcquireTaskRequest(supported_task_types=TASKS))
        except httpx.HTTPStatusError as error:
            return error.response.status_code
    return 200


def control(fleet, port):
    """The status of a list of runs, as the operator's command line asks for it."""
    from flwr.proto.control_pb2 import ListRunsRequest
    from flwr.supercore.control import ControlHttpClient

    client = ControlHttpClient.from_server_address(f"127.0.0.1:{port}", False, certificate(fleet).read_bytes(), ())
    with contextlib.closing(client):
        try:
            client.ListRuns(ListRunsRequest())
        except httpx.HTTPStatusError as error:
            return error.response.status_code
    return 200


def huge(fleet, port):
    """The status of a body of 600 MB, which is sent for as long as the other side listens."""
    with stream(fleet, port) as connection:
        connection.sendall(head(HUGE))
        piece = bytes(1 << 20)
        with contextlib.suppress(OSError):
            for _ in range(HUGE // len(piece)):
                connection.sendall(piece)
                connection.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    return int(connection.recv(100).split()[1])
                connection.settimeout(10.0)
        return int(connection.recv(100).split()[1])


def slow(fleet, port):
    """How a request ends whose body stops coming: the status, or that the connection was closed."""
    with stream(fleet, port) as connection:
        connection.settimeout(30.0)
        connection.sendall(head(1000) + b"x" * 5)
        answer = connection.recv(100)
        return int(answer.split()[1]) if answer else "closed"


def flood(fleet, port):
    """How many of 1500 connections from an address, which begin a handshake and say no more, are held open."""
    with contextlib.ExitStack() as held:
        opened = []
        for _ in range(1500):
            opened.append(held.enter_context(socket.create_connection(("127.0.0.1", port), 10, ("127.0.0.2", 0))))
            with contextlib.suppress(OSError):
                opened[-1].sendall(b"\x16\x03\x01")
        time.sleep(5.0)
        return "held" if sum(map(is_open, opened)) > 500 else "closed"


def is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def head(length):
    return (
        "POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/protobuf\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def stream(fleet, port):
    context = ssl.create_default_context(cafile=certificate(fleet))
    raw = socket.create_connection(("127.0.0.1", port), timeout=10)
    return context.wrap_socket(raw, server_hostname="localhost")


def certificate(fleet):
    return fleet.directory / "certificates" / "ca.crt"


def peak_memory(fleet):
    """The most bytes that the SuperLink has had in memory."""
    (line,) = (
        line
        for line in Path(f"/proc/{fleet.superlink.pid}/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) << 10


def test_training_goes_on_under_attack(attacked):
    assert attacked["state"] == "finished"
    rounds = [one for one in read_events(attacked["out"]) if one["event"] == "round"]
    assert [(one["usable"], one["refused"]) for one in rounds] == [(CLIENTS, {})] * ROUNDS
    assert attacked["left"] == []


@pytest.mark.parametrize(
    ("attack", "answer"),
    [
        ("hijack from outside", {404, 503}), ("control from outside", {404, 503}), ("600 MB from outside", {413, 503}),
        ("slow from outside", {408, 503, "closed"}), ("flood from outside", {"closed"}),
        ("hijack on the server", {401}), ("hijack with another secret", {401}), ("hijack on a node", {401}),
    ],
)  # fmt: skip
def test_an_attack_is_refused_every_time(attacked, attack, answer):
    answers = attacked["answers"][attack]
    assert sum(answers.values()) > (10 if attack not in ("slow from outside", "flood from outside") else 2)
    assert set(answers) <= answer


def test_the_attack_works_for_who_has_the_secret(attacked):
    assert attacked["answers"]["with the secret"] == {200: 1}


def test_huge_and_slow_requests_take_no_memory_of_the_superlink(attacked):
    assert sum(attacked["answers"]["slow from outside"].values()) > 1
    assert attacked["grown"] < 100 << 20


def test_the_secret_is_its_owners_alone(attacked):
    secret = attacked["out"].parent / "fleet" / "superexec.secret"
    assert os.stat(secret).st_mode & 0o777 == 0o600
    assert len(secret.read_bytes()) == 32
