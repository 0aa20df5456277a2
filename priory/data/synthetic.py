"""Synthetic problems with known answers; `truth` holds what a method should find, first axis clients.

    synthetic:linear          y = w_k x + noise, w_k ~ N(m, tau^2 I): hierarchical regression with a Gaussian posterior
    synthetic:quadratic       y = theta_k + noise, theta_k ~ N(m, tau^2): its loss is a parabola in one weight
    synthetic:clusters        Gaussian classes whose centres depend on the client's cluster
    synthetic:representation  y = z_k' phi' x + noise: clients share phi, (dim, rank), and differ in rank numbers z_k

Arguments follow the name: `synthetic:linear:clients=50,examples=20,dim=5,tau=1,noise=0.5,seed=0`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from priory.core.errors import UsageError
from priory.data import checks
from priory.data.dataset import Dataset

__all__ = ["PROBLEMS", "make"]


def make(name: str) -> Dataset:
    """Return the problem that a text such as `synthetic:linear:clients=50` names."""
    kind, _, text = name.removeprefix("synthetic").removeprefix(":").partition(":")
    if kind not in PROBLEMS:
        raise checks.unknown("data set", name, [f"synthetic:{problem}" for problem in PROBLEMS])
    problem, defaults = PROBLEMS[kind]
    arguments: dict[str, Any] = dict(defaults)
    for item in text.split(",") if text else ():
        key, equals, value = item.partition("=")
        if key not in defaults or not equals:
            known = ", ".join(f"{key}={value:g}" for key, value in defaults.items())
            raise UsageError(f"{item!r} in {name!r} is not an argument; the arguments are {known}.")
        remedy = f"write for example {key}={defaults[key]:g}"
        zero_seed = key == "seed" and value == "0"
        arguments[key] = 0 if zero_seed else checks.number(value, type(defaults[key]), where=repr(name), remedy=remedy)
    rng = np.random.default_rng(arguments.pop("seed"))
    return problem(rng, **arguments)


def _linear(rng: np.random.Generator, clients: int, examples: int, dim: int, tau: float, noise: float) -> Dataset:
    mean = rng.standard_normal(dim)
    weights = mean + tau * rng.standard_normal((clients, dim))
    client = np.repeat(np.arange(clients), examples)
    x = rng.standard_normal((len(client), dim))
    y = (x * weights[client]).sum(axis=1) + noise * rng.standard_normal(len(client))
    return _regression("synthetic:linear", x, y, client, noise, _gaussian(weights, mean, tau))


def _quadratic(rng: np.random.Generator, clients: int, examples: int, tau: float, noise: float) -> Dataset:
    mean = rng.standard_normal(1)
    weights = mean + tau * rng.standard_normal((clients, 1))
    client = np.repeat(np.arange(clients), examples)
    y = weights[client, 0] + noise * rng.standard_normal(len(client))
    x = np.ones((len(client), 1))
    return _regression("synthetic:quadratic", x, y, client, noise, _gaussian(weights, mean, tau))


def _clusters(
    rng: np.random.Generator, clients: int, examples: int, dim: int, classes: int, clusters: int, distance: float
) -> Dataset:
    """Centres lie at random, `distance` from the origin; every class has unit variance."""
    centre = rng.standard_normal((clusters, classes, dim))
    centre *= distance / np.linalg.norm(centre, axis=2, keepdims=True)
    cluster = rng.permutation(np.arange(clients) % clusters).astype(np.int32)
    client = np.repeat(np.arange(clients, dtype=np.int32), examples)
    y = rng.integers(0, classes, size=len(client)).astype(np.int32)
    x = centre[cluster[client], y] + rng.standard_normal((len(client), dim))
    return Dataset(
        name="synthetic:clusters",
        x=x.astype(np.float32),
        y=y,
        num_classes=classes,
        classes=tuple(map(str, range(classes))),
        client=client,
        clients=tuple(map(str, range(clients))),
        truth={"cluster": cluster, "centre": centre[cluster]},
    )


def _representation(
    rng: np.random.Generator, clients: int, examples: int, dim: int, rank: int, noise: float
) -> Dataset:
    """Collins et al., ICML 2021, arXiv:2102.07078: phi has orthonormal columns, z_k is a random direction, x ~ N(0, I).

    The defaults are those of Kotelevskii et al., FedPop, NeurIPS 2022, arXiv:2206.03611, section 5, with a noise of
    variance 0.1; there 90 % of the clients have 5 examples and the rest 10, which is --sizes 0.9=5,0.1=10.
    """
    if rank > dim:
        raise UsageError(
            f"rank={rank} exceeds dim={dim}, and rank columns of dim numbers are to be orthonormal; lower it."
        )
    representation, _ = np.linalg.qr(rng.standard_normal((dim, rank)))
    effects = rng.standard_normal((clients, rank))
    effects /= np.linalg.norm(effects, axis=1, keepdims=True)
    weights = effects @ representation.T
    client = np.repeat(np.arange(clients), examples)
    x = rng.standard_normal((len(client), dim))
    y = (x * weights[client]).sum(axis=1) + noise * rng.standard_normal(len(client))
    truth = {"representation": np.tile(representation, (clients, 1, 1)), "effects": effects, "weights": weights}
    return _regression("synthetic:representation", x, y, client, noise, truth)


def _regression(
    name: str, x: np.ndarray, y: np.ndarray, client: np.ndarray, noise: float, truth: dict[str, np.ndarray]
) -> Dataset:
    num_clients = len(truth["weights"])
    return Dataset(
        name=name,
        x=x.astype(np.float32),
        y=y.astype(np.float32),
        num_classes=None,
        client=client.astype(np.int32),
        clients=tuple(map(str, range(num_clients))),
        scale=np.full(len(y), noise, np.float32),
        truth={**truth, "noise": np.full(num_clients, noise)},
    )


def _gaussian(weights: np.ndarray, mean: np.ndarray, tau: float) -> dict[str, np.ndarray]:
    """Return what is true of clients whose weights are N(mean, tau^2 I)."""
    num_clients = len(weights)
    return {
        "weights": weights,
        "prior_mean": np.tile(mean, (num_clients, 1)),
        "prior_scale": np.full(num_clients, tau),
    }


PROBLEMS: dict[str, tuple[Callable[..., Dataset], dict[str, int | float]]] = {
    "linear": (_linear, {"clients": 50, "examples": 20, "dim": 5, "tau": 1.0, "noise": 0.5, "seed": 0}),
    "quadratic": (_quadratic, {"clients": 20, "examples": 10, "tau": 1.0, "noise": 1.0, "seed": 0}),
    "clusters": (
        _clusters,
        {"clients": 20, "examples": 50, "dim": 2, "classes": 4, "clusters": 2, "distance": 3.0, "seed": 0},
    ),
    "representation": (
        _representation,
        {"clients": 100, "examples": 50, "dim": 20, "rank": 2, "noise": math.sqrt(0.1), "seed": 0},
    ),
}
