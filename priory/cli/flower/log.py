"""`priory flower log`: check the logs of a node, and show their last entries."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from priory import report
from priory.cli.flags import Flag
from priory.cli.flower import common
from priory.cli.flower.common import STATE
from priory.core.errors import UsageError
from priory.core.reading import JsonDict
from priory.core.text import one_line
from priory.deploy.client_states import client_directory
from priory.deploy.node_log import HASH, NAME, REPAIR, NodeLog, Verdict

USAGE = """usage: priory flower log verify DIR [--client N] [--head HASH]
       priory flower log show DIR [--client N] [--last N]

Check the log of what a client was asked and what it sent, or show its last entries. DIR is the state directory of a
node. `priory flower log COMMAND --help` explains every flag; docs/security.md says what the log cannot show."""
VERIFY_TEXT = (
    "Check that no line of a client's log was changed, removed, inserted or moved, and print the number of entries and "
    "the head, which is the hash of the last one. Note the head on another machine: with --head, a later check also "
    "finds lines that were cut off at the end, and a log that was written again from its start. The exit code is 1 if "
    "a log is not whole."
)
SHOW_TEXT = "Show the last entries of a client's log, one line for each request."
CLIENT = Flag("client", (), int | None, None, "Number of the client (partition-id); all that have a log by default.")
HEAD = Flag("head", (), str | None, None, "A head that was noted before, which must be in the log.")
LAST = Flag("last", (), int, 20, "How many entries to show.")
BROKEN = 1


def log(argv: Sequence[str]) -> int:
    """Return the exit code of `priory flower log`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        raise UsageError(f"{name!r} is not a command of priory flower log; choose from {', '.join(COMMANDS)}.")
    return COMMANDS[name](rest)


def _verify(argv: Sequence[str]) -> int:
    values = common.parse("log verify", argv, [STATE, CLIENT, HEAD], VERIFY_TEXT)
    logs, head = _logs(values), values["head"]
    if head is not None and HASH.fullmatch(head) is None:
        raise UsageError(f"head={head!r} is not the hash of an entry; give its 64 hexadecimal digits.")
    if head is not None and len(logs) > 1:
        raise UsageError(f"head={head} is of one log, and {len(logs)} clients have one here; give --client N.")
    verdicts = [(one.client, one.verify(head)) for one in logs]
    for client, verdict in verdicts:
        report.say(*lines_of(client, verdict))
    return 0 if all(verdict.holds for _, verdict in verdicts) else BROKEN


def _show(argv: Sequence[str]) -> int:
    values = common.parse("log show", argv, [STATE, CLIENT, LAST], SHOW_TEXT)
    if values["last"] < 1:
        raise UsageError(f"last={values['last']} is too small; choose 1 or more.")
    for one in _logs(values):
        app = None
        report.say(f"client {one.client}:")
        for entry in one.entries(values["last"]):
            if entry.get("app") not in (None, app):
                app = entry["app"]
                report.say(one_line(f"  app {app}"))
            report.say(f"  {line_of(entry)}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"verify": _verify, "show": _show}


def lines_of(client: int, verdict: Verdict) -> list[str]:
    """Return the verdict on a log in words."""
    me, count = f"client {client}", f"{verdict.entries} entries"
    if verdict.fault:
        return [f"{me}: the log is not whole, and only its first {count} can be trusted. {verdict.fault}"]
    lines = [f"{me}: {count}, the chain holds, head {verdict.head}"]
    if not verdict.has_head:
        lines = [
            f"{me}: the log is not whole. Its {count} form a chain, head {verdict.head}, but the head that was given "
            "is not in it: lines were cut off at the end, or the log was written again."
        ]
    if verdict.repairs:
        where = ", ".join(map(str, verdict.repairs))
        lines.append(f"{me}: a crash cut a line short, which was replaced by the repair in line {where}")
    if verdict.torn:
        lines.append(f"{me}: {verdict.torn} bytes after the last entry are of a line cut short, as a crash leaves one")
    return lines


def line_of(entry: JsonDict) -> str:
    """Return an entry on one line."""
    if entry.get("kind") == REPAIR:
        return one_line(f"{entry.get('time')}  repair    replaces {entry.get('bytes')} bytes of a line cut short")
    sent, epsilon = entry.get("sent"), entry.get("epsilon")
    what = f"{entry.get('time')}  {entry.get('kind')!s:8}  {entry.get('outcome')!s:8}  round {entry.get('round')}"
    if isinstance(sent, dict):
        what += f"  {sent.get('bytes')} bytes, norm {_short(sent.get('norm'))}, SHA-256 {str(sent.get('sha256'))[:16]}"
    spent = "" if epsilon is None else f"  ε {_short(epsilon)}"
    reason = f"  {entry['reason']}" if entry.get("reason") else ""
    return one_line(f"{what}{spent}  run {entry.get('run')}{reason}")


def _logs(values: JsonDict) -> list[NodeLog]:
    """Return the log of the client that was named, or of all that have one."""
    directory, client = Path(values["directory"]), values["client"]
    if client is not None:
        return [NodeLog(common.place_of(directory, client), client)]
    found = (re.fullmatch(r"client-(0|[1-9]\d*)", path.parent.name) for path in directory.glob(f"client-*/{NAME}"))
    clients = sorted(int(match[1]) for match in found if match)
    if not clients:
        raise UsageError(f"{directory} has no log of any client; name the state directory of a node.")
    return [NodeLog(client_directory(directory, one), one) for one in clients]


def _short(number: Any) -> str:
    return f"{number:.4g}" if isinstance(number, float) else str(number)
