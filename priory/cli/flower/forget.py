"""`priory flower forget`: delete the states of a client on its own machine."""

from collections.abc import Sequence
from pathlib import Path

from priory import report
from priory.cli.flags import Flag
from priory.cli.flower import common
from priory.cli.flower.common import CLIENT, STATE
from priory.core.errors import UsageError
from priory.deploy import client_states

TEXT = (
    "Delete what a client keeps on this machine, of one run or of all: the states of its posterior, its personal "
    "models, and answers that it stored. What the server learned of it cannot be taken back, so what its answers cost "
    "(`priory flower budget`) and the log of what it sent (`priory flower log`) stay."
)
RUN = Flag("run", (), str | None, None, "Name of the run; all by default.")
YES = Flag("yes", (), bool, False, "Delete without asking.")


def forget(argv: Sequence[str]) -> int:
    """Return the exit code of `priory flower forget`."""
    values = common.parse("forget", argv, [STATE, CLIENT, RUN, YES], TEXT)
    directory, client, run = Path(values["directory"]), values["client"], values["run"]
    place = client_states.client_directory(directory, client) / (run or "")
    if not values["yes"] and place.is_dir():
        try:
            said = input(f"Delete {place} with all that is in it? [y/N] ")
        except EOFError:
            raise UsageError("Nobody answered, so nothing was deleted; give --yes to delete without asking.") from None
        if said.strip().lower() not in ("y", "yes"):
            report.console().print("nothing was deleted")
            return 0
    gone = client_states.forget(directory, client, run)
    report.say(f"{len(gone)} files of client {client} deleted")
    return 0
