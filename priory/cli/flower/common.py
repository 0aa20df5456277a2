"""Flags that several commands of `priory flower` have, and how they are read."""

from collections.abc import Sequence
from pathlib import Path

from priory.cli import flags
from priory.cli.flags import Flag
from priory.core.errors import UsageError
from priory.core.reading import JsonDict
from priory.deploy.client_states import client_directory

STATE = Flag("directory", (), str, flags.REQUIRED, "The state directory of the node.", placed="DIR")
CLIENT = Flag("client", (), int, flags.REQUIRED, "Number of the client (partition-id of its node).")
JSON = Flag("json", (), bool, False, "Print one JSON object.")


def parse(command: str, argv: Sequence[str], wanted: Sequence[Flag], text: str) -> JsonDict:
    """Return the values of a command's flags."""
    title = command.split()[0]
    return flags.parse({title: flags.group(title, "", wanted)}, argv, f"priory flower {command}", text)[title]


def place_of(directory: str | Path, client: int) -> Path:
    """Return the directory of a client in the state directory of its node."""
    if client < 0:
        raise UsageError(f"client={client} must be 0 or more; give the partition-id of its node.")
    return client_directory(Path(directory), client)
