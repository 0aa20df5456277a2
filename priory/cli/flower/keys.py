"""`priory flower keys`: certificates for a server and keys for its nodes, and their renewal."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from priory import report
from priory.cli import flags
from priory.cli.flags import Flag
from priory.cli.flower import common
from priory.cli.flower.common import JSON
from priory.core import memory
from priory.core.errors import UsageError
from priory.core.reading import JsonDict
from priory.deploy import node_keys, tls
from priory.deploy.node_keys import GONE, Node, SuperLink, fingerprint
from priory.deploy.roster import NODES, Roster

TEXT = (
    "Make what a TLS federation needs: an authority, a server certificate signed by it, and a key pair for each node. "
    "ca.crt goes to every node and to whoever submits runs; server.pem, server.key and superexec.secret to the server; "
    "each private key to its node and nowhere else; each .pub to whoever registers nodes. ca.key signs further "
    "servers: keep it offline. Later, `priory flower keys list DIR` shows what is there and what expires soon; `renew` "
    "replaces the server certificate or a node's key; `revoke` turns a node's key away. Each has its own --help."
)
LIST_TEXT = (
    "Show the certificates and node keys in a directory. The exit code is 1 if a certificate expires within "
    f"{tls.SOON} days or does not fit the others."
)
RENEW_TEXT = (
    "Replace the server certificate by one with the same hosts, signed by the same authority, so that nodes need "
    "nothing new; or, with --node, the key of a node: register the new key, bind the client to it, unregister the old "
    "key. A renewal that failed anywhere can be repeated."
)
REVOKE_TEXT = (
    "Unregister the key of a node, which is turned away at once and for good. A run that has begun keeps the client's "
    "place until `priory flower keys renew --node` gives the client a new key."
)
DIRECTORY = Flag("directory", (), str, flags.REQUIRED, "Directory that `priory flower keys` made.", placed="DIR")
SUPERLINK = Flag("superlink", (), str | None, None, "Name of the SuperLink in Flower's config.toml.")
NODE = Flag("node", (), str | None, None, "Name of a node's key, client-0 for client 0; the server's by default.")
KEY_BYTES = 2 * 4096  # a block on disk for each half of a pair
WARNED = 1


@dataclass(frozen=True)
class Options:
    """What is made.

    Attributes:
        nodes: How many node keys.
        host: Names and addresses under which the server is reached, localhost and 127.0.0.1 besides.
        days: How long the server certificate is valid; the authority lasts ten years.
    """

    nodes: int = 0
    host: tuple[str, ...] = ()
    days: int = tls.DAYS


def keys(argv: Sequence[str]) -> int:
    """Return the exit code of `priory flower keys`."""
    if argv and argv[0] in COMMANDS:  # a directory of that name is ./list
        return COMMANDS[argv[0]](argv[1:])
    directory = Flag("directory", (), str, flags.REQUIRED, "New directory for them.", placed="DIR")
    values = common.parse("keys", argv, [directory, *flags.flags_of(Options())], TEXT)
    for name, least in (("nodes", 0), ("days", 1)):
        if values[name] < least:
            raise UsageError(f"{name}={values[name]} is too small; choose {least} or more.")
    place = Path(values["directory"])
    _check_room(place, values["nodes"])
    tls.write_authority(place, hosts=values["host"], days=values["days"])
    tls.write_secret(place / tls.SECRET)
    for node in range(values["nodes"]):
        tls.write_node_key(place / f"client-{node}")
    report.say(f"{', '.join(sorted(path.name for path in place.iterdir()))} in {place}")
    return 0


def _check_room(place: Path, nodes: int) -> None:
    """Raise if the keys of so many nodes do not fit on the disk."""
    above = next(parent for parent in place.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(above).free
    if nodes * KEY_BYTES > free:
        raise UsageError(
            f"nodes={nodes} needs {memory.shown(nodes * KEY_BYTES)} of disk, and {above} has {memory.shown(free)}; "
            "choose fewer nodes, or another disk."
        )


def _list(argv: Sequence[str]) -> int:
    values = common.parse("keys list", argv, [DIRECTORY, SUPERLINK, JSON], LIST_TEXT)
    place = Path(values["directory"])
    certificates, warnings = tls.certificates_in(place), _warnings(place)
    publics = {path.stem: node_keys.read_public(path) for path in sorted(place.glob("*.pub"))}
    if not certificates and not publics:
        raise UsageError(f"{place} holds neither certificates nor public keys; name the directory that has them.")
    nodes = SuperLink(values["superlink"]).nodes() if values["superlink"] else None
    rows = _rows(publics, nodes)
    if values["json"]:
        table = [
            {"file": one.path.name, "until": one.until.isoformat(), "days": one.days(), "hosts": one.hosts}
            for one in certificates
        ]
        print(json.dumps({"certificates": table, "keys": rows, "warnings": warnings}))
        return WARNED if warnings else 0
    for one in certificates:
        report.say(f"{one.path.name:12}until {one.until:%Y-%m-%d}, {one.days()} days  {', '.join(one.hosts)}".rstrip())
    for row in rows:
        known = "" if nodes is None else f"  {row['status']}{', node ' + row['node'] if row['node'] else ''}"
        report.say(f"{row['name']:12}{row['fingerprint']}{known}")
    for warning in warnings:
        report.say(f"warning: {warning}")
    return WARNED if warnings else 0


def _renew(argv: Sequence[str]) -> int:
    options = [
        Flag("days", (), int | None, None, f"How long the server certificate is valid; {tls.DAYS} by default."),
        NODE,
        Flag("public", (), str | None, None, "The node's new public key; a new pair is made by default."),
        SUPERLINK,
        Flag("out", (), str | None, None, "The server's directory (`out`) of a run that has begun."),
    ]
    values = common.parse("keys renew", argv, [DIRECTORY, *options], RENEW_TEXT)
    place, name = Path(values["directory"]), values["node"]
    if name is None:
        for flag in ("public", "superlink", "out"):
            if values[flag] is not None:
                raise UsageError(f"{flag}={values[flag]!r} is for the key of a node; give --node client-0, say.")
        return _renew_server(place, tls.DAYS if values["days"] is None else values["days"])
    if values["days"] is not None:
        raise UsageError(f"days={values['days']} is for the server certificate, and node keys do not expire; drop it.")
    public = Path(values["public"]) if values["public"] else None
    roster = _roster(Path(values["out"])) if values["out"] else None
    superlink, client = _superlink(values), node_keys.client_of(name)
    for line in node_keys.rotate(place, name, superlink, public, roster):
        report.say(line)
    if roster is None:
        report.say(
            f"a run that has begun still expects the old key of client {client}; unless there is none, give it the new "
            f"one: priory flower keys renew {place} --node {name} --public {place / f'{name}.pub'} "
            f"--superlink {superlink.name} --out OUT"
        )
    if public is None:
        report.say(f"send {place / name} to client {client} over a secure channel, then delete it here")
    report.say(f"client {client} starts its SuperNode again with --auth-supernode-private-key and the new private key")
    return 0


def _renew_server(place: Path, days: int) -> int:
    tls.renew_server_certificate(place, days)
    (server,) = [one for one in tls.certificates_in(place) if one.path.name == "server.pem"]
    report.say(
        f"{server.path} and server.key are new, valid until {server.until:%Y-%m-%d} for {', '.join(server.hosts)}"
    )
    report.say("restart the SuperLink, and reload the proxy in front of it if that uses them; nodes need nothing new")
    for warning in _warnings(place):
        report.say(f"warning: {warning}")
    return 0


def _revoke(argv: Sequence[str]) -> int:
    values = common.parse("keys revoke", argv, [DIRECTORY, NODE, SUPERLINK], REVOKE_TEXT)
    place, name = Path(values["directory"]), values["node"]
    if name is None:
        raise UsageError(
            "node is missing, and only keys of nodes can be revoked; give --node client-0, say, or replace the server "
            f"certificate with `priory flower keys renew {place}`."
        )
    superlink = _superlink(values)
    for line in node_keys.revoke(place, name, superlink):
        report.say(line)
    report.say(
        f"a run that has begun keeps the place of client {node_keys.client_of(name)} for a new key: priory flower keys "
        f"renew {place} --node {name} --public NEW.pub --superlink {superlink.name} --out OUT"
    )
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"list": _list, "renew": _renew, "revoke": _revoke}


def _superlink(values: JsonDict) -> SuperLink:
    if not values["superlink"]:
        raise UsageError(
            f"node={values['node']!r} is registered with a SuperLink, and none is named; give --superlink NAME, as in "
            "Flower's config.toml."
        )
    return SuperLink(values["superlink"])


def _roster(out: Path) -> Roster:
    """Return the roster of a run, by the directory of its server or of `priory flower up`."""
    for place in (out, out / "server"):
        if (place / NODES).is_file():
            return Roster.open(place, authenticated=True)
    raise UsageError(
        f"out={str(out)!r} has no {NODES}, which a server writes when its first node comes; name the server's "
        "directory, or give no --out before the run."
    )


def _warnings(place: Path) -> list[str]:
    """Return warnings about certificates that expire soon, and about files that do not fit together."""
    certificates = tls.certificates_in(place)
    found = [warning for one in certificates if (warning := one.warning())]
    is_server = all((place / name).is_file() for name in ("ca.crt", "server.pem", "server.key"))
    if is_server and all(one.days() >= 0 for one in certificates):
        try:
            tls.check_certificates(place)
        except UsageError as error:
            found.append(str(error))
    return found


def _rows(publics: dict[str, bytes], nodes: list[Node] | None) -> list[JsonDict]:
    """Return a line for each key: those in the directory, then those that only the SuperLink knows."""
    known, rows = {one.key: one for one in nodes or ()}, []
    for name, key in publics.items():
        node, unknown = known.get(key), None if nodes is None else "not registered"
        about = {"node": None, "status": unknown} if node is None else {"node": str(node.id), "status": node.status}
        rows.append({"name": name, "fingerprint": fingerprint(key), **about})
    strangers = [one for one in nodes or () if one.key not in publics.values() and one.status != GONE]
    for one in strangers:
        status = f"{one.status}, with a key that is not in this directory"
        shown = fingerprint(one.key) if one.key.startswith(b"-----BEGIN") else "-"
        rows.append({"name": one.name or "-", "fingerprint": shown, "node": str(one.id), "status": status})
    return rows
