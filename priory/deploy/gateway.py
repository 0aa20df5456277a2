"""A gateway in front of a SuperLink: nginx admits requests of nodes and nothing else, within bounds.

A SuperLink serves nodes (`/v1/fleet/`), the operator (`/v1/control/`) and its ServerApp (`/v1/runtime/`) on one port,
and authenticates nodes alone. So it listens on loopback, and nginx passes `/v1/fleet/` on: over TLS 1.3 outside and TLS
again inside, with a body limit from the app's payload, and limits on connections, requests and slow senders.

Connections are counted per address before TLS, by nginx's stream module, which hands them on to its HTTP server on a
port of loopback, the one after the SuperLink's.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jax

from priory.core.errors import UsageError, explain_os_errors
from priory.core.files import write_atomically
from priory.core.trees import path_of
from priory.deploy import wire
from priory.deploy.charter import Charter
from priory.deploy.client import tallies_like
from priory.deploy.tls import check_certificates

CONFIG = "nginx.conf"
ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):(\d{1,5})")
PLAIN = re.compile(r"[\w./+@~-]+")  # what nginx reads as it stands
CHUNK = 5 << 20  # bytes; Flower sends an array in pieces of at most so many, each in a request of its own
FRAME = 512  # bytes that Flower adds to a piece, and to the list of all pieces for each of them, names apart
SPARE = 64 << 10  # bytes
RATE = 100  # requests per second that an address may go on making; a node at rest makes less than one
STEADY = 20  # requests for a message besides its pieces
CONNECTIONS = 16384  # of all addresses; one that is admitted takes four, two of them before TLS
MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")  # of Debian


@dataclass(frozen=True)
class Traffic:
    """What nodes of an app send.

    Attributes:
        body: Bytes of the largest request.
        requests: Requests for one message and its reply.
        nodes: How many nodes there are.
    """

    body: int
    requests: int
    nodes: int


def traffic_of(charter: Charter) -> Traffic:
    """Return the bounds of what a node sends, from the shapes of messages and scores."""
    down = {"down": charter.contact().down}
    largest, pieces, names = 0, 0, 0
    for tree in (charter.uplink, tallies_like(charter), down):
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        sizes = [leaf.size * leaf.dtype.itemsize + wire.HEADER_BYTES for _, leaf in leaves]
        pieces = max(pieces, sum(1 + -(-size // CHUNK) for size in sizes))
        if tree is not down:  # a broadcast is an answer, whose size nginx does not bound
            largest = max([largest, *sizes])
            names = max(names, sum(len(path_of(path).encode()) for path, _ in leaves))
    body = max(min(largest, CHUNK) + FRAME, 2 * names + FRAME * pieces) + SPARE
    return Traffic(body, 2 * pieces + STEADY, charter.question.num_clients)


def write_gateway(
    directory: Path,
    traffic: Traffic,
    certificates: Path,
    listen: str,
    superlink: str,
    per_address: int = 4,
    inside: int | None = None,
) -> Path:
    """Write a directory from which nginx serves, and return the path of its configuration.

    Args:
        traffic: What it admits.
        certificates: Directory with ca.crt, server.pem and server.key, which nginx shows outside.
        listen: Address and port for nodes.
        superlink: Address and port of the SuperLink.
        per_address: Nodes that may share one address, as behind a router.
        inside: Port of loopback that the gateway uses itself; the one after the SuperLink's by default.
    """
    own = inside or _port("superlink", superlink, most=65534) + 1
    if _port("listen", listen) == own:
        raise UsageError(f"listen={listen!r} has port {own}, which the gateway needs on loopback; choose another.")
    if per_address < 1:
        raise UsageError(f"per-address={per_address} must be 1 or more.")
    for place in (directory.resolve(), certificates.resolve()):
        if PLAIN.fullmatch(str(place)) is None:
            raise UsageError(
                f"{place} cannot be written into nginx's configuration; use a path of letters, digits and ./+@~_-."
            )
    check_certificates(certificates)
    connections = 8 + 8 * per_address
    words = {
        "MODULE": _load_stream(),
        "DIRECTORY": directory.resolve(),
        "CERTIFICATES": certificates.resolve(),
        "LISTEN": listen,
        "SUPERLINK": superlink,
        "PER_ADDRESS": per_address,
        "INSIDE": f"127.0.0.1:{own}",
        "ADDRESS_CONNECTIONS": connections,
        "ADDRESS_SOCKETS": 4 * connections,
        "CONNECTIONS": (most := max(CONNECTIONS, 64 * traffic.nodes)),
        "FILES": most + 64,
        "RATE": RATE,
        "BURST": per_address * traffic.requests,
        "BODY": traffic.body,
    }
    template = (resources.files("priory.deploy") / "template" / f"{CONFIG}.in").read_text()
    text = re.sub(r"@([A-Z_]+)@", lambda match: str(words[match[1]]), template)
    with explain_os_errors(f"{directory} cannot be written", "; choose a directory that can"):
        for place in (directory, directory / "temporary"):
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o711)  # nginx started by root works as another user, who passes through
        for log in ("access.log", "error.log"):
            (directory / log).touch(mode=0o600)  # they reveal who took part in a round
        write_atomically(directory / CONFIG, text)
    return directory / CONFIG


def find_nginx() -> str | None:
    """Return the path of an nginx with the stream module, or None.

    A user's PATH often lacks the folders of system programs.
    """
    path = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    return path if path is not None and (MODULE.exists() or _has_stream(path)) else None


def _load_stream() -> str:
    """Return the line that loads the stream module, empty where nginx has it without."""
    nginx = find_nginx()
    return "" if nginx is not None and _has_stream(nginx) else f"load_module {MODULE};"


def _has_stream(nginx: str) -> bool:
    """Return whether nginx was built with the stream module inside."""
    built = subprocess.run([nginx, "-V"], capture_output=True, text=True, check=False).stderr
    return "--with-stream" in built.split()


def _port(name: str, address: str, most: int = 65535) -> int:
    """Return the port of an address; raise unless it is one that nginx can use."""
    match = ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match[2]) <= most:
        raise UsageError(f"{name}={address!r} is not an address with a port up to {most}; write it like 0.0.0.0:8443.")
    return int(match[2])
