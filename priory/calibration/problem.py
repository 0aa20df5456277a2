"""A hierarchical problem whose truth is known.

    θ_k ~ N(m, τ² I),   y = θ_k · (1, x) + noise        a regression
    θ_k ~ N(0, τ² I),   log odds of y are θ_k · (1, x)  classes, for a method that needs them

Every client has the same number of examples, and within a client the columns of (1, x) are orthogonal: the exact
posterior of the regression has independent weights, so a mean-field family holds it, and a method that fails does not
fail by its family. Weights in which a method lets clients not differ have τ = 0, and are not judged.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory.core.struct import replace
from priory.data.dataset import Dataset
from priory.data.federation import Federation
from priory.engine.problem import tasks_of
from priory.engine.settings import Settings
from priory.fed.method import Task
from priory.models.model import Params

MEAN = np.array([0.5, 1.0, 0.0])  # of the intercept and two slopes
ALL = (True,) * len(MEAN)
PRIOR_SD = 1.0
NOISE = 1.0
EXAMPLES = 8
POSTERIOR_SD = 1 / math.sqrt(EXAMPLES / NOISE**2 + 1 / PRIOR_SD**2)
PUBLIC = 32  # inputs known to all, for methods that meet there


@dataclass(frozen=True)
class Problem:
    """Clients, what they see, and what is true of them.

    Attributes:
        federation: Their examples, all for training.
        task: A linear model with a likelihood that knows the noise.
        truth: θ_k, (clients, weights), of the weights in which they differ.
        random: Which weights these are.
        exact_sd: Standard deviation of a weight under the exact posterior; None where it has no closed form.
    """

    federation: Federation
    task: Task
    truth: np.ndarray
    random: tuple[bool, ...]
    exact_sd: float | None

    @property
    def has_classes(self) -> bool:
        return self.federation.num_classes is not None

    def describe(self) -> str:
        """What the clients are like, in a few words."""
        kind = "two classes by log odds" if self.has_classes else "a linear-Gaussian regression with known noise"
        weights = "one weight" if sum(self.random) == 1 else f"{sum(self.random)} weights"
        return f"{len(self.truth)} clients, {weights} of each from N(m, τ² I), {kind}"

    def population(self) -> tuple[Params, Any]:
        """Mean and standard deviation of all weights over clients, as the network has them.

        With two classes the difference of two rows is what counts, and has the variance of both.
        """
        rows = np.array([-0.5, 0.5]) if self.has_classes else np.ones(1)
        mean = (np.zeros_like(MEAN) if self.has_classes else MEAN)[:, None] * rows
        shapes = jax.eval_shape(self.task.init, jax.eval_shape(lambda: jax.random.key(0)))
        weights = jax.tree.map(lambda leaf: jnp.float32(mean[1:] if leaf.ndim == 2 else mean[0]), shapes.weights)
        sd = prior_sd(self.has_classes)
        return replace(shapes, weights=weights), jax.tree.map(lambda leaf: jnp.full_like(leaf, sd), weights)


def weights_of(task: Task, params: Params, random: tuple[bool, ...], has_classes: bool) -> Array:
    """Return random weights of networks on axis 0, (networks, weights): the answer at 0 and its change from there."""
    probes = jnp.concatenate([jnp.zeros((1, 2)), jnp.eye(2)])
    outputs = jax.lax.map(lambda one: task.model.apply(one, probes)[0], params)
    at = outputs[..., 1] - outputs[..., 0] if has_classes else outputs[..., 0]
    weights = jnp.concatenate([at[:, :1], at[:, 1:] - at[:, :1]], axis=1)
    return weights[:, np.flatnonzero(random)]


def prior_sd(has_classes: bool) -> float:
    """The standard deviation of a weight of the network over clients."""
    return PRIOR_SD / math.sqrt(2) if has_classes else PRIOR_SD


def make(clients: int, seed: int, random: tuple[bool, ...] = ALL, has_classes: bool = False) -> Problem:
    """The problem with so many clients, which differ in the weights that are random."""
    draw = np.random.default_rng(seed)
    truth = (0 if has_classes else MEAN) + np.array(random) * PRIOR_SD * draw.standard_normal((clients, len(MEAN)))
    x = orthogonal(draw, clients)
    outputs, rows = np.einsum("kni,ki->kn", x, truth).reshape(-1), clients * EXAMPLES
    if has_classes:
        y = (draw.uniform(size=rows) < 1 / (1 + np.exp(-outputs))).astype(np.int32)
        likelihood: dict[str, Any] = {"num_classes": 2, "classes": ("no", "yes")}
    else:
        y = (outputs + NOISE * draw.standard_normal(rows)).astype(np.float32)
        likelihood = {"num_classes": None, "scale": np.full(rows, NOISE, np.float32)}
    data = Dataset(
        name="known truth",
        x=x[..., 1:].reshape(rows, -1).astype(np.float32),
        y=y,
        client=np.repeat(np.arange(clients, dtype=np.int32), EXAMPLES),
        clients=tuple(map(str, range(clients))),
        truth={"weights": truth[:, list(random)]},
        source={"data": "known truth", "memory": True},
        **likelihood,
    )
    public = draw.standard_normal((PUBLIC, 2)).astype(np.float32)
    federation = dataclasses.replace(data.partition("natural", test=0.0), public=public)
    task = tasks_of(federation, Settings(model="linear"))[0]
    return Problem(federation, task, federation.truth["weights"], random, None if has_classes else POSTERIOR_SD)


def orthogonal(draw: np.random.Generator, clients: int) -> np.ndarray:
    """The columns (1, x) of each client, (clients, examples, weights), with XᵀX = n I."""
    columns = draw.standard_normal((clients, EXAMPLES, len(MEAN)))
    columns[..., 0] = 1.0
    q, r = np.linalg.qr(columns)
    signs = np.sign(np.diagonal(r, axis1=1, axis2=2))
    return math.sqrt(EXAMPLES) * q * signs[:, None]
