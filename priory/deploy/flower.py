"""Any method on Flower: a ServerApp and a ClientApp around the server and the clients of `deploy`.

There is nothing of a method here, and nothing of statistics: Flower carries the bytes, tells who sent them and starts
processes. Its `Context.state` is not used, since it is lost when a node restarts: a client has a directory of its own.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from priory.core.errors import UsageError
from priory.deploy import charter as charters
from priory.deploy import wire
from priory.deploy.app_hash import installed_hash
from priory.deploy.charter import Charter
from priory.deploy.client import Client
from priory.deploy.client_states import client_directory
from priory.deploy.examples import Examples
from priory.deploy.exchange import Reply, Request, sentence
from priory.deploy.journal import LOG
from priory.deploy.node_log import NodeLog
from priory.deploy.server import Operations, Server
from priory.engine.compilation import keep_compiled

TYPES = {"hello": "query", "train": "train", "evaluate": "evaluate"}  # Flower's names for kinds of messages
PULL = 0.5  # seconds between two looks for replies; one that is still on its way costs a second if looked at too soon
NUMPY = "numpy.ndarray"
ReadExamples = Callable[[Mapping[str, Any], Charter], Examples]
OPTIONS: dict[str, type] = {
    "rounds": int, "seed": int, "out": str, "min-replies": int, "timeout": float, "attempts": int, "wait": float,
    "authenticated": bool,
}  # fmt: skip


# An app is code that its operator wrote and that runs here already, so its manifest may name code as well.
def server_app(directory: Path) -> ServerApp:
    """The ServerApp of the app in a directory."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        keep_compiled()
        charter, how = configured(charters.load(directory, trust_code=True), dict(context.run_config))
        Server(charter, GridLink(grid, how.timeout), how).go()

    return app


def client_app(directory: Path, examples: ReadExamples) -> ClientApp:
    """The ClientApp of the app in a directory; `examples` reads the rows of a node from what its node-config says."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        keep_compiled()
        request, node = request_of(message), dict(context.node_config)
        try:
            reply = _client_of(directory, examples, node).answer(request)
        except UsageError as error:
            reply = _refused(request, sentence(str(error)), directory, node)
        except Exception as error:  # what a stranger's exception says may hold a row, so it stays here
            LOG.exception("the request could not be answered")
            why = f"{type(error).__name__}, of which the log of the node tells more."
            reply = _refused(request, why, directory, node)
        return Message(to_records(reply), reply_to=message)

    for kind in (app.train, app.evaluate, app.query):
        kind()(answer)
    return app


def _client_of(directory: Path, examples: ReadExamples, node: dict[str, Any]) -> Client:
    """The client of a node, made once a process: Flower's simulation pickles an app anew for every message."""
    named = directory, tuple(sorted(node.items()))
    if named not in _CLIENTS:
        charter, number = charters.load(directory, trust_code=True), node.get("partition-id")
        if type(number) is not int:
            raise UsageError(f"partition-id={number!r} is not a client's number; start its node with one.")
        app, state = installed_hash(_root(directory)), state_directory(node)
        _CLIENTS[named] = Client(charter, number, lambda: examples(node, charter), state, app)
    return _CLIENTS[named]


_CLIENTS: dict[tuple[Path, tuple[tuple[str, Any], ...]], Client] = {}


def _root(package: Path) -> Path:
    """Return the directory of the app that a package belongs to."""
    return package.parent if (package.parent / "pyproject.toml").is_file() else package


def _refused(request: Request, why: str, package: Path, node: Mapping[str, Any]) -> Reply:
    """Return a refusal, which is logged where the node has a client's number."""
    told = {name: value for name, value in request.config.items() if name in ("kind", "run", "round")}
    reply, number = Reply(told, error=why), node.get("partition-id")
    if type(number) is not int or number < 0:
        LOG.error("a request is refused and no client has a log of it: %s", why)
        return reply
    try:
        app = installed_hash(_root(package))
    except OSError:
        app = None
    log = NodeLog(client_directory(state_directory(node), number), number)
    return log.admit(request, reply, "refused", app, None)


def configured(charter: Charter, config: Mapping[str, Any]) -> tuple[Charter, Operations]:
    """The charter with the rounds and the seed of a run-config, and how the operator wants it run."""
    for name, value in config.items():
        if name not in OPTIONS:
            raise UsageError(f"{name} is not a key of the run-config; choose from {', '.join(OPTIONS)}.")
        wanted = OPTIONS[name]
        fits = (
            isinstance(value, int | float) and not isinstance(value, bool) if wanted is float else type(value) is wanted
        )
        if not fits:
            raise UsageError(f"{name}={value!r} in the run-config should be of type {wanted.__name__}; correct it.")
    free = {name: config[name] for name in charters.FREE if name in config}
    settings = charter.settings
    if charter.ledger is not None and any(getattr(settings, name) != value for name, value in free.items()):
        given = ", ".join(f"{name}={value}" for name, value in free.items())
        raise UsageError(
            f"{given} differ from the app's rounds={settings.rounds}, seed={settings.seed}, on which its privacy "
            "depends; make an app with others."
        )
    rest = {name.replace("-", "_"): value for name, value in config.items() if name not in free}
    if not rest.get("out"):
        raise UsageError("out='' names no directory for the server's state; give one, as an absolute path.")
    out = Path(rest.pop("out")).expanduser()
    changed = charter.running(**free)
    changed.check()
    return changed, Operations(out, **rest)


def state_directory(node: Mapping[str, Any]) -> Path:
    """Where a node's client keeps its state: `state` of its node-config, else the user's own state directory."""
    if node.get("state"):
        place = Path(str(node["state"])).expanduser()
        if not place.is_absolute():  # elsewhere the same node would have no state and an unspent budget
            raise UsageError(f"state={str(node['state'])!r} in the node-config must be an absolute path.")
        return place
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "priory"


class GridLink:
    """The nodes of a Flower run."""

    def __init__(self, grid: Grid, timeout: float) -> None:
        self._grid, self._ttl = grid, timeout + 60  # what nobody waits for any more need not be delivered

    def nodes(self) -> list[int]:
        """The nodes that are connected."""
        return sorted(self._grid.get_node_ids())

    def ask(self, requests: Mapping[int, Request], timeout: float) -> Iterator[tuple[int, Reply]]:
        """Replies as they come, each with the node that was asked; an error of Flower's is a reply too."""
        waiting: dict[str, int] = {}
        for node, request in requests.items():
            content = RecordDict({"arrays": to_arrays(request.arrays), "config": ConfigRecord(dict(request.config))})
            message = Message(
                content, node, TYPES[request.kind], ttl=self._ttl, group_id=str(request.config.get("round", ""))
            )
            # One by one, since a push is one HTTP request and all clients' messages may be too large for it.
            for pushed in self._grid.push_messages([message]):
                if pushed:
                    waiting[pushed] = node
                else:
                    yield node, Reply(error="Flower: the request could not be sent.")
        until = time.monotonic() + timeout
        while waiting and time.monotonic() < until:
            for asked in list(waiting):
                for reply in self._pulled(asked):
                    yield waiting.pop(asked), reply
            if waiting:
                time.sleep(PULL)

    def _pulled(self, asked: str) -> list[Reply]:
        """The reply to one message, if it is there.

        One by one, and whatever Flower cannot make a message of is a reply that says so: what one node sends must not
        keep the server from hearing the others.
        """
        try:
            return [reply_of(reply) for reply in self._grid.pull_messages([asked])][:1]
        except (OSError, httpx.HTTPError):  # the way to the SuperLink is broken, which is no fault of the node's
            raise
        except Exception as error:
            return [Reply(error=f"Flower: the reply could not be read ({type(error).__name__}).")]


def request_of(message: Message) -> Request:
    """What the server asks."""
    kinds = {name: kind for kind, name in TYPES.items()}
    config, arrays = _records(message.content)[:2]
    return Request(kinds.get(message.metadata.message_type, "hello"), config, arrays)  # type: ignore[arg-type]


def reply_of(message: Message) -> Reply:
    """What a node answered, of which nothing is believed yet."""
    if message.has_error():
        return Reply(error=f"Flower: {message.error.reason or message.error.code}")
    config, arrays, metrics = _records(message.content)
    return Reply(config, arrays, metrics, str(config.get("error", "")))


def to_records(reply: Reply) -> RecordDict:
    """A reply as Flower's records: anybody can read them with Flower's own tools."""
    config: dict[str, Any] = dict(reply.config) | ({"error": reply.error} if reply.error else {})
    metrics: dict[str, Any] = dict(reply.metrics)
    arrays = to_arrays(reply.arrays)
    return RecordDict({"arrays": arrays, "config": ConfigRecord(config), "metrics": MetricRecord(metrics)})


def to_arrays(parts: Mapping[str, bytes]) -> ArrayRecord:
    """Encoded arrays as Flower holds them."""

    def one(name: str, raw: bytes) -> Array:
        array = wire.from_bytes(name, raw)
        return Array(dtype=str(array.dtype), shape=array.shape, stype=NUMPY, data=raw)

    return ArrayRecord({name: one(name, raw) for name, raw in parts.items()})


def _records(content: RecordDict) -> tuple[dict[str, Any], dict[str, bytes], dict[str, float]]:
    """Config, arrays and metrics of a message; a record of another kind, or none, counts as empty."""

    def found(name: str, kind: Any) -> Mapping[str, Any]:
        record = content.get(name)
        return dict(record) if isinstance(record, kind) else {}

    config, arrays = dict(found("config", ConfigRecord)), found("arrays", ArrayRecord)
    numbers = {name: value for name, value in found("metrics", MetricRecord).items() if isinstance(value, int | float)}
    return config, {name: array.data for name, array in arrays.items()}, numbers
