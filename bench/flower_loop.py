"""FedAvg in Flower's simulation: a PyTorch ClientApp on Ray, one core a client, as many at once as there are cores.

    python bench/flower_loop.py fedavg-100 [--rounds 8]

Prints one JSON line. The time of a round is that from one `configure_train` of the strategy to the next, so starting
Ray and its workers is left out, and so are the first rounds, in which workers import PyTorch. Needs torch and
flwr[simulation], in an environment of their own.
"""

import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ["PYTHONPATH"] = str(Path(__file__).parent.resolve())  # for the workers

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch_nets import network, tensors, train
from works import THREADS, Work, answer

WARM_UP = 3  # rounds


class Timed(FedAvg):
    """FedAvg that notes when each round starts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.starts: list[float] = []

    def configure_train(self, *arguments: Any, **more: Any) -> Iterable[Message]:
        """The messages of a round."""
        self.starts.append(time.perf_counter())
        return super().configure_train(*arguments, **more)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """The new weights; Flower goes on without clients that failed, and a round without work would seem fast."""
        heard = list(replies)
        failed = [message.error for message in heard if message.has_error()]
        if failed or len(heard) != self.min_train_nodes:
            raise RuntimeError(
                f"round {server_round}: {len(heard)} replies, {len(failed)} of them errors: {failed[:1]}"
            )
        return super().aggregate_train(server_round, heard)


def seconds_of_rounds(work: Work, rounds: int) -> list[float]:
    """Seconds of each round but the first few."""
    client_app, server_app = ClientApp(), ServerApp()
    strategy = Timed(
        fraction_train=work.cohort / work.clients,
        fraction_evaluate=0.0,
        min_train_nodes=work.cohort,
        min_available_nodes=work.clients,
    )

    @client_app.train()
    def fit(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        x, y = tensors(work, int(context.node_config["partition-id"]))
        model = network(work)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(model, work, x, y)
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
        return Message(content=RecordDict(content), reply_to=message)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        del context
        start = ArrayRecord(network(work).state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=WARM_UP + rounds + 1)

    run_simulation(
        server_app,
        client_app,
        num_supernodes=work.clients,
        backend_config={
            "init_args": {"num_cpus": THREADS, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    starts = strategy.starts[WARM_UP:]
    return [after - before for before, after in itertools.pairwise(starts)]


if __name__ == "__main__":
    answer(__doc__, seconds_of_rounds)
