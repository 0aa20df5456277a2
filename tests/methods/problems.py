"""Small federations for the tests of methods: two or three clients, a tiny network, nothing downloaded."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from priory.core import rng
from priory.core.struct import replace
from priory.fed.method import Message, Task
from priory.fed.shard import Pool, Shards
from priory.methods import REGISTRY, load
from priory.models.likelihood import Categorical, Gaussian
from priory.models.linen import Linen
from priory.models.model import Head, Params
from priory.models.nets import MLP

COUNTS = (7, 4, 4)


class Tiny(nn.Module):
    """A body with batch normalisation and dropout, and a head: everything that a law may stumble over.

    Without `affine` the body has one leaf of weights instead of four: every leaf makes every program larger.
    """

    affine: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(4, use_bias=self.affine)(x.reshape(x.shape[0], -1))
        # Three rows may be almost equal in a column; with the usual 1e-5 the norm amplifies their rounding errors.
        norm = nn.BatchNorm(not train, momentum=0.5, epsilon=0.01, use_bias=self.affine, use_scale=self.affine)
        x = norm(x)
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x))
        return nn.Dense(3)(x)


def tiny_task(num_clients: int = len(COUNTS), affine: bool = True) -> Task:
    """Three classes, inputs of five features."""
    model = Linen(Tiny(affine))
    return Task(model, Categorical(3), (5,), num_clients, sum(COUNTS), Head(model.last_layer((5,))))


def plain_task(num_clients: int = len(COUNTS)) -> Task:
    """The same classes and inputs for a network without dropout and batch norm: no step of it is random."""
    model = Linen(MLP((4,), 3))
    return Task(model, Categorical(3), (5,), num_clients, sum(COUNTS), Head(model.last_layer((5,))))


def aligned_task() -> Task:
    """The same classes and inputs, a smaller network, and seven inputs that all know."""
    return replace(
        tiny_task(affine=False), public=jnp.asarray(np.random.default_rng(9).normal(size=(7, 5)), jnp.float32)
    )


def tiny_shards(counts: tuple[int, ...] = COUNTS, seed: int = 0) -> Shards:
    """Random examples, `counts` of them."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(sum(counts), 5)).astype(np.float32)
    y = draw.integers(0, 3, sum(counts)).astype(np.int32)
    return shards_from(x, y, counts)


def shards_from(x: Any, y: Any, counts: tuple[int, ...], capacity: int | None = None) -> Shards:
    """Shards of float inputs, unscaled."""
    pool = Pool(jnp.asarray(x), jnp.asarray(y), None, jnp.float32(0), jnp.float32(1))
    start = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
    return Shards(pool, jnp.asarray(start), jnp.asarray(counts, jnp.int32), capacity or max(counts))


class Location:
    """A network that ignores its input and predicts its one weight: with a Gaussian likelihood, a quadratic loss."""

    def init(self, key: jax.Array, input_shape: tuple[int, ...]) -> Params:
        del key, input_shape
        return Params({"body": jnp.zeros(()), "head": jnp.zeros(())})

    def apply(self, params: Params, x: jax.Array, *, key: jax.Array | None = None) -> tuple[jax.Array, Any]:
        del key
        location = params.weights["body"] + params.weights["head"]
        return jnp.broadcast_to(location, (x.shape[0], 1)), params.stats

    def last_layer(self, input_shape: tuple[int, ...]) -> str:
        del input_shape
        return "head"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location)

    def __hash__(self) -> int:
        return hash(Location)


def quadratic_task(num_clients: int = 2, num_examples: int = 8) -> Task:
    """NLL(θ) = ½(y − body − head)² + constant: every optimum is known."""
    return Task(Location(), Gaussian(1.0), (1,), num_clients, num_examples, Head("head"))


def constant_shards(*centres: float, counts: tuple[int, ...] | None = None) -> Shards:
    """One client for each centre, whose targets all equal it."""
    counts = counts or (4,) * len(centres)
    y = np.repeat(np.array(centres, np.float32), counts)
    return shards_from(np.zeros((sum(counts), 1), np.float32), y, counts)


@jax.jit
def a_round_of(method: Any, task: Task, shards: Shards) -> tuple[Any, Message]:
    """The server before, and the stacked messages of every client."""
    root = rng.root(3)
    server = method.init_server(task, rng.key(root, rng.Stream.INIT))
    down = method.broadcast(server)

    def sent(client: jax.Array) -> Message:
        state = method.init_client(task, down, rng.key(root, rng.Stream.ENROL, client))
        key = rng.key(root, rng.Stream.CLIENT, 0, client)
        _, message, _ = method.client_update(task, down, state, shards.of(client), key)
        return Message(message.payload, message.weight, client)

    return server, jax.lax.map(sent, jnp.arange(shards.count.shape[0]))


FEDAVGM = f"{Path(__file__).parents[2] / 'docs' / 'fedavgm.py'}:FedAvgM"  # it is held to the laws like a registered one
METHODS = {**REGISTRY, "fedavgm": load(FEDAVGM)}
ALL_METHODS = list(METHODS)
