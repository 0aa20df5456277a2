"""Signatures and state types of the methods: for the type checker, and for a test.

A protocol that changes so that a method no longer fits fails here first. FedBE (whose server runs the model on public
inputs), SCAFFOLD (whose server and clients keep control variates) and kNN-Per (whose posterior keeps the client's own
examples) strain it most, and go through every verb.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from priory.core import rng
from priory.core.rng import Key
from priory.core.struct import replace
from priory.fed.alternate import Belief
from priory.fed.clusters import Assigned
from priory.fed.method import (
    Advice,
    Calibrates,
    Clusters,
    Compresses,
    Divergence,
    Draws,
    Effects,
    Evidence,
    Knows,
    Method,
    Parted,
    Population,
    Predictive,
    Thins,
    Unbiased,
    Unlabelled,
)
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
    scaffold,
    sfedbayes,
)
from priory.models.model import Params
from tests.methods.problems import tiny_shards, tiny_task

Weights = Any
Nothing = tuple[()]

# The type checker's part of the test.
_pfedbayes: Method[Belief, Belief, Any, Any, Belief] = pfedbayes.PFedBayes()
_sfedbayes: Method[Belief, Belief, Any, sfedbayes.Update, Belief] = sfedbayes.SFedBayes()
_cfedbayes: Method[Belief, Belief, cfedbayes.Member, Assigned, cfedbayes.Blend] = cfedbayes.CFedBayes()
_fedhbniw: Method[fedhb_niw.Prior, fedhb_niw.Prior, Weights, Any, fedhb_niw.Posterior] = fedhb_niw.FedHBNIW()
_fedhbmixture: Method[
    fedhb_mixture.Prototypes, fedhb_mixture.Prototypes, Any, fedhb_mixture.Update, fedhb_mixture.Experts
] = fedhb_mixture.FedHBMixture()
_fedvi: Method[fedvi.Server, Params, Nothing, Params, fedvi.Posterior] = fedvi.FedVI()
_fedbnn: Method[fedbnn.Server, Array, fedbnn.Client, Array, Belief] = fedbnn.FedBNN()
_fedpop: Method[fedpop.Server, fedpop.Down, Weights, fedpop.Gradients, fedpop.Samples] = fedpop.FedPop()
_fedbe: Method[Params, Params, Nothing, Params, Params] = fedbe.FedBE()
_scaffold: Method[scaffold.Control, scaffold.Control, Weights, scaffold.Control, Params] = scaffold.Scaffold()
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
_parted: Parted = fedpop.FedPop()
_unbiased: Unbiased = fedpop.FedPop()
_networks: Draws[Belief] = fedbnn.FedBNN()
_own_draws: Draws[fedhb_niw.Posterior] = fedhb_niw.FedHBNIW()
_bound: Evidence[fedhb_niw.Prior, Any] = fedhb_niw.FedHBNIW()
_mixture_bound: Evidence[fedhb_mixture.Prototypes, fedhb_mixture.Update] = fedhb_mixture.FedHBMixture()
_prototypes: Draws[fedhb_mixture.Experts] = fedhb_mixture.FedHBMixture()
_known: Knows[fedhb_niw.Prior] = fedhb_niw.FedHBNIW()
_tempered: Calibrates = pfedbayes.PFedBayes()
_thinned: Thins[Belief, sfedbayes.Update] = sfedbayes.SFedBayes()


@pytest.mark.parametrize(
    "method", [fedbe.FedBE(), scaffold.Scaffold(), knn_per.KNNPer()], ids=lambda method: type(method).__name__
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
