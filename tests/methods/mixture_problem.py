"""What the tests of FedHB-Mixture share: networks of six numbers, a server at given prototypes, compiled verbs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from priory import FedHBMixture, Optimiser, Work
from priory.bayes.mixture import Shares
from priory.core import rng
from priory.fed.method import Message, Task
from priory.methods.fedhb_mixture import Prototypes, Update
from priory.models import MLP, Head, Linen
from priory.models.likelihood import Categorical
from tests.methods.problems import quadratic_task
from tests.methods.verbs import aggregated, init_client, updated

NUM_CLIENTS = 5

each_prior = pytest.mark.parametrize("prior_mean", ["zero", "learned"])
each_size = pytest.mark.parametrize("num_heard", [1, 3, 5])


@jax.jit
def shared_prediction(method, task, server, x):
    """What the prototypes say together."""
    return method.predict(task, method.population(task, server, None, rng.root(7)), x, rng.root(8))


def flat(weights):
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(weights)])


def rows(stacked):
    """The members of a stack as float64 vectors, (K, d)."""
    return np.stack(
        [flat(jax.tree.map(lambda leaf, j=j: np.asarray(leaf)[j], stacked)) for j in range(num_rows(stacked))]
    )


def num_rows(stacked):
    """How many members a stack has."""
    return jax.tree.leaves(stacked)[0].shape[0]


def network_of(vector):
    """Six numbers as a kernel and a bias; rows of them as a stack."""
    vector = np.asarray(vector, np.float32)
    return {"bias": vector[..., :2], "kernel": vector[..., 2:].reshape(*vector.shape[:-1], 4, 1)}


def server_at(prototypes, gate=None):
    return Prototypes(network_of(prototypes), {"bias": None, "kernel": None}, {}, gate)


def messages_of(points):
    """Messages of clients at these points, and of others that did not take part."""
    return Message(Update(network_of(_among_all(points)), {}, None), _there(points))


def _among_all(values):
    """The values of those who took part, and NaN for the others, so that all cohorts share their programs."""
    silent = np.full((max(NUM_CLIENTS - len(values), 0), *np.shape(values)[1:]), np.nan)
    return np.concatenate([values, silent])


def _there(points):
    return (np.arange(max(NUM_CLIENTS, len(points))) < len(points)).astype(np.float32)


def some_points(num=NUM_CLIENTS, seed=0):
    return np.random.default_rng(seed).normal(0.3, 0.5, (num, 6)).astype(np.float32).astype(np.float64)


def shares_of(points, prototypes, variance):
    """c(j|i), (points, K)."""
    return softmax(-np.sum((points[:, None] - prototypes) ** 2, axis=-1) / (2 * variance), axis=1)


def pinned(**options):
    """The method with its settings written down: the tests do not follow its defaults."""
    fields = {
        "num_prototypes": 2, "variance": 0.1, "epsilon": 1e-4, "start": "best", "prior_mean": "zero", "empty": "keep",
        "gate": True, "update": "full", "linear": False, "finetune_epochs": 5, "finetune_step_size": 0.01,
        "optimiser": Optimiser("sgd", 0.1), "work": Work(epochs=1, batch_size=32),
    }  # fmt: skip
    return FedHBMixture(**fields | options)


BODY = pinned(num_prototypes=1, gate=False, update="body")  # one weight of `Location`: its head stays at 0


def em_step(method, points, prototypes, num_clients=NUM_CLIENTS):
    """The server and its metrics after the given clients have spoken."""
    task = quadratic_task(num_clients)
    return aggregated(method, task, server_at(prototypes), messages_of(points), rng.root(0))


def location(*places):
    """A quadratic problem's server: prototypes of the body, under a head at 0."""
    return Prototypes(
        {"body": jnp.array(places, jnp.float32), "head": None}, {"body": None, "head": jnp.float32(0)}, {}, None
    )


def mlp_task(num_clients=3, num_classes=3, hidden=(), num_examples=15):
    """A linear model, or a network without statistics or dropout."""
    model = Linen(MLP(hidden, num_classes))
    return Task(model, Categorical(num_classes), (5,), num_clients, num_examples, Head(model.last_layer((5,))))


SOME_X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


def shared_out(points, prototypes, variance):
    """What clients at these points send under `linear`."""
    share = shares_of(points, prototypes, variance)
    offset = network_of(_among_all(share[..., None] * (points[:, None] - prototypes)))
    return Message(Update(Shares(np.float32(_among_all(share)), offset), {}, None), _there(points))


def stacked_messages(method, task, down, shards):
    """One message of each client."""
    num = shards.count.shape[0]
    state = init_client(method, task, down, rng.root(9))
    sent = [updated(method, task, down, state, shards.of(jnp.int32(k)), rng.root(k))[1] for k in range(num)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *sent)
