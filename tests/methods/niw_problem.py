"""A federation of linear regressions for the tests of FedHB-NIW: six weights, of which dropout touches four."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedHBNIW, Optimiser, Work
from priory.core import rng
from priory.fed.method import Task
from priory.methods.fedhb_niw import Prior
from priory.models import Head, as_model
from priory.models.likelihood import Gaussian
from tests.methods.problems import shards_from
from tests.methods.verbs import aggregated, updated

KEPT = np.array([1, 1, 0, 0, 0, 0])  # which of the flat weights (bias first) have probability 1 whatever `keep` is

each_dim = pytest.mark.parametrize("dim", ["joint", "factorised"])


def weights_of(vector):
    """Six numbers as a bias and a kernel; a stack of rows as a stack of both."""
    vector = np.asarray(vector)
    return {"bias": vector[..., :2], "kernel": vector[..., 2:, None]}


def flat(weights):
    """All numbers of a tree in one row, in float64."""
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(weights)])


def prior_at(mean, scale):
    """What is broadcast where the whole network is learned."""
    return Prior(mean, scale, jax.tree.map(lambda _: None, mean), {})


def constants(dim, num_examples, num_weights=6):
    """The d of the formulas, n0 and l0."""
    d = num_weights if dim == "joint" else 1
    return d, num_examples + d + 2, num_examples + 1


def pinned(**options):
    """The method with every field written down: the tests do not follow its defaults."""
    fields = {
        "keep": 1.0, "epsilon": 1e-4, "prior_scale": 1.0, "kl_scale": 1.0,
        "dim": "factorised", "precision": "mode", "prior_mean": "plain", "learn_scale": False,
        "update": "full", "stateful": False, "linear": False, "global_samples": 0, "personal_samples": 0,
        "optimiser": Optimiser("sgd", 0.1), "work": Work(epochs=1, batch_size=32),
        "finetune_epochs": 5, "finetune_step_size": 0.01,
    }  # fmt: skip
    assert fields.keys() == {field.name for field in dataclasses.fields(FedHBNIW)}
    return FedHBNIW(**fields | options)


def next_server(method, task, server, messages):
    return aggregated(method, task, server, messages, rng.root(0))[0]


def regression_init(key, input_shape):
    del key, input_shape
    return jax.tree.map(jnp.asarray, weights_of(np.zeros(6, np.float32)))


def regression_apply(weights, x):
    """Outputs x·w for the flat w, bias first."""
    return x[:, :2] @ weights["bias"][:, None] + x[:, 2:] @ weights["kernel"]


SD = 0.7
COUNTS = (8, 12, 9, 11)
REGRESSION = Task(as_model((regression_init, regression_apply)), Gaussian(SD), (6,), 4, sum(COUNTS), Head("kernel"))


def regression_data(counts=COUNTS, seed=0):
    """Inputs and targets of all clients, and their shards; every client has weights of its own."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(sum(counts), 6))
    own = np.repeat(draw.normal(0.5, 0.6, (len(counts), 6)), counts, axis=0)
    y = np.sum(x * own, axis=1) + SD * draw.normal(size=len(x))
    return x, y, shards_from(x.astype(np.float32), y.astype(np.float32), counts)


X, Y, SHARDS = regression_data()
FIRST = SHARDS.of(jnp.int32(0))  # the first eight rows
M0 = np.array([0.1, -0.2, 0.3, 0.4, -0.5, 0.6])
V0 = np.array([20.0, 35.0, 50.0, 10.0, 5.0, 80.0])
DOWN = prior_at(weights_of(np.float32(M0)), weights_of(np.float32(V0)))


def sent(method, task=REGRESSION, down=DOWN, client=(), data=FIRST, seed=0):
    """What a client sends."""
    return updated(method, task, down, client, data, rng.root(seed))[1].payload


def precision_of(dim, precision, keep=1.0):
    d, n0, _ = constants(dim, sum(COUNTS))
    return np.where(KEPT, 1.0, keep) * (n0 + d + 1 if precision == "mode" else n0) / V0
