"""FedAvg on MNIST with clients that lie, with and without robust aggregation; prints the table of docs/deploy.

    PRIORY_DATA=... python bench/robust.py                       runs what is missing, then prints
    PRIORY_DATA=... python bench/robust.py --estimate            only says what is missing and how long it would take
    PRIORY_DATA=... python bench/robust.py --only iid-sign-median-0     one cell, made again if it is there

50 clients, all of them in every round, over the link of a deployed federation in one process: what is sent is encoded,
decoded and screened as it would be on a network. A fifth of the clients lies about what it has learned, payload −
broadcast: with its sign turned (`sign`) or a hundred times as large (`large`); `clean` has no liars. Partitions are iid
and shards:5 (five labels or fewer a client). Seed s is that of the partition and of the run, so runs are paired within
a seed. Every finished cell is a JSON file of its own with the command that makes it again.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import priory
from priory.cli.compare import methods_from
from priory.deploy import charter as charters
from priory.deploy import wire
from priory.deploy.charter import Charter
from priory.deploy.client import Client
from priory.deploy.examples import of_client
from priory.deploy.exchange import Reply, Request
from priory.deploy.loopback import Loopback
from priory.deploy.server import Operations, Server
from priory.engine.compilation import keep_compiled
from priory.engine.settings import Settings
from priory.fed.method import Message

CELLS = Path(__file__).parents[1] / "docs" / "deploy" / "robust"
CLIENTS, LIARS, ROUNDS, MODEL = 50, 10, 20, "mlp:100"
METHOD = "fedavg:step-size=0.1,finetune-epochs=0"
FACTORS = {"clean": None, "sign": -1.0, "large": 100.0}  # what liars multiply payload − broadcast with
TITLES = ("nobody lies", "sign turned", "100-fold")
RULES = ("mean", "median", "trimmed:0.25", "krum", "norm-clip:1")
REQUIRED = ("mean", "median", "trimmed:0.25")  # more seeds of these on iid
SECONDS = 35  # about, for a cell on one core


@dataclass
class Liars(Loopback):
    """A link on which some clients send a multiple of what they have learned."""

    charter: Charter | None = None
    factor: float | None = None
    liars: frozenset[int] = frozenset()

    def ask(self, requests: Mapping[int, Request], timeout: float) -> Iterator[tuple[int, Reply]]:
        for node, reply in super().ask(requests, timeout):
            lies = requests[node].kind == "train" and self.clients[node].number in self.liars
            yield node, self._lie(requests[node], reply) if lies and self.factor is not None else reply

    def _lie(self, request: Request, reply: Reply) -> Reply:
        assert self.charter is not None
        down = wire.decode(request.arrays, {"down": self.charter.contact().down})["down"]
        sent: Message = wire.decode(reply.arrays, self.charter.uplink)
        payload = jax.tree.map(lambda to, at: at + np.float32(self.factor) * (to - at), sent.payload, down)
        return replace(reply, arrays=wire.encode(Message(payload, sent.weight)))


def deployed(
    federation: Any, method: Any, factor: float | None, liars: int, directory: Path, **settings: Any
) -> dict[str, Any]:
    """The summary of a deployed federation in which the first so many clients lie; cells of iid clients are alike."""
    charter = charters.make(method, federation, Settings(**settings))
    clients = {
        number: Client(charter, number, lambda number=number: of_client(federation, number), directory / f"{number}")
        for number in range(federation.num_clients)
    }
    link = Liars(clients, charter, factor, frozenset(range(liars)))
    return Server(charter, link, Operations(directory / "server")).go()


@dataclass(frozen=True)
class Cell:
    """One run."""

    partition: str
    attack: str
    rule: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.partition}-{self.attack}-{self.rule}-{self.seed}".replace(":", "")

    @property
    def path(self) -> Path:
        return CELLS / f"{self.name}.json"

    @property
    def settings(self) -> dict[str, Any]:
        robust = None if self.rule == "mean" else self.rule
        return {"rounds": ROUNDS, "seed": self.seed, "eval_every": 0, "model": MODEL, "robust": robust}

    @property
    def told(self) -> dict[str, Any]:
        """All that makes the run what it is."""
        deal = {"spec": self.partition, "clients": CLIENTS, "seed": self.seed}
        liars = {"factor": FACTORS[self.attack], "liars": LIARS}
        return {"method": METHOD, "data": "mnist", "partition": deal, "attack": liars, "run": self.settings}

    @property
    def is_current(self) -> bool:
        return self.path.exists() and self.summary()["cell"] == json.loads(json.dumps(self.told))

    def run(self) -> None:
        keep_compiled()
        federation = priory.data.load("mnist").partition(**self.told["partition"])
        method = methods_from([METHOD], {})[METHOD]
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            summary = deployed(federation, method, FACTORS[self.attack], LIARS, Path(directory), **self.settings)
        origin = {"command": f"python bench/robust.py --only {self.name}", "version": priory.__version__}
        origin |= {"data_checksum": federation.checksum, "seconds_in_all": round(time.perf_counter() - started, 1)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**origin, "cell": self.told, **summary}, indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())


def seeds_of(partition: str, rule: str) -> tuple[int, ...]:
    return (0, 1, 2) if partition == "iid" and rule in REQUIRED else (0,)


def cells() -> list[Cell]:
    """All of them, the required ones first."""
    rules = sorted(RULES, key=lambda rule: rule not in REQUIRED)
    return [
        Cell(partition, attack, rule, seed)
        for partition in ("iid", "shards:5")
        for rule in rules
        for attack in FACTORS
        for seed in seeds_of(partition, rule)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimate", action="store_true", help="run nothing")
    parser.add_argument("--only", nargs="+", choices=[cell.name for cell in cells()], help="which cells")
    parser.add_argument("--print", action="store_true", help="run nothing, and print what is there")
    options = parser.parse_args()
    chosen = [cell for cell in cells() if options.only is None or cell.name in options.only]
    for cell in chosen if options.only else ():
        cell.path.unlink(missing_ok=True)
    if not options.print:
        run_missing(chosen, options.estimate)
    if not options.estimate and not options.only:
        print(table())


def run_missing(some: Sequence[Cell], estimate_only: bool) -> None:
    """Run the cells that are not there, or only say how long that would take."""
    missing = [cell for cell in some if not cell.is_current]
    print(f"{len(missing)} cells to run, about {len(missing) * SECONDS / 60:.0f} minutes on one core", flush=True)
    for cell in [] if estimate_only else missing:
        started = time.perf_counter()
        cell.run()
        print(f"{cell.path.name}  {time.perf_counter() - started:.0f} s", flush=True)


def table() -> str:
    """Accuracy of the server's model in per cent, with standard errors over three seeds on iid for what is required.

    The last column is the most that a seed loses against the plain mean without liars.
    """
    lines = []
    for partition in ("iid", "shards:5"):
        lines += ["", f"| {partition} | {' | '.join(TITLES)} | most lost |", "|---" * (len(FACTORS) + 2) + "|"]
        honest = {seed: accuracy_of(Cell(partition, "clean", "mean", seed)) for seed in seeds_of(partition, "mean")}
        for rule in RULES:
            seeds = seeds_of(partition, rule)
            found = {attack: [Cell(partition, attack, rule, seed) for seed in seeds] for attack in FACTORS}
            shown = [written([accuracy_of(cell) for cell in some]) for some in found.values()]
            lied = [cell for attack in ("sign", "large") for cell in found[attack]]
            lost = max(honest[cell.seed] - accuracy_of(cell) for cell in lied)
            lines.append(f"| {rule} | {' | '.join(shown)} | {lost:.2f} |")
    return "\n".join(lines[1:])


def accuracy_of(cell: Cell) -> float:
    return 100 * float(cell.summary()["global"]["accuracy"])


def written(numbers: Sequence[float]) -> str:
    """The mean, with its standard error where there are several."""
    text = f"{statistics.mean(numbers):.2f}"
    if len(numbers) == 1:
        return text
    return f"{text} ± {statistics.stdev(numbers) / len(numbers) ** 0.5:.2f}"


if __name__ == "__main__":
    main()
