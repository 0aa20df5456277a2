"""The gateway admits requests of nodes alone: nginx itself, in front of a server that writes down what reaches it."""

import contextlib
import http.client
import http.server
import os
import socket
import ssl
import stat
import subprocess
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from priory import methods
from priory.core.errors import UsageError
from priory.deploy import wire
from priory.deploy.flower import to_records
from priory.deploy.gateway import CHUNK, RATE, Traffic, find_nginx, traffic_of, write_gateway
from priory.deploy.processes import take_ports
from priory.deploy.tls import write_authority
from tests.deploy.conftest import small_charter

NGINX = find_nginx()
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed, which .ci/run does")
BODY = 100_000
PULL = "/v1/fleet/pull-messages"


class Upstream(http.server.BaseHTTPRequestHandler):
    """Answers every request at once and writes it down."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer leaves in one piece; in two, the kernel would hold the second back for 40 ms

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.path, len(body)))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_GET = do_PUT = do_DELETE = do_OPTIONS = do_POST

    def log_message(self, *_):
        pass


class Gateway:
    """A running gateway: its port, the authority that its clients trust, and what came through."""

    def __init__(self, port, authority, seen):
        self.port, self.authority, self.seen = port, authority, seen

    def connect(self, timeout=10.0, address="127.0.0.1", **limits):
        """A TLS connection from an address of this machine."""
        context = ssl.create_default_context(cafile=self.authority)
        for name, value in limits.items():
            setattr(context, name, value)
        raw = socket.create_connection(("127.0.0.1", self.port), timeout, (address, 0))
        return context.wrap_socket(raw, server_hostname="localhost")

    def ask(self, path, body=b"", method="POST"):
        """The status of the answer to a request."""
        context = ssl.create_default_context(cafile=self.authority)
        connection = http.client.HTTPSConnection("localhost", self.port, context=context, timeout=10)
        with contextlib.closing(connection):
            connection.request(method, path, body)
            return connection.getresponse().status

    def send(self, raw, **how):
        """The status line of the answer to bytes as they are."""
        with self.connect(**how) as stream:
            stream.sendall(raw)
            return stream.recv(100).split(b"\r\n")[0].decode()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    place = tmp_path_factory.mktemp("gateway")
    certificates = place / "certificates"
    write_authority(certificates)
    inside, outside, own = take_ports(3)
    upstream = http.server.ThreadingHTTPServer(("127.0.0.1", inside), Upstream)
    upstream.seen, upstream.daemon_threads = [], True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    upstream.socket = context.wrap_socket(upstream.socket, server_side=True)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    addresses = f"127.0.0.1:{outside}", f"127.0.0.1:{inside}"
    traffic = Traffic(BODY, requests=50, nodes=2)
    write_gateway(place / "gateway", traffic, certificates, *addresses, per_address=2, inside=own)
    arguments = ["-p", str(place / "gateway"), "-c", "nginx.conf", "-g", "daemon off; user root;"]
    nginx = subprocess.Popen([NGINX, *arguments])
    made = Gateway(outside, certificates / "ca.crt", upstream.seen)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", outside), timeout=1).close()
                break
            time.sleep(0.05)
        yield made
    finally:
        nginx.terminate()
        nginx.wait()
        upstream.shutdown()
        upstream.server_close()


@pytest.fixture
def quiet(gateway):
    """The gateway with nothing seen, once its limits have let go of the test before."""
    time.sleep(0.2)
    gateway.seen.clear()
    return gateway


@needs_nginx
def test_a_request_of_a_node_arrives_whole(quiet):
    assert quiet.ask(PULL, b"x" * 5000) == 200
    assert quiet.seen == [(PULL, 5000)]


@needs_nginx
@pytest.mark.parametrize(
    "path",
    [
        "/v1/runtime/acquire-task", "/v1/control/start-run", "/v1/control/register-node", "/", "/docs", "/openapi.json",
        "/health", "/v1/fleet/", "/v1/fleet/../runtime/acquire-task", "/v1/fleet/%2e%2e/runtime/acquire-task",
        "/v1/fleet/..%2fruntime/acquire-task", "/v1/fleet/%252e%252e/runtime/acquire-task", "/v1/fleet//../control/x",
        "/v1/fleet/pull-messages/../../runtime/acquire-task", "/v1/fleet/pull-messages/x", "/V1/RUNTIME/acquire-task",
        "/v1/fleet/x;/../runtime/acquire-task", "/v1/fleet%2f..%2fcontrol%2fstart-run", "/v1/fleet/pull-messages%00x",
    ],
)  # fmt: skip
def test_nothing_else_reaches_the_superlink(quiet, path):
    assert quiet.ask(path) in (400, 403, 404)
    assert quiet.seen == []


@needs_nginx
def test_a_path_that_is_spelled_otherwise_arrives_as_it_was_matched(quiet):
    for path in ("/v1/runtime/..%2ffleet/pull-messages", "/v1/control/../fleet/pull-messages?x=/v1/control/"):
        assert quiet.ask(path) == 200
    assert [path for path, _ in quiet.seen] == [PULL, PULL]


@needs_nginx
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
def test_nodes_only_post(quiet, method):
    assert quiet.ask(PULL, method=method) in (403, 405)
    assert quiet.seen == []


@needs_nginx
def test_a_host_or_an_absolute_address_changes_nothing(quiet):
    asked = b"POST https://localhost/v1/runtime/acquire-task HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    assert " 404 " in quiet.send(asked)
    assert quiet.seen == []


@needs_nginx
def test_two_lengths_of_a_body_are_refused(quiet):
    smuggled = b"POST /v1/runtime/acquire-task HTTP/1.1\r\nHost: x\r\n\r\n"
    head = f"POST {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(smuggled)}\r\n".encode()
    assert " 400 " in quiet.send(head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled)
    assert quiet.seen == []


@needs_nginx
def test_a_body_of_600_mb_is_refused_before_it_is_sent(quiet):
    head = f"POST {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: {600 << 20}\r\n\r\n".encode()
    assert " 413 " in quiet.send(head)
    assert quiet.seen == []


@needs_nginx
@pytest.mark.parametrize(("size", "status"), [(BODY, 200), (BODY + 1, 413)])
def test_the_limit_is_the_largest_request_of_the_app(quiet, size, status):
    assert quiet.ask(PULL, b"x" * size) == status
    assert [length for _, length in quiet.seen] == ([BODY] if status == 200 else [])


@needs_nginx
def test_a_body_without_a_length_is_cut_at_the_limit(quiet):
    pieces = b"".join(b"%x\r\n" % 10_000 + b"x" * 10_000 + b"\r\n" for _ in range(11)) + b"0\r\n\r\n"
    head = f"POST {PULL} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert " 413 " in quiet.send(head + pieces)
    assert quiet.seen == []


@needs_nginx
def test_only_tls_1_3_is_spoken(quiet):
    with pytest.raises(ssl.SSLError):
        quiet.connect(maximum_version=ssl.TLSVersion.TLSv1_2)
    with quiet.connect() as stream:
        assert stream.version() == "TLSv1.3"


@needs_nginx
def test_an_address_has_so_many_connections_and_others_of_it_wait(quiet):
    request = f"POST {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345".encode()
    with contextlib.ExitStack() as held:
        streams = [held.enter_context(quiet.connect()) for _ in range(40)]  # 8 + 8 · per_address are 24
        for stream in streams:
            stream.sendall(request)
        time.sleep(0.3)
        refused = 0
        for stream in streams:
            stream.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                refused += b" 503 " in stream.recv(100)
        assert refused == 16
    assert quiet.seen == []  # nothing reaches the SuperLink before it is whole


@needs_nginx
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["silent", "the first bytes of a handshake"])
def test_an_address_that_opens_connections_leaves_room_for_others(quiet, sent):
    with contextlib.ExitStack() as held:
        for _ in range(1500):
            stream = held.enter_context(socket.create_connection(("127.0.0.1", quiet.port), timeout=5))
            with contextlib.suppress(OSError):  # those above the limit are closed again
                stream.sendall(sent)
        request = f"POST {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
        assert [quiet.send(request, address="127.0.0.2") for _ in range(20)] == ["HTTP/1.1 200 OK"] * 20
        # Above 4 · (8 + 8 · per_address) connections an address is closed out before TLS.
        with pytest.raises((ConnectionError, ssl.SSLError)):
            quiet.send(request)


@needs_nginx
@pytest.mark.slow  # waits for nginx to lose patience
def test_who_sends_too_slowly_is_cut_off(quiet):
    for sent in (f"POST {PULL} HTTP/1.1\r\nHost:", f"POST {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n1"):
        with quiet.connect(timeout=30.0) as stream:
            started = time.monotonic()
            stream.sendall(sent.encode())
            answer = stream.recv(100)
            assert answer == b"" or b" 408 " in answer
            assert time.monotonic() - started < 15
    assert quiet.seen == []


@needs_nginx
def test_more_requests_than_nodes_make_are_turned_away_and_may_come_again(quiet):
    request = f"POST {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
    num, burst, together, answers = 600, 2 * 50, 20, b""
    with quiet.connect() as stream:
        started = time.monotonic()
        for sent in range(together, num + 1, together):
            stream.sendall(request * together)
            while answers.count(b"HTTP/1.1 ") < sent:
                answers += stream.recv(1 << 16)
        allowed = burst + RATE * (time.monotonic() - started)
    assert allowed + 50 < num, "nothing was tried: so many requests took longer than the limit asks for"
    refused = answers.count(b"HTTP/1.1 503 ")
    assert num - allowed - 1 <= refused <= num - burst
    assert len(quiet.seen) == num - refused
    time.sleep(0.5)
    assert quiet.ask(PULL) == 200


@pytest.mark.parametrize("name", ["fedavg", "sfedbayes", "fedbnn"])
@pytest.mark.parametrize("model", ["mlp:4", "mlp:300,300"])
def test_the_limit_covers_every_request_that_flower_makes_of_a_message(name, model):
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.task_identity import TaskIdentity

    from priory.deploy.exchange import Reply

    charter = small_charter(methods.get(name)(), model=model)
    traffic = traffic_of(charter)
    arrays = wire.encode(_numbers(charter.uplink))
    config = {"kind": "train", "run": "r" * 100, "version": "v" * 20, "error": "e" * 300}
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 2**63
    message = Message(to_records(Reply(config, arrays, {f"figure {i}": 0.5 for i in range(30)})), 1, "train")
    objects = get_all_nested_objects(message)
    bodies = [len(one.deflate()) for one in objects.values()] + [len(get_object_tree(message).SerializeToString())]
    assert max(bodies) < traffic.body < max(bodies) + 200_000
    assert 2 * len(objects) < traffic.requests * 2


def _numbers(like):
    return jax.tree.map(lambda leaf: np.random.default_rng(0).normal(size=leaf.shape).astype(leaf.dtype), like)


def test_a_large_model_is_sent_in_pieces_and_the_limit_stops_growing():
    charter = small_charter(methods.get("fedavg")(), model="mlp:2000,2000")
    assert CHUNK < traffic_of(charter).body < CHUNK + 200_000


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"listen": "8443"}, "listen='8443' is not an address with a port"),
        ({"superlink": "127.0.0.1:99999"}, "superlink='127.0.0.1:99999' is not an address"),
        ({"per_address": 0}, "per-address=0 must be 1 or more"),
        ({"listen": "0.0.0.0:8001"}, "listen='0.0.0.0:8001' has port 8001, which the gateway needs on loopback"),
        ({"superlink": "127.0.0.1:65535"}, "is not an address with a port up to 65534"),
        ({"listen": "0.0.0.0:1; include /etc/passwd"}, "is not an address with a port"),
    ],
)
def test_what_nginx_could_not_serve_is_refused(tmp_path, changed, sentence):
    write_authority(tmp_path / "keys")
    asked = {"listen": "0.0.0.0:8443", "superlink": "127.0.0.1:8000", **changed}
    with pytest.raises(UsageError, match=sentence.replace("(", r"\(")):
        write_gateway(tmp_path / "gateway", Traffic(1, 1, 1), tmp_path / "keys", **asked)
    assert not (tmp_path / "gateway").exists()


def test_a_gateway_of_root_is_passed_through_by_its_workers_and_its_logs_are_closed(tmp_path):
    write_authority(tmp_path / "keys")
    place, before = tmp_path / "gateway", os.umask(0o077)
    try:
        write_gateway(place, Traffic(1, 1, 1), tmp_path / "keys", "0.0.0.0:8443", "127.0.0.1:8000")
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (place, *place.iterdir())}
    assert (modes[place], modes[place / "temporary"]) == (0o711, 0o711)
    assert (modes[place / "access.log"], modes[place / "error.log"]) == (0o600, 0o600)


def test_a_path_that_nginx_would_read_otherwise_is_refused(tmp_path):
    place = tmp_path / "with space;"
    write_authority(place)
    with pytest.raises(UsageError, match="cannot be written into nginx's configuration"):
        write_gateway(tmp_path / "gateway", Traffic(1, 1, 1), place, "0.0.0.0:8443", "127.0.0.1:8000")


def test_a_gateway_needs_certificates(tmp_path):
    with pytest.raises(UsageError, match=r"lacks ca\.crt"):
        write_gateway(tmp_path / "gateway", Traffic(1, 1, 1), tmp_path / "none", "0.0.0.0:8443", "127.0.0.1:8000")
    assert not Path(tmp_path / "gateway").exists()
