"""`priory flower keys`: certificates for a server and keys for its nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from priory import report
from priory.cli import flags
from priory.cli.flags import Flag
from priory.core.errors import UsageError
from priory.deploy.tls import write_authority, write_node_key

TEXT = (
    "Make what a TLS federation needs: an authority, a server certificate signed by it, and a key pair for each node. "
    "ca.crt goes to every node and to whoever submits runs; server.pem and server.key to the server; each private key "
    "to its node and nowhere else; each .pub to whoever registers nodes. ca.key signs further servers: keep it away."
)


@dataclass(frozen=True)
class Options:
    """What is made.

    Attributes:
        nodes: How many node keys.
        host: Names and addresses under which the server is reached, localhost and 127.0.0.1 besides.
        days: How long the certificates are valid.
    """

    nodes: int = 0
    host: tuple[str, ...] = ()
    days: int = 365


def keys(argv: Sequence[str]) -> int:
    """The exit code of `priory flower keys`."""
    directory = Flag("directory", (), str, flags.REQUIRED, "New directory for them.", placed="DIR")
    values = flags.parse(
        {"keys": flags.group("keys", "", [directory, *flags.flags_of(Options())])}, argv, "priory flower keys", TEXT
    )["keys"]
    for name, least in (("nodes", 0), ("days", 1)):
        if values[name] < least:
            raise UsageError(f"{name}={values[name]} is too small; choose {least} or more.")
    place = Path(values["directory"])
    write_authority(place, hosts=values["host"], days=values["days"])
    for node in range(values["nodes"]):
        write_node_key(place / f"client-{node}")
    files = ", ".join(sorted(path.name for path in place.iterdir()))
    report.console().print(f"{files} in {place}", markup=False, highlight=False, soft_wrap=True)
    return 0
