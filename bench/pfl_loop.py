"""FedAvg in pfl: `FederatedAveraging` with its PyTorch model and its simulated backend, in one process.

    python bench/pfl_loop.py emnist-cnn [--rounds 8]

Prints one JSON line. Batches are cut in the order of the data, as its `Dataset` does. Needs torch and pfl in an
environment of their own.
"""

import itertools
import time
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch_nets import network, tensors
from works import THREADS, Work, answer


class Network(torch.nn.Module):
    """A network with the loss that pfl asks for."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.layers = network(work)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch."""
        return torch.nn.functional.cross_entropy(self.layers(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """No figures: nothing is evaluated here."""
        del x, y
        return {}


class Timed(TrainingProcessCallback):
    """Notes when each round ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(self, *arguments: Any, **more: Any) -> tuple[bool, Metrics]:
        """The round goes on as if nothing were here."""
        del arguments, more
        self.ends.append(time.perf_counter())
        return False, Metrics()


def seconds_of_rounds(work: Work, rounds: int) -> list[float]:
    """Seconds of each round but the first."""
    torch.set_num_threads(THREADS)
    data = {client: list(tensors(work, client)) for client in range(work.clients)}
    users = FederatedDataset.from_slices(data, get_user_sampler("random", list(data)))
    net, timed = Network(work), Timed()
    model = PyTorchModel(
        model=net,
        local_optimizer_create=lambda weights, lr: torch.optim.SGD(weights, lr, momentum=work.momentum),
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=rounds + 2,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.step_size, local_batch_size=work.batch),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[timed],
    )
    return [after - before for before, after in itertools.pairwise(timed.ends)]


if __name__ == "__main__":
    answer(__doc__, seconds_of_rounds)
