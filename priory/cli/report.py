"""`priory report`: what runs came to, in one HTML file that opens anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from priory import report
from priory.cli import flags, start
from priory.cli.flags import Flag
from priory.cli.run import TRUST, Output, recorded_devices, write_report
from priory.core.errors import UsageError
from priory.report.records import find
from priory.store import RunDirectory

TEXT = (
    "Write one HTML file on finished runs, side by side: scores with standard errors, convergence, calibration, "
    "clients, what the models do not know, cost and settings. It needs no network when it is opened. Uncertainty that "
    "was not measured yet is measured first, from the checkpoint of the run, and kept there."
)
RUNS = Flag(
    "directory",
    (),
    tuple[str, ...],
    flags.REQUIRED,
    "Run directories, or directories that hold some, such as that of a comparison.",
    placed="DIR [DIR ...]",
)
NAME = "report.html"


@dataclass(frozen=True)
class Options:
    """What is written.

    Attributes:
        out: The file; by default report.html in the directory, or here for several directories.
        ood: Foreign inputs that the models should be unsure of: a data set, a .npz file with x, or a .csv file.
    """

    out: str | None = None
    ood: str | None = None


def report_command(argv: Sequence[str]) -> int:
    """The exit code of `priory report`."""
    devices = flags.find(Output(), "devices", "report")
    groups = {
        "runs": flags.group("runs", "", [RUNS]),
        "report": flags.group("report", "", flags.flags_of(Options())),
        "output": flags.group("output", "", [devices, TRUST]),
    }
    values = flags.parse(groups, argv, prog="priory report", text=TEXT)
    places, chosen = values["runs"]["directory"], Options(**values["report"])
    if not places:
        raise UsageError("There is no run to report on; name one or more run directories.")
    report.check_drawing()
    found, _ = find(places)
    trust = values["output"]["trust_code"]
    if trust:
        start.import_from_here()
    start.start_jax(values["output"]["devices"], recorded_devices(RunDirectory(found[0]).manifest()))
    out = Path(chosen.out) if chosen.out else _default(places)
    write_report(places, out, ood=chosen.ood, trust_code=trust)
    return 0


def _default(places: Sequence[str]) -> Path:
    if len(places) > 1:
        return Path(NAME)
    place = Path(places[0])
    return (place.parent if place.name == "manifest.toml" else place) / NAME
