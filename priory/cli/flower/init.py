"""`priory flower init`: a Flower app, written to be read and changed."""

from collections.abc import Sequence
from pathlib import Path

from priory import report
from priory.cli import flags
from priory.cli.flags import Flag
from priory.cli.flower import arguments
from priory.deploy.app import write_app
from priory.deploy.charter import METHOD

TEXT = (
    "Write a Flower app that trains a method: `flwr run` runs it in Flower's simulation and on a SuperLink. The data "
    "show what examples look like and how many clients there are; they are not in the app, and a node reads its own. "
    "With --schema that is stated by a file instead, and --data need not be given."
)
DIRECTORY = Flag("directory", (), str, flags.REQUIRED, "New directory of the app.", placed="DIR")
OUT = Flag("out", (), str | None, None, "The server's directory on the server; ~/priory-runs/NAME by default.")
AUTHENTICATED = Flag("authenticated", (), bool, False, "The SuperLink knows nodes by their keys.")


def init(argv: Sequence[str]) -> int:
    """Return the exit code of `priory flower init`."""
    wanted = arguments.parse("init", argv, [DIRECTORY, OUT, AUTHENTICATED], TEXT)
    directory = Path(wanted.rest["directory"])
    package = write_app(directory, wanted.charter, wanted.spec, wanted.rest["out"], wanted.rest["authenticated"])
    num = wanted.charter.question.num_clients
    simulated = [
        "run it in Flower's simulation (pip install 'priory[flower-simulation]'):",
        f"  flwr run {directory} local --stream --federation-config 'num-supernodes={num}'",
    ]
    lines = [
        f"{wanted.charter.name} for {num} clients on {wanted.charter.form.name}, in {directory}:",
        "  pyproject.toml            the app, and what --run-config may override",
        f"  {package.name + '/rows.py':26}where a node's rows come from: the function to change",
        f"  {package.name + '/manifest.toml':26}method and settings",
        *([f"  {f'{package.name}/{METHOD}':26}the code of the method"] if (package / METHOD).exists() else []),
        *(simulated if wanted.federation is not None else []),
        f"{'and' if wanted.federation is not None else 'run it'} on a SuperLink as docs/deploy.md says",
        arguments.hash_line(directory),
        f"  after a change: priory flower hash {directory}",
        *wanted.shared,
        *arguments.privacy_of(wanted.charter),
    ]
    report.say(*lines)
    return 0
