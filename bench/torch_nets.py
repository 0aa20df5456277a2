"""The networks of `works.py` in PyTorch, and one client's pass over its data: shared by the sides that are PyTorch."""

import functools

import torch
from torch import Tensor, nn
from works import Work


def network(work: Work) -> nn.Sequential:
    """The network of a work; it takes images with channels first."""
    if work.network == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, work.classes))
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(7 * 7 * 64, 128), nn.ReLU(), nn.Linear(128, work.classes)),
    )


@functools.cache
def tensors(work: Work, client: int) -> tuple[Tensor, Tensor]:
    """A client's images and labels, made once in each process."""
    x, y = work.inputs(client)
    return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(y)


def train(model: nn.Module, work: Work, x: Tensor, y: Tensor) -> None:
    """One pass over the examples in random order, in place."""
    optimiser = torch.optim.SGD(model.parameters(), work.step_size, momentum=work.momentum)
    for rows in torch.randperm(len(y)).split(work.batch):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
