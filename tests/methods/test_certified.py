"""What each method certifies: the divergence it pays, what it draws, and what it refuses."""

import math
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from priory import methods
from priory.bayes import gaussian, population
from priory.bayes.gaussian import Gaussian
from priory.certificate import check, count
from priory.core import rng, trees
from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.fed.capabilities import Certifies
from priory.fed.method import Task
from priory.methods._blocks.coupled_vi import VariationalParams
from priory.methods._blocks.local_classifier import glorot
from priory.methods.cfedbayes import Blend, CFedBayes
from priory.methods.fedbnn import FedBNN
from priory.methods.fedhb_mixture import Experts, FedHBMixture, Prototypes
from priory.methods.fedhb_niw import FedHBNIW, Posterior, Prior
from priory.methods.fedpop import Down, FedPop, Samples
from priory.methods.fedvi import FedVI
from priory.methods.pfedbayes import PFedBayes
from priory.models.likelihood import Categorical
from priory.models.linen import Linen
from priory.models.model import Head, Params
from tests.methods import verbs
from tests.methods.problems import METHODS, tiny_shards, tiny_task

CERTIFYING = ["fedhb-niw", "fedhb-mixture", "pfedbayes", "sfedbayes", "cfedbayes", "fedpop", "fedvi"]


class Plain(nn.Module):
    """A body and a head, without statistics."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return nn.Dense(3)(nn.relu(nn.Dense(5)(x)))


MODEL = Linen(Plain())
TASK = Task(MODEL, Categorical(3), (5,), 3, 15, Head(MODEL.last_layer((5,))))
POINT = {"a": np.array([0.5, -1.0], np.float32), "b": np.array([2.0], np.float32)}
OTHER = {"a": np.array([0.0, 0.2], np.float32), "b": np.array([1.0], np.float32)}


@cache
def population_of(name):
    """A method, what it broadcasts before the first round, and the model of the population."""
    method, keys = METHODS[name](), jax.random.split(jax.random.key(5))
    down = verbs.broadcast(method, verbs.init_server(method, TASK, keys[0]))
    return method, down, verbs.population(method, TASK, down, None, keys[1])


@partial(jax.jit, static_argnames="num")
def certified(method, down, posterior, num=1):
    """The divergence that is paid, and so many draws."""
    found = method.certified(TASK, down, posterior)
    keys = jax.random.split(jax.random.key(0), num)
    return found.divergence, jax.lax.map(lambda key: found.draw(key).weights, keys)


def test_the_methods_that_certify_are_these_and_all_others_say_why_not():
    assert [name for name in methods.REGISTRY if isinstance(METHODS[name](), Certifies)] == CERTIFYING
    for name in methods.REGISTRY.keys() - set(CERTIFYING):
        with pytest.raises(UsageError, match=rf"^{name} has no certificate: .*; choose .*\.$"):
            check(METHODS[name](), name, TASK, 0.05, 1000)


@jax.jit
def counted(method, down, posterior, data, key):
    return count(method, TASK, down, posterior, data, key, 20)


@pytest.mark.parametrize("name", CERTIFYING)
def test_a_posterior_has_a_divergence_and_draws_that_answer(name):
    method, down, posterior = population_of(name)
    check(method, name, TASK, 0.05, 1000)
    data = tiny_shards().of(jnp.int32(0))
    found = counted(method, down, posterior, data, jax.random.key(1))
    assert 0 <= float(found.divergence) < math.inf
    assert found.labels.sum() == 7
    assert ((found.wrong >= 0) & (found.wrong <= 7)).all()
    assert len(np.unique(found.wrong)) > 1, "the draws differ"


@pytest.mark.parametrize("name", [name for name in CERTIFYING if name not in ("fedpop", "fedvi")])
def test_statistics_of_the_clients_own_are_refused(name):
    with pytest.raises(UsageError, match=f"{name} has no certificate: the statistics of its batch norm"):
        check(METHODS[name](), name, tiny_task(), 0.05, 1000)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (FedHBNIW(update="body"), "update=body leaves a head that has no prior"),
        (FedHBMixture(update="body"), "update=body leaves a head that has no prior"),
        (FedPop(prior="energy"), "known but for its normaliser"),
        (FedPop(chains=1, samples=1), "leave one draw, which has no width"),
        (FedBNN(), "ψ is fitted to what the client itself says"),
        (METHODS["fedavg"](), "a single network is infinitely far from every prior"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_voids_a_certificate_is_named(method, reason):
    with pytest.raises(UsageError, match=reason):
        check(method, "it", TASK, 0.05, 1000)


def test_cfedbayes_pays_log_k_for_the_choice_of_its_prior():
    free = gaussian.around(POINT, -1.0)
    prior = gaussian.around(OTHER, -1.0)
    single, _ = certified(PFedBayes(), VariationalParams(prior, ()), VariationalParams(free, ()))
    stacked = jax.tree.map(lambda leaf: np.stack([np.asarray(leaf) + 1, leaf]), prior)
    own = Blend(jax.tree.map(lambda leaf: np.asarray(leaf)[None], free), (), jnp.array([1]))
    several, _ = certified(CFedBayes(clusters=2), VariationalParams(stacked, ()), own)
    assert float(several) == pytest.approx(float(single) + math.log(2), rel=1e-6)


def test_niw_pays_for_the_way_of_the_mean_at_the_width_of_the_population():
    method = FedHBNIW()
    down = Prior(OTHER, jax.tree.map(lambda leaf: np.full_like(leaf, 4.0), OTHER), {}, ())
    found, drawn = certified(method, down, Posterior(Params(POINT), None, 1), 4000)
    variance = 4.0 / (TASK.num_examples + 1 + 2 + 1 + 1)  # V0 / (n0 + d + 1) with n0 = |D| + d + 2 and d = 1
    away = sum(float(np.sum((POINT[name] - OTHER[name]) ** 2)) for name in POINT)
    assert float(found) == pytest.approx(away / (2 * variance), rel=1e-5)
    drawn = np.asarray(drawn["a"])
    np.testing.assert_allclose(drawn.mean(axis=0), POINT["a"], atol=4 * math.sqrt(variance / 4000))
    np.testing.assert_allclose(drawn.std(axis=0), math.sqrt(variance), rtol=4 / math.sqrt(2 * 4000))


def test_the_mixture_pays_at_least_the_divergence_from_the_mixture_of_prototypes():
    method, num = FedHBMixture(num_prototypes=2, variance=0.5), 20_000
    prototypes = jax.tree.map(lambda a, b: np.stack([a + np.float32(0.3), b]), POINT, OTHER)
    down = Prototypes(prototypes, {}, (), None)
    found, drawn = certified(method, down, Experts(_lone(POINT), (), None), num)

    def log_density(centre):
        return sum(norm.logpdf(drawn[name], centre[name], math.sqrt(0.5)).sum(axis=1) for name in POINT)

    each = [log_density({name: leaf[j] for name, leaf in prototypes.items()}) for j in range(2)]
    ratio = log_density(POINT) - logsumexp(each, axis=0) + math.log(2)
    assert float(found) >= ratio.mean() - 4 * ratio.std() / math.sqrt(num)
    assert float(found) <= ratio.mean() + math.log(2)  # no more than a choice among two would cost


def test_fedpop_certifies_a_gaussian_with_the_moments_of_its_draws_on_the_broadcast_body():
    method = FedPop()
    z, phi = trees.partition(verbs.parameters(TASK, rng.root(0)).weights, TASK.is_head)
    zs = _spread(z, (2, 40))
    beta = population.normal_around(z, 0.7)
    lost = jax.tree.map(lambda leaf: np.full_like(leaf, jnp.nan), phi)  # of the client: must not be used
    found, drawn = certified(method, Down(phi, beta, (), ()), Samples(Params(lost), zs), 2000)
    flat = jax.tree.map(lambda leaf: leaf.reshape(80, *leaf.shape[2:]), zs)
    q = Gaussian(jax.tree.map(lambda leaf: leaf.mean(0), flat), jax.tree.map(lambda leaf: leaf.std(0), flat))
    prior = Gaussian(z, jax.tree.map(lambda leaf: np.full_like(leaf, 0.7), z))
    assert float(found) == pytest.approx(float(jax.jit(gaussian.kl)(q, prior)), rel=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(drawn))
    head = trees.partition(drawn, TASK.is_head)[0]
    jax.tree.map(
        lambda x, m, s: np.testing.assert_array_less(np.abs(np.mean(x, 0) - m), 5 * s / math.sqrt(2000)),
        head,
        q.mean,
        q.sd,
    )


def test_fedpop_under_draws_of_its_prior_pays_no_more_than_for_the_nearest_and_their_number():
    z, phi = trees.partition(verbs.parameters(TASK, rng.root(0)).weights, TASK.is_head)
    zs = _spread(z, (1, 40))
    betas = [
        population.normal_around(jax.tree.map(lambda leaf, s=s: np.asarray(leaf) + np.float32(s), z), 0.5)
        for s in (0.0, 3.0)
    ]
    crowd = jax.tree.map(lambda *leaves: np.stack(leaves), *betas)
    own = Samples(Params(phi), zs)
    both, _ = certified(FedPop(prior_draws=2), Down(phi, betas[0], (), crowd), own)
    near, _ = certified(FedPop(), Down(phi, betas[0], (), ()), own)
    assert float(near) <= float(both) <= float(near) + math.log(2) + 1e-4


def test_fedvi_pays_for_a_bias_of_the_clients_own_and_takes_the_network_as_it_was_broadcast():
    method, down, posterior = population_of("fedvi")
    local = replace(posterior.local, bias=np.array([0.3, -0.2, 0.1], np.float32))
    lost = jax.tree.map(lambda leaf: np.full_like(leaf, jnp.nan), posterior.theta)
    found, drawn = certified(method, down, replace(posterior, theta=lost, local=local), 2000)
    width = glorot(*local.mean.shape)
    at_zero = replace(posterior, local=replace(local, bias=np.zeros(3, np.float32)))
    without, _ = certified(method, down, at_zero, 2000)
    assert float(found) - float(without) == pytest.approx(0.14 / (2 * width**2), rel=1e-4)
    drawn = np.asarray(drawn["Dense_0"]["bias"])
    shared = np.asarray(down.weights["classifier"]["bias"])
    np.testing.assert_allclose(drawn.mean(0), shared + local.bias, atol=4 * width / math.sqrt(2000))
    np.testing.assert_allclose(drawn.std(0), width, rtol=4 / math.sqrt(2 * 2000))
    at_prior = verbs.population(method, TASK, down, None, jax.random.key(0))
    assert float(certified(method, down, at_prior, 2000)[0]) == pytest.approx(0.0, abs=1e-4)


def test_fedvi_draws_the_network_of_its_gaussian_over_theta_from_what_was_broadcast():
    method = FedVI(gamma=1.0)
    down = verbs.broadcast(method, verbs.init_server(method, TASK, jax.random.key(2)))
    at_prior = verbs.population(method, TASK, down, None, jax.random.key(0))
    found, drawn = certified(method, down, at_prior, 5)
    assert float(found) == pytest.approx(0.0, abs=1e-4)  # θ is drawn from the same q(θ) under q and prior
    assert float(np.std(drawn["Dense_1"]["kernel"], axis=0).max()) > 0


def _spread(tree, chains):
    """Draws around a tree."""
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: np.float32(leaf + 0.3 * draw.normal(size=(*chains, *leaf.shape))), tree)


def _lone(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], tree)
