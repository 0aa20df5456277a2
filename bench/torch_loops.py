"""Federated rounds as a plain PyTorch loop over clients: what one would write without this library.

    python bench/torch_loops.py [fedavg] [cnn] [pfedbayes] [--repeats 5]

Prints one JSON line for each work: its name, the seconds of its fastest round, how many rounds were timed. The first
round is not timed. Inputs are random, since only time is measured. Needs torch and numpy, and nothing of the library,
so that it can run in an environment of its own.

Trust a time only from an idle machine: the two threads wait for each other, so a busy neighbour on two cores can make
every round of a run several times slower, the fastest included.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_THREADS = 2
NUM_CLASSES = 10

Round = Callable[[], list[Tensor]]


def fedavg(clients: int = 10, examples: int = 600, batch: int = 50, width: int = 256) -> Round:
    """A round of one epoch on each client, SGD with momentum, MLP 784-256-10, then the mean of the weights."""
    server = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, NUM_CLASSES))
    x, y = random_clients(clients, examples, (784,))

    def one_round() -> list[Tensor]:
        return mean_of(client_weights(server, x[k], y[k], one_epoch(examples, batch), 0.9, 0.1) for k in range(clients))

    return one_round


def cnn(clients: int = 4, examples: int = 200, batch: int = 50, steps: int = 4) -> Round:
    """A round of four SGD steps on each client with 5x5x32, pool, 5x5x64, pool, dense 128, dense 10, then the mean."""
    server = nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(7 * 7 * 64, 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES)),
    )
    x, y = random_clients(clients, examples, (1, 28, 28))

    def one_round() -> list[Tensor]:
        rows = (random_rows(examples, batch, steps) for _ in range(clients))
        return mean_of(client_weights(server, x[k], y[k], chosen, 0.0, 0.01) for k, chosen in enumerate(rows))

    return one_round


def pfedbayes(clients: int = 10, examples: int = 1000, batch: int = 50, steps: int = 20, zeta: float = 10.0) -> Round:
    """A round of Algorithm 1 of pFedBayes, MLP 784-100-10: one weight sample a step, Adam on both distributions."""
    means = [0.05 * torch.randn(784, 100), torch.zeros(100), 0.05 * torch.randn(100, NUM_CLASSES), torch.zeros(10)]
    rhos = [torch.full_like(mean, -2.5) for mean in means]
    x, y = random_clients(clients, examples, (784,))

    def localised_global(k: int) -> list[Tensor]:
        personal, prior = trainable(means + rhos), trainable(means + rhos)
        personal_optimiser, prior_optimiser = torch.optim.Adam(personal, 1e-3), torch.optim.Adam(prior, 1e-3)
        for rows in random_rows(examples, batch, steps):
            w1, b1, w2, b2 = sample(personal)
            logits = functional.relu(x[k][rows] @ w1 + b1) @ w2 + b2
            nll = functional.cross_entropy(logits, y[k][rows])
            step(personal_optimiser, nll + zeta / examples * gaussian_kl(personal, frozen(prior)))
            step(prior_optimiser, gaussian_kl(frozen(personal), prior))
        return frozen(prior)

    return lambda: mean_of(localised_global(k) for k in range(clients))


def client_weights(
    server: nn.Module, x: Tensor, y: Tensor, batches: Iterable[Tensor], momentum: float, step_size: float
) -> list[Tensor]:
    """The weights of one client after SGD from the server's weights over the given batches of rows."""
    model = copy.deepcopy(server)
    optimiser = torch.optim.SGD(model.parameters(), step_size, momentum=momentum)
    for rows in batches:
        step(optimiser, functional.cross_entropy(model(x[rows]), y[rows]))
    return [weight.detach() for weight in model.parameters()]


def step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def mean_of(clients: Iterable[list[Tensor]]) -> list[Tensor]:
    """The mean of the clients' weights, tensor by tensor."""
    return [torch.stack(weights).mean(dim=0) for weights in zip(*clients, strict=True)]


def sample(distribution: list[Tensor]) -> list[Tensor]:
    """One draw of the weights, mean + softplus(rho) * noise."""
    means, rhos = halves(distribution)
    return [mean + functional.softplus(rho) * torch.randn_like(mean) for mean, rho in zip(means, rhos, strict=True)]


def gaussian_kl(q: list[Tensor], p: list[Tensor]) -> Tensor:
    """KL(q ‖ p) of two diagonal Gaussians, nats."""
    total = torch.zeros(())
    for mean, rho, prior_mean, prior_rho in zip(*halves(q), *halves(p), strict=True):
        sd, prior_sd = functional.softplus(rho), functional.softplus(prior_rho)
        ratio = (sd**2 + (mean - prior_mean) ** 2) / prior_sd**2
        total = total + 0.5 * (2 * torch.log(prior_sd / sd) + ratio - 1).sum()
    return total


def halves(distribution: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    middle = len(distribution) // 2
    return distribution[:middle], distribution[middle:]


def trainable(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def frozen(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors]


def random_clients(clients: int, examples: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.randn(clients, examples, *shape), torch.randint(0, NUM_CLASSES, (clients, examples))


def one_epoch(examples: int, batch: int) -> Iterable[Tensor]:
    return torch.randperm(examples).split(batch)


def random_rows(examples: int, batch: int, steps: int) -> Iterable[Tensor]:
    return (torch.randint(0, examples, (batch,)) for _ in range(steps))


def best_seconds(one_round: Round, repeats: int) -> float:
    """Seconds of the fastest of several rounds, after one that is not timed."""
    one_round()
    return min(seconds(one_round) for _ in range(repeats))


def seconds(one_round: Round) -> float:
    start = time.perf_counter()
    one_round()
    return time.perf_counter() - start


WORKS: dict[str, Callable[[], Round]] = {"fedavg": fedavg, "cnn": cnn, "pfedbayes": pfedbayes}


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} rounds give no time; choose 1 or more")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", metavar="work", help=f"any of {', '.join(WORKS)}; all when none is named")
    parser.add_argument("--repeats", type=at_least_one, default=5, help="timed rounds of each work")
    arguments = parser.parse_args()
    unknown = set(arguments.works) - set(WORKS)
    if unknown:
        parser.error(f"{min(unknown)} is no work of this benchmark; choose from {', '.join(WORKS)}")
    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(0)
    for name in arguments.works or WORKS:
        best = best_seconds(WORKS[name](), arguments.repeats)
        print(json.dumps({"name": name, "seconds": best, "repeats": arguments.repeats}), flush=True)


if __name__ == "__main__":
    main()
