"""The reports to the operator of a deployed federation: a log of events, and a file with its status.

events.jsonl   a line for each event: time, event, and what belongs to it
status.json    its status now, replaced at every step; `priory flower status` reads it
"""

import json
import logging
import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from priory.core.errors import UsageError, explain_os_errors
from priory.core.files import write_atomically
from priory.core.reading import JsonDict, parse_json, read_bytes
from priory.core.text import one_line

EVENTS, STATUS = "events.jsonl", "status.json"
Phase = Literal["waiting", "asking", "aggregating", "evaluating", "finished", "failed"]
RUNNING = ("waiting", "asking", "aggregating", "evaluating")
LOG = logging.getLogger("priory")


@dataclass
class Journal:
    """The log and the status of one run."""

    directory: Path
    status: JsonDict = field(default_factory=dict)

    def tell(self, event: str, **about: Any) -> None:
        """Log an event; a log that cannot be written stops no federation."""
        line = {"time": now(), "event": event, **about}
        LOG.info("%s %s", event, one_line(json.dumps(about, ensure_ascii=False)))
        try:
            with (self.directory / EVENTS).open("a") as handle:
                handle.write(json.dumps(line) + "\n")
        except OSError as error:
            LOG.error("%s cannot be written (%s)", EVENTS, error.strerror)

    def stand(self, phase: Phase, **about: Any) -> None:
        """Write the status of the run."""
        self.status |= {"phase": phase, "pid": os.getpid(), "updated": now(), **about}
        try:
            write_atomically(self.directory / STATUS, json.dumps(self.status, indent=1) + "\n")
        except OSError as error:
            LOG.error("%s cannot be written (%s)", STATUS, error.strerror)


def read_status(directory: Path) -> JsonDict:
    """Return the status of a run, with `alive`: whether its server is at work on this machine."""
    path = directory / STATUS
    with explain_os_errors(f"{path} cannot be read", "; name the directory that the server writes to (`out`)"):
        raw = read_bytes(path)
    try:
        status = parse_json(raw)
        if not (isinstance(status, dict) and isinstance(status.get("phase"), str) and isinstance(status["pid"], int)):
            raise ValueError
    except (ValueError, KeyError):
        raise UsageError(f"{path} is damaged; the next step of a running server replaces it.") from None
    return status | {"alive": status["phase"] in RUNNING and _lives(status["pid"])}


def read_events(directory: Path) -> list[JsonDict]:
    """Return the events so far; a line that was cut short is left out."""
    path = directory / EVENTS
    found = []
    for line in read_bytes(path).splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return [line for line in found if isinstance(line, dict) and isinstance(line.get("event"), str)]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def now() -> str:
    """Return the time in UTC, as logs have it."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
