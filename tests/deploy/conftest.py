"""Federations small enough to be deployed in one process: two clients, five features, three classes."""

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from scipy.stats import chi2

from priory import data, methods
from priory.core import rng
from priory.core.rng import Stream
from priory.data import Federation
from priory.deploy import charter as charters
from priory.deploy import flower_processes, wire
from priory.deploy.charter import Charter
from priory.deploy.client import Client
from priory.deploy.examples import of_client
from priory.deploy.exchange import Kind, Request
from priory.deploy.loopback import Loopback
from priory.deploy.server import Operations, Server
from priory.engine.manifest import version_of
from priory.engine.settings import Settings

MODEL = "mlp:4"


def small_arrays(num_clients: int = 2, rows: int = 30) -> dict[str, np.ndarray]:
    """Dense inputs: with inputs that are always zero Adam would blow rounding errors up to whole steps."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(num_clients * rows, 5)).astype(np.float32)
    y = (x[:, 0] + 0.3 * draw.normal(size=len(x)) > 0).astype(int) + (x[:, 1] > 1)
    return {"x": x, "y": y, "client": np.arange(len(x)) % num_clients}


@cache
def small_federation(num_clients: int = 2, rows: int = 30) -> Federation:
    """Return the arrays as a federation."""
    return data.from_arrays(**small_arrays(num_clients, rows), align=rows and "own:8", min_examples=4)


@cache
def small_charter(method: Any, num_clients: int = 2, **settings: Any) -> Charter:
    """Under which the clients of a small federation train; nothing of it changes, so tests share it."""
    chosen = Settings(**{"rounds": 3, "seed": 1, "eval_every": 0, "model": MODEL, **settings})
    return charters.make(method, small_federation(num_clients), chosen)


def first_broadcast(charter: Charter) -> Any:
    """What the server of a charter broadcasts in its first round."""
    key = rng.key(charters.first_key(charter.settings.seed), Stream.INIT)
    return jax.tree.map(np.asarray, _first(charter.method, charter.tasks[0], key))


_first = jax.jit(lambda method, task, key: method.broadcast(method.init_server(task, key)))


def range_of_squares(size: int, signal: float) -> tuple[float, float]:
    """Bounds for Σ x² of N(0, 1) numbers and a signal of at most that norm; it is outside once in 500,000 tries."""
    low, high = np.sqrt(chi2.ppf(1e-6, size)), np.sqrt(chi2.isf(1e-6, size))
    assert low > signal, "numbers without noise would be inside"
    return (low - signal) ** 2, (high + signal) ** 2


def asked(charter: Charter, kind: Kind = "train", /, t: int = 0, down: Any = None, **changed: Any) -> Request:
    """What a server would ask of a client, or a server that errs."""
    config = {"kind": kind, "run": "run-1", "round": t, "rounds": charter.settings.rounds, "uploads": True}
    config |= {"seed": charter.settings.seed, "version": version_of("priory"), "charter": charter.digest}
    arrays = {} if kind == "hello" else wire.encode({"down": first_broadcast(charter) if down is None else down})
    return Request(kind, config | changed, arrays)


def kill_server_app(fleet: Any) -> int:
    """Kill the server apps that a fleet runs and return their number; its SuperLink is not told."""
    apps = [pid for pid in fleet.processes("superlink") if b"flwr-serverapp" in flower_processes._read(pid, "cmdline")]
    for pid in apps:
        os.kill(pid, signal.SIGKILL)
    return len(apps)


class Deployed:
    """A federation behind the wire: clients with directories of their own, and a server that can be started again."""

    def __init__(self, place: Path, charter: Charter, federation: Federation) -> None:
        self.place, self.charter, self.federation = place, charter, federation
        self.clients = {100 + number: self.client(number) for number in range(charter.question.num_clients)}
        self.link: Any = Loopback(self.clients)

    def client(self, number: int) -> Client:
        """A client as a restarted node would make it: nothing but its directory is left."""
        return Client(self.charter, number, lambda: of_client(self.federation, number), self.place / f"node-{number}")

    def server(self, **how: Any) -> Server:
        """A server on the same directory."""
        return Server(self.charter, self.link, Operations(self.place / "server", **{"wait": 1.0, **how}))


@pytest.fixture
def deployed(tmp_path: Path) -> Callable[..., Deployed]:
    """Makes a deployed federation of a method."""

    def make(name: str = "fedavg", num_clients: int = 2, method: Any = None, **settings: Any) -> Deployed:
        charter = small_charter(method or methods.get(name)(), num_clients, **settings)
        return Deployed(tmp_path, charter, small_federation(num_clients))

    return make
