"""Node keys of a federation: which of them a SuperLink knows, how a client gets a new one, and how one is revoked.

    DIR/client-0.pub        the public key of client 0 that is registered
    DIR/client-0            its private key, if it was made here; better, the client keeps it and sends the .pub
    DIR/client-0.new[.pub]  the next pair, if it is made here, until the old key is unregistered

A rotation registers the new key, binds the client to it in `nodes.json` of the run, and only then unregisters the old
one. Each step asks the SuperLink what is done already, so a rotation that stopped anywhere can be repeated.

Flower's command line shows neither the keys nor the names of nodes, so its control API is asked, as the command line
does it. It never registers a key again that was unregistered.
"""

import contextlib
import hashlib
import io
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from priory.core.errors import UsageError, explain_os_errors
from priory.core.files import write_atomically
from priory.deploy.roster import Roster
from priory.deploy.tls import write_node_key

GONE = "unregistered"  # Flower's status of a node whose key was taken away
NAME = re.compile(r"client-(0|[1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Node:
    """A node as a SuperLink knows it.

    Attributes:
        id: Flower's number for its key.
        name: Given when it was registered; may be empty.
        status: "registered", "online", "offline", or "unregistered" for good.
        key: Its public key, in PEM format.
    """

    id: int
    name: str
    status: str
    key: bytes


def rotate(
    directory: Path, name: str, superlink: "SuperLink", public: Path | None = None, roster: Roster | None = None
) -> Iterator[str]:
    """Give a client a new key, and yield a line after each step.

    Args:
        name: Of its files, "client-0" for client 0.
        public: The new public key; by default a new pair is made.
        roster: Of a run that has begun.
    """
    client, draft = client_of(name), directory / f"{name}.new"
    old, nodes = read_public(directory / f"{name}.pub"), {one.key: one for one in superlink.nodes()}
    public = public or _pair(draft)
    new = read_public(public)
    retired = [one for one in (old, *_drafted(draft)) if one != new]
    for path in directory.glob("client-*.pub"):
        if NAME.fullmatch(path.stem) and path.stem != name and read_public(path) == new:
            raise UsageError(f"{public} is the key of {path.stem}, and no two clients share one; give another.")
    known = nodes.get(new)
    if known is not None and known.status == GONE:
        raise UsageError(
            f"{public} was unregistered as node {known.id}, and Flower accepts no key twice; make another key."
        )
    if roster is not None:
        _check_bound(roster, client, [new, *retired], nodes)

    node = superlink.register(new, name) if known is None else known.id
    yield f"{name}: {fingerprint(new)} is registered as node {node}"
    if roster is not None:
        roster.rebind(client, node)
        yield f"client {client} is bound to node {node} in {roster.path}"
    yield from _unregister(superlink, [nodes[key] for key in retired if key in nodes])
    yield from _settle(directory / name, draft, new, changed=old != new)


def revoke(directory: Path, name: str, superlink: "SuperLink") -> Iterator[str]:
    """Unregister the key of a client, and yield a line after each step.

    A run that has begun keeps the client bound to this key's node, so that no other key takes its place by itself.
    """
    client_of(name)
    draft = directory / f"{name}.new"
    keys = [read_public(directory / f"{name}.pub"), *_drafted(draft)]
    found = [one for one in superlink.nodes() if one.key in keys]
    if not found:
        raise UsageError(
            f"{directory / f'{name}.pub'} is not registered with superlink={superlink.name!r}, so there is nothing to "
            f"revoke; `priory flower keys list {directory} --superlink {superlink.name}` shows what is."
        )
    yield from _unregister(superlink, found)
    for half in (_public(draft), draft):  # a rotation to it is over; a private half alone is never registered
        half.unlink(missing_ok=True)


def client_of(name: str) -> int:
    """Return the number of the client in the name of its key."""
    match = NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"node={name!r} is not the name of a client's key; give client-0 for client 0.")
    return int(match[1])


def read_public(path: Path) -> bytes:
    """Read a .pub file, and return the key in PEM format, as Flower compares them."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    remedy = "; put the public key there that is registered for the client, or name another file"
    with explain_os_errors(f"{path} cannot be read", remedy):
        raw = path.read_bytes()
    try:
        key = load_ssh_public_key(raw)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(
            f"{path} holds no public key that Flower accepts; make a pair with `ssh-keygen -t ecdsa -b 384`, and give "
            "the file that ends in .pub."
        ) from None
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: bytes) -> str:
    """Return the fingerprint of a public key as `ssh-keygen -l` shows it."""
    return "SHA256:" + b64encode(hashlib.sha256(b64decode(_line(key).split()[1])).digest()).decode().rstrip("=")


def _line(key: bytes) -> bytes:
    """Return a public key as a line of a .pub file."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

    return load_pem_public_key(key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def _pair(draft: Path) -> Path:
    """Return the public half of the next pair, which is made unless an earlier rotation has made it."""
    if not _public(draft).exists():
        draft.unlink(missing_ok=True)  # a half that was never registered
        write_node_key(draft)
    return _public(draft)


def _drafted(draft: Path) -> list[bytes]:
    """Return the key of the next pair if there is one; it may be registered."""
    return [read_public(_public(draft))] if _public(draft).exists() else []


def _public(private: Path) -> Path:
    return private.with_name(f"{private.name}.pub")


def _check_bound(roster: Roster, client: int, keys: list[bytes], nodes: dict[bytes, Node]) -> None:
    """Raise if a run knows the client by a registered key that is not one of these, or another client by one."""
    active = {one.id: one.key in keys for one in nodes.values() if one.status != GONE}
    for other, node in roster.bound.items():
        if node in active and active[node] != (other == client):
            whose = "one of these keys" if other != client else "neither the old nor the new one"
            raise UsageError(
                f"Client {other} is bound to node {node} in {roster.path}, whose key is {whose}; correct the .pub file "
                f"of client {client}, or name the directory of another run."
            )


def _unregister(superlink: "SuperLink", nodes: list[Node]) -> Iterator[str]:
    for one in nodes:
        if one.status != GONE:
            superlink.unregister(one.id)
        yield f"{fingerprint(one.key)} (node {one.id}) is unregistered, and turned away from now on"


def _settle(private: Path, draft: Path, new: bytes, changed: bool) -> Iterator[str]:
    """Put the new key in the place of the old one; the public half comes last, since it tells what is registered."""
    if _drafted(draft) == [new]:
        if draft.exists():
            draft.replace(private)
        _public(draft).replace(_public(private))
        yield f"{private} and {_public(private)} are the new pair"
        return
    for stale in (_public(draft), draft, *([private] if changed else [])):
        if stale.exists():
            stale.unlink()
            yield f"{stale} is deleted, since its key is not accepted any more"
    if changed:
        write_atomically(_public(private), _line(new))
        yield f"{_public(private)} is the new public key"


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink by its name in Flower's config.toml."""

    name: str

    def nodes(self) -> list[Node]:
        """Return all nodes, those that are unregistered too."""
        found = self._call("ListNodes").nodes_info
        return [Node(one.node_id, one.name, one.status, bytes(one.public_key)) for one in found]

    def register(self, key: bytes, name: str) -> int:
        """Register a public key that was never registered before; return the number of its node."""
        return int(self._call("RegisterNode", public_key=key, name=name).node_id)

    def unregister(self, node: int) -> None:
        """Turn a node away from now on."""
        self._call("UnregisterNode", node_id=node)

    def _call(self, verb: str, /, **fields: bytes | int | str) -> Any:
        """Return the answer to a request of Flower's control API."""
        with self._client() as client:
            from flwr.proto import control_pb2

            return getattr(client, verb)(getattr(control_pb2, f"{verb}Request")(**fields))

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """Connect as `flwr` does; whatever goes wrong becomes one sentence, and what Flower prints is not shown."""
        try:
            import click
            from flwr.cli import utils
            from flwr.cli.flower_config import read_superlink_connection
        except ImportError:
            raise UsageError(
                f"superlink={self.name!r} needs Flower, which is not installed; pip install 'priory[flower]' brings it."
            ) from None
        client: Any = None
        try:
            with contextlib.redirect_stdout(io.StringIO()), utils.flwr_cli_exc_handler():
                client = utils.init_http_client_from_connection(read_superlink_connection(self.name))
                yield client
        except (click.ClickException, click.exceptions.Exit, OSError, ValueError) as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise UsageError(
                f"superlink={self.name!r} could not be used ({said}); check its entry in config.toml of FLWR_HOME, and "
                "that the SuperLink is running."
            ) from None
        finally:
            if client is not None:
                client.close()
