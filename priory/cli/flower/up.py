"""`priory flower up`: a whole federation on this machine, with TLS and node keys, up and down again."""

import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from priory import report
from priory.cli import flags, progress
from priory.cli.app import INTERRUPTED
from priory.cli.flower import arguments
from priory.cli.run import TRUST
from priory.core.errors import UsageError
from priory.core.files import check_writable, private_directory
from priory.core.reading import JsonDict
from priory.deploy import charter as charters
from priory.deploy import examples
from priory.deploy.app import changed_files, package_of, write_app
from priory.deploy.charter import Charter
from priory.deploy.flower_processes import FlowerError
from priory.deploy.gateway import find_nginx, traffic_of
from priory.deploy.journal import EVENTS, STATUS, read_events, read_status
from priory.deploy.processes import Fleet
from priory.deploy.tls import certificates_in
from priory.store import RunDirectory

TEXT = (
    "Start a federation on this machine: a SuperLink, behind a gateway where nginx is installed, a SuperNode for each "
    "client with rows of its own, TLS certificates and node keys; run the method on it, show how it goes, and take "
    "everything down again. What died is started again, and the same command goes on with a run that was stopped."
)
FAILED = 1
LOOK = 1.0  # seconds between two looks
START_AGAIN = 15.0  # seconds between two starts of a node: Flower lets a killed one in again after a minute
ASK_FLOWER = 5.0  # seconds between two questions to Flower's command line, which takes a second to answer
LIVES = 3  # how often a server that died is started again


@dataclass(frozen=True)
class Options:
    """The federation on this machine.

    Attributes:
        nodes: How many clients, each on a node of its own; all natural ones of the data by default.
        out: Directory for everything; runs/flower-METHOD-DATA by default.
        port: First of the ports: one for the server, one for its gateway, one for each node; free ones by default.
        secure: Use TLS and node keys.
        min_replies: Usable replies that a round needs; 0 for half of those asked.
        timeout: Seconds that a round waits for replies.
        attempts: How often a round with too few of them is asked.
    """

    nodes: int | None = None
    out: str | None = None
    port: int | None = None
    secure: bool = True
    min_replies: int = 0
    timeout: float = 600.0
    attempts: int = 3


def up(argv: Sequence[str]) -> int:
    """Return the exit code of `priory flower up`: 0 after the last round, 1 if the federation failed."""
    wanted = arguments.parse("up", argv, [*flags.flags_of(Options()), TRUST], TEXT, without=("clients",))
    trust_code = wanted.rest.pop("trust_code")
    chosen, charter, federation = Options(**wanted.rest), wanted.charter, wanted.federation
    if federation is None:
        raise UsageError("--schema alone has no rows to deal to nodes; give --data as well.")
    default = Path("runs") / f"flower-{charter.name}-{Path(federation.name).stem}"
    place = Path(chosen.out) if chosen.out else default
    check_writable(place)
    place.parent.mkdir(parents=True, exist_ok=True)  # often runs/, which others may read
    private_directory(place, ours=(place / "app").exists())
    app = _app(place, charter, wanted.spec, chosen.secure, trust_code)
    nodes = [_node(place, federation, client) for client in range(charter.question.num_clients)]
    server = place.resolve() / "server"
    operations = {"min-replies": chosen.min_replies, "timeout": chosen.timeout, "attempts": chosen.attempts}
    free = {"rounds": charter.settings.rounds, "seed": charter.settings.seed}
    report.say(f"{charter.name} on {federation.describe()}", arguments.hash_line(app), *wanted.shared)
    report.say(*arguments.privacy_of(charter))
    report.say(
        f"starting a server and {len(nodes)} nodes on 127.0.0.1{', with TLS and node keys' if chosen.secure else ''}"
    )
    if chosen.secure and find_nginx() is None:
        report.say("nginx with its stream module is not installed, so nodes connect to the SuperLink without a gateway")
    for certificate in certificates_in(place / "flower" / "certificates") if chosen.secure else ():
        if warning := certificate.warning():
            report.say(f"warning: {warning}")
    with progress.interruptible() as stop, _ended_by(signal.SIGTERM):
        try:
            traffic = traffic_of(charter)
            with Fleet(place / "flower", nodes, port=chosen.port, secure=chosen.secure, traffic=traffic) as fleet:
                gateway = f", behind a gateway on port {fleet.gateway_port}" if fleet.has_gateway else ""
                report.say(f"server on port {fleet.port}{gateway}, nodes {', '.join(map(str, fleet.node_ids))}")
                code = _watched(fleet, app, free | operations | {"out": str(server)}, server, stop)
        except FlowerError as error:
            raise UsageError(
                f"Flower could not be started: {error}; the logs are in {place / 'flower' / 'logs'}."
            ) from None
    report.say("everything is taken down")
    if code == INTERRUPTED:
        report.say(f"Stopped; go on with: priory flower up {shlex.join(argv)}")
    if code == 0:
        _conclude(server, place)
    return code


@contextmanager
def _ended_by(number: signal.Signals) -> Iterator[None]:
    """Let a signal end the command as Ctrl-C pressed twice would, so that nothing is left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


def _app(place: Path, charter: Charter, spec: JsonDict, secure: bool, trust_code: bool) -> Path:
    """Return the app of this federation, which is written unless the command that began it has done so."""
    app = place / "app"
    if not app.exists():
        write_app(app, charter, spec, out=str(place.resolve() / "server"), authenticated=secure)
        return app
    package = package_of(app)
    # With the method of this command, nothing that the app names is imported.
    begun = charters.read(package, trust_code) if charters.code_in(package) == charter.code else None
    if begun is None or begun.digest != charter.digest:
        raise UsageError(f"out={place} holds another federation; give the flags that began it, or another directory.")
    with TemporaryDirectory() as temporary:
        fresh = Path(temporary) / app.name
        write_app(fresh, begun, spec, out=str(place.resolve() / "server"), authenticated=secure)
        changed = changed_files(app, fresh)
    if changed and not trust_code:
        raise UsageError(
            f"{app / changed[0]} is not as Priory wrote it, and this command would run it; if you trust whoever "
            "changed it, add --trust-code."
        )
    return app


def _node(place: Path, federation: Any, client: int) -> JsonDict:
    """Return the node-config of a client, whose rows are dealt to a directory of its own."""
    home = place.resolve() / "nodes" / str(client)
    dealt = home / "rows.npz"
    if not dealt.exists():
        examples.save(examples.of_client(federation, client), dealt)
    num = federation.num_clients
    return {"partition-id": client, "num-partitions": num, "dealt": str(dealt), "state": str(home / "state")}


def _watched(fleet: Fleet, app: Path, config: JsonDict, server: Path, stop: Callable[[], bool]) -> int:
    """Wait for the end of the run, start again what died, and return the exit code."""
    shown = len(read_events(server)) if (server / EVENTS).exists() else 0
    started = dict.fromkeys(range(len(fleet.supernodes)), time.monotonic())
    for life in range(LIVES):
        (server / STATUS).unlink(missing_ok=True)  # an earlier life's
        run = fleet.submit(app, config)
        looked = time.monotonic()
        while True:
            time.sleep(LOOK)
            shown = _show(server, shown)
            if stop():
                return INTERRUPTED
            for node, process in enumerate(fleet.supernodes):
                died = process is not None and process.poll() is not None
                if died and time.monotonic() - started[node] > START_AGAIN:
                    started[node] = time.monotonic()
                    report.say(f"node {node} died and is started again")
                    fleet.start_node(node, wait=False)
            status = read_status(server) if (server / STATUS).exists() else {"phase": "starting"}
            if status["phase"] == "finished":
                return 0
            if status["phase"] == "failed":
                report.say(f"priory: {status['error']}")
                return FAILED
            if fleet.superlink is not None and fleet.superlink.poll() is not None:
                report.say("the SuperLink died and is started again")
                fleet.restart_superlink()
                break
            if not status.get("alive", True) and not _over(server):
                break
            if time.monotonic() - looked > ASK_FLOWER:
                looked = time.monotonic()
                if fleet.state_of(run) in ("failed", "stopped", "finished") and not _over(server):
                    break
        report.say(f"the server died in life {life + 1} of {LIVES}: {_last_line(fleet.log_of(run))}")
    return FAILED


def _over(server: Path) -> bool:
    """Return whether the server has reported its end; Flower may know of it a moment earlier."""
    return (server / STATUS).exists() and read_status(server)["phase"] in ("finished", "failed")


def _show(server: Path, shown: int) -> int:
    """Print the events that are new, and return the number of all."""
    events = read_events(server)
    for one in events[shown:]:
        match one["event"]:
            case "joined":
                rows = "" if one["examples"] is None else f" with {one['examples']} examples"
                report.say(f"client {one['client']} is there{rows}")
            case "round":
                refused = ", ".join(f"client {client} {reason}" for client, reason in one["refused"].items())
                usable = f"{one['usable']} of {one['asked']} replies usable, {one['seconds']:.1f} s"
                report.say(f"round {one['round'] + 1}: {usable}{'; ' if refused else ''}{refused}")
            case "left":
                report.say(f"client {one['client']} has left")
            case "refused" | "turned away" | "discarded" | "short":
                report.say(f"{one['event']}: {one.get('sentence') or one}")
    return len(events)


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _conclude(server: Path, place: Path) -> None:
    summary = RunDirectory(server).summary() or {}
    if summary.get("personal"):
        console = report.console()
        console.print()
        console.print(report.run_table(summary))
        console.print()
    report.say(
        f"server: {server} (priory flower status {place})",
        f"posteriors: {place}/nodes/*/state, one directory for each client; its personal model is in model/ there",
        f"app: {place / 'app'}, logs: {place / 'flower' / 'logs'}",
    )
