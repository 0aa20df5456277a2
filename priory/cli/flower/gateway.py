"""`priory flower gateway`: a configuration for nginx, which stands between a SuperLink and the network."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from priory import report
from priory.cli import flags, start
from priory.cli.flags import Flag
from priory.cli.flower import common
from priory.cli.run import TRUST
from priory.deploy import charter as charters
from priory.deploy.app import package_of
from priory.deploy.gateway import CONFIG, RATE, find_nginx, traffic_of, write_gateway

TEXT = (
    "Write a configuration for nginx that admits requests of nodes (/v1/fleet/) over TLS 1.3 and passes them to a "
    "SuperLink on this machine, with limits on their size, number and duration that follow from the app. The operator "
    "and the ServerApp use the SuperLink's own port, which must not be reachable from other machines."
)
DIRECTORY = Flag("directory", (), str, flags.REQUIRED, "Directory for nginx's files.", placed="DIR")
APP = Flag("app", (), str, flags.REQUIRED, "Directory of the app, whose messages set the limits.")
KEYS = Flag("keys", (), str, flags.REQUIRED, "Directory with ca.crt, server.pem and server.key.")
LISTEN = Flag("listen", (), str, "0.0.0.0:8443", "Address and port that nodes connect to.")
SUPERLINK = Flag("superlink", (), str, "127.0.0.1:8000", "Address and port of the SuperLink.")
PER_ADDRESS = Flag("per_address", (), int, 4, "Nodes that may share one address, as behind a router.")


def gateway(argv: Sequence[str]) -> int:
    """Return the exit code of `priory flower gateway`."""
    values = common.parse("gateway", argv, [DIRECTORY, APP, KEYS, LISTEN, SUPERLINK, PER_ADDRESS, TRUST], TEXT)
    if values["trust_code"]:
        start.import_from_here()
    directory = Path(values["directory"])
    charter = charters.load(package_of(Path(values["app"])), trust_code=values["trust_code"])
    traffic, listen, superlink = traffic_of(charter), values["listen"], values["superlink"]
    write_gateway(directory, traffic, Path(values["keys"]), listen, superlink, values["per_address"])
    command = f"nginx -p {shlex.quote(str(directory))} -c {CONFIG}"
    lines = [
        f"{directory / CONFIG}: requests of nodes on {listen} go to the SuperLink on {superlink}, and no others",
        f"limits: {traffic.body} bytes per request, from the messages of {charter.name}; per address "
        f"{values['per_address']} nodes and {RATE} requests per second",
        f"start:  {command}",
        f"reload: {command} -s reload   (after a new app or new certificates, and a new configuration for the app)",
    ]
    if find_nginx() is None:
        lines.append(
            "nginx with its stream module is not installed on this machine; install it first (apt install nginx-light "
            "libnginx-mod-stream)"
        )
    report.say(*lines)
    return 0
