"""`priory flower hash`: the SHA-256 of an app, for an operator and a site to compare."""

from collections.abc import Sequence
from pathlib import Path

from priory import report
from priory.cli import flags
from priory.cli.flags import Flag
from priory.cli.flower import common
from priory.deploy.app import package_of
from priory.deploy.app_hash import written_hash

TEXT = (
    "Print the SHA-256 of an app. Every node logs the same number for every request (`priory flower log show`), so the "
    "operator and a site can check that the app they agreed on is the one that runs. It changes with every file that "
    "`flwr run` sends."
)
DIRECTORY = Flag("directory", (), str, flags.REQUIRED, "Directory of the app.", placed="DIR")


def hash(argv: Sequence[str]) -> int:
    """Return the exit code of `priory flower hash`."""
    directory = Path(common.parse("hash", argv, [DIRECTORY], TEXT)["directory"])
    package_of(directory)
    report.say(written_hash(directory))
    return 0
