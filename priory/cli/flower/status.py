"""`priory flower status`: the status of a run's server, for people and for monitors."""

import json
from collections.abc import Sequence
from pathlib import Path

from priory import report
from priory.cli import flags
from priory.cli.flags import Flag
from priory.cli.flower import common
from priory.cli.flower.common import JSON
from priory.core.reading import JsonDict
from priory.deploy.journal import read_events, read_status

TEXT = "Show the status of a run's server. The exit code is 0 if it is at work or has finished, 1 if it failed or died."
DIRECTORY = Flag("directory", (), str, flags.REQUIRED, "The server's directory (`out`).", placed="DIR")
DEAD = 1


def status(argv: Sequence[str]) -> int:
    """Return the exit code of `priory flower status`."""
    values = common.parse("status", argv, [DIRECTORY, JSON], TEXT)
    directory = Path(values["directory"])
    if not (directory / "status.json").exists() and (directory / "server" / "status.json").exists():
        directory = directory / "server"  # of `priory flower up`
    told = read_status(directory)
    fine = told["alive"] or told["phase"] == "finished"
    if values["json"]:
        print(json.dumps(told))
    else:
        report.say(*lines_of(told, directory))
    return 0 if fine else DEAD


def lines_of(told: JsonDict, directory: Path) -> list[str]:
    """Return the status in words."""
    state = told["phase"] if told["alive"] or told["phase"] in ("finished", "failed") else f"died while {told['phase']}"
    found = [f"{told.get('method')} ({told.get('run')}): {state}, round {told.get('round')} of {told.get('rounds')}"]
    found.append(f"last heard of at {told.get('updated')}")
    if told.get("error"):
        found.append(f"error: {told['error']}")
    refused = [one for one in read_events(directory) if one.get("event") in ("refused", "turned away")]
    if refused:
        last = refused[-1]
        found.append(
            f"{len(refused)} replies or nodes refused, the last: {last.get('reason', '')} {last.get('sentence')}"
        )
    return found
