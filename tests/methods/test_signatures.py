"""Signatures and state types of methods to come, and of some that came: for the type checker, and for a test.

Each class here has the state and message types of its paper and no mathematics; that `Method` accepts it shows that the
protocol can hold it, and a protocol that changes so that one no longer fits fails here first. FedBE (whose server runs
the model on public inputs), SCAFFOLD (whose server and clients keep control variates) and kNN-Per (whose posterior
keeps the client's own examples) stand here because they strain it most; their bodies are real where the strain is.
"""

# mypy: disable-error-code="empty-body"

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from priory.core import rng, trees
from priory.core.rng import Key
from priory.core.struct import replace, struct
from priory.fed.alternate import Belief
from priory.fed.method import (
    Advice,
    Calibrates,
    Clusters,
    Compresses,
    Divergence,
    Draws,
    Effects,
    Evidence,
    Info,
    Knows,
    Message,
    Method,
    Population,
    Predictive,
    Task,
    Thins,
    Unlabelled,
    point,
)
from priory.fed.shard import Shard
from priory.methods import (
    cfedbayes,
    fedbe,
    fedbnn,
    fedhb_mixture,
    fedhb_niw,
    fedpop,
    fedvi,
    knn_per,
    pfedbayes,
    sfedbayes,
)
from priory.models.model import Params
from tests.methods.problems import tiny_shards, tiny_task

Weights = Any
Nothing = tuple[()]


@struct
class Control:
    """SCAFFOLD's server and message: weights and a control variate."""

    params: Params
    variate: Weights


@struct
class Scaffold:
    """Control variates on both sides; the server's moves by |S|/N of the mean change."""

    linear: ClassVar[bool] = False
    step_size: float = 0.1

    def check(self) -> None: ...

    def init(self, task: Task, key: Key) -> Control:
        params = task.init(key)
        return Control(params, jax.tree.map(jnp.zeros_like, params.weights))

    def broadcast(self, server: Control) -> Control:
        return server

    def enrol(self, task: Task, down: Control, key: Key) -> Weights:
        return jax.tree.map(jnp.zeros_like, down.variate)

    def client_update(
        self, task: Task, down: Control, client: Weights, data: Shard, key: Key
    ) -> tuple[Weights, Message[Control], Info]:
        gradient = jax.grad(lambda w: task.nll(Params(w, down.params.stats), data.padded(), key)[0])(
            down.params.weights
        )
        step = trees.add(trees.sub(gradient, client), down.variate)
        weights = trees.axpy(-self.step_size, step, down.params.weights)
        sent = Control(Params(weights, down.params.stats), trees.sub(gradient, client))
        return gradient, Message(sent, weight=jnp.float32(1)), {}

    def aggregate(self, task: Task, server: Control, messages: Message[Control], key: Key) -> tuple[Control, Info]:
        zero = Control(server.params, jax.tree.map(jnp.zeros_like, server.variate))
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=zero)
        share = jnp.sum(messages.weight > 0) / task.num_clients
        return Control(mean.params, trees.axpy(share, mean.variate, server.variate)), {}

    def personalise(self, task: Task, down: Control, client: Weights, data: Shard, key: Key) -> Params:
        return down.params

    def predict(self, task: Task, posterior: Params, x: Array, key: Key) -> Predictive:
        return point(task.model.apply(posterior, x)[0])


# The type checker's part of the test.
_pfedbayes: Method[Belief, Belief, Any, Any, Belief] = pfedbayes.PFedBayes()
_sfedbayes: Method[Belief, Belief, Any, sfedbayes.Update, Belief] = sfedbayes.SFedBayes()
_cfedbayes: Method[Belief, Belief, cfedbayes.Member, cfedbayes.Assigned, cfedbayes.Blend] = cfedbayes.CFedBayes()
_fedhbniw: Method[fedhb_niw.Prior, fedhb_niw.Prior, Weights, Any, fedhb_niw.Posterior] = fedhb_niw.FedHBNIW()
_fedhbmixture: Method[
    fedhb_mixture.Prototypes, fedhb_mixture.Prototypes, Any, fedhb_mixture.Update, fedhb_mixture.Experts
] = fedhb_mixture.FedHBMixture()
_fedvi: Method[fedvi.Server, Params, Nothing, Params, fedvi.Posterior] = fedvi.FedVI()
_fedbnn: Method[fedbnn.Server, Array, fedbnn.Client, Array, Belief] = fedbnn.FedBNN()
_fedpop: Method[fedpop.Server, fedpop.Down, Weights, fedpop.Gradients, fedpop.Samples] = fedpop.FedPop()
_fedbe: Method[Params, Params, Nothing, Params, Params] = fedbe.FedBE()
_scaffold: Method[Control, Control, Weights, Control, Params] = Scaffold()
_knn_per: Method[Params, Params, Nothing, Params, knn_per.Neighbours] = knn_per.KNNPer()
_selects: Population[Belief, cfedbayes.Blend] = cfedbayes.CFedBayes()
_sorts: Clusters[cfedbayes.Member] = cfedbayes.CFedBayes()
_certified: Divergence[Belief, Belief] = pfedbayes.PFedBayes()
_drawn: Draws[fedpop.Samples] = fedpop.FedPop()
_random: Effects[fedpop.Down, fedpop.Samples] = fedpop.FedPop()
_advised: Advice = fedpop.FedPop()
_inferred: Unlabelled[Params, fedvi.Posterior] = fedvi.FedVI()
_global_classifier: Population[Params, fedvi.Posterior] = fedvi.FedVI()
_last_layers: Draws[fedvi.Posterior] = fedvi.FedVI()
_compressed: Compresses = fedpop.FedPop()
_networks: Draws[Belief] = fedbnn.FedBNN()
_own_draws: Draws[fedhb_niw.Posterior] = fedhb_niw.FedHBNIW()
_bound: Evidence[fedhb_niw.Prior, Any] = fedhb_niw.FedHBNIW()
_mixture_bound: Evidence[fedhb_mixture.Prototypes, fedhb_mixture.Update] = fedhb_mixture.FedHBMixture()
_prototypes: Draws[fedhb_mixture.Experts] = fedhb_mixture.FedHBMixture()
_known: Knows[fedhb_niw.Prior] = fedhb_niw.FedHBNIW()
_tempered: Calibrates = pfedbayes.PFedBayes()
_thinned: Thins[Belief, sfedbayes.Update] = sfedbayes.SFedBayes()


@pytest.mark.parametrize(
    "method", [fedbe.FedBE(), Scaffold(), knn_per.KNNPer()], ids=lambda method: type(method).__name__
)
def test_the_strained_methods_go_through_every_verb(method: Any) -> None:
    task, shards = tiny_task(), tiny_shards()
    task = replace(task, public=jnp.ones((6, 5)))

    def life(key: Key) -> tuple[Any, Any, Predictive]:
        server = method.init(task, key)
        down = method.broadcast(server)
        client = method.enrol(task, down, rng.key(key, rng.Stream.ENROL))
        data = shards.of(jnp.int32(0))
        client, message, _ = method.client_update(task, down, client, data, rng.key(key, rng.Stream.CLIENT))
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), message)
        new, _ = method.aggregate(task, server, stack, rng.key(key, rng.Stream.SERVER))
        posterior = method.personalise(task, method.broadcast(new), client, data, rng.key(key, rng.Stream.COHORT))
        return server, new, method.predict(task, posterior, jnp.ones((2, 5)), rng.key(key, rng.Stream.EVALUATION))

    server, new, predictive = jax.eval_shape(life, rng.root(0))
    jax.tree.map(lambda before, after: None, server, new)  # raises unless the structures agree
    assert predictive.outputs.shape[1:] == (2, 3)
