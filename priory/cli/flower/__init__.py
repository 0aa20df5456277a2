"""`priory flower`: a federation on a real network, its app, its keys, its state."""

from collections.abc import Sequence

from priory.cli.app import Commands, dispatch, imported

TEXTS = {
    "schema": "draft a file that lists what an app reveals about the data, for you to review",
    "init": "write a Flower app that trains a method, to read, change and run with `flwr run`",
    "hash": "print the SHA-256 of an app, which every node logs",
    "up": "start a whole federation on this machine, with TLS and keys, run it and take it down",
    "keys": "make, list, renew and revoke the keys of a server and its nodes",
    "gateway": "write a configuration for nginx that admits requests of nodes alone",
    "status": "show the status of a run's server",
    "log": "check the log of what a client was asked and sent, and show its last entries",
    "budget": "show what a client's answers under differential privacy cost, and set the total it allows",
    "forget": "delete what a client keeps of its runs",
}
COMMANDS: Commands = {name: (text, imported(f"flower.{name}:{name}")) for name, text in TEXTS.items()}
ABOUT = "Run a federation on Flower: on this machine, or over a network with TLS."
NOTES = """\
  priory flower up --nodes 4 --data heart_disease --rounds 5

`priory flower COMMAND --help` explains every flag; docs/deploy.md leads from nothing to two machines."""


def flower(argv: Sequence[str]) -> int:
    """Return the exit code of `priory flower`."""
    return dispatch(argv, COMMANDS, "priory flower", ABOUT, NOTES)
