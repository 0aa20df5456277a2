"""Markov kernels: the law that each chain settles to, its bookkeeping, and the step sizes.

Statistics come from independent chains, so a standard error is the spread over them; a test allows five.
"""

import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from priory.bayes import kernels
from priory.bayes.kernels import EXACT, KINDS

MEAN = np.array([1.0, -2.0])
PRECISIONS = {"diagonal": np.diag([1.0, 4.0]), "full": np.array([[2.0, 0.9], [0.9, 1.0]])}

each_kind = pytest.mark.parametrize("kind", KINDS)
each_precision = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS.keys())


def tree(vector):
    """Two numbers in two leaves of different shapes."""
    return {"a": vector[..., 0], "b": vector[..., 1:, None]}


def flat(position):
    return jnp.concatenate([position["a"][..., None], position["b"][..., 0]], axis=-1)


def normal(precision, mean=MEAN):
    """log N(z; m, P⁻¹) up to a constant, of a tree."""
    precision, mean = jnp.asarray(precision, jnp.float32), jnp.asarray(mean, jnp.float32)

    def log_density(z, key):
        del key
        away = flat(z) - mean
        return -0.5 * away @ precision @ away

    return log_density


def many(kind, log_density, step_size, *, chains=2000, start=MEAN, seed=0, **how):
    """Independent chains from one place, float64 positions (chains, kept, 2), and their acceptance rates."""

    def one(key):
        return kernels.sample(kind, log_density, tree(jnp.asarray(start, jnp.float32)), step_size, key, **how)

    chain = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(seed), chains))
    return np.asarray(flat(chain.kept), np.float64), np.asarray(chain.accepted)


def assert_mean(draws, value, standard_errors=5.0):
    """The mean over axis 0, of independent draws, is the value but for Monte-Carlo error."""
    error = np.std(draws, axis=0) / math.sqrt(len(draws))
    assert np.all(error > 0)
    assert np.all(np.abs(np.mean(draws, axis=0) - value) < standard_errors * error)


def assert_normal(kept, mean, covariance):
    """Chains (chains, kept, 2) have this mean and this covariance."""
    away = kept - mean
    assert_mean(np.mean(kept, axis=1), mean)
    assert_mean(np.mean(away[..., :, None] * away[..., None, :], axis=1), covariance)


@each_precision
def test_an_unadjusted_chain_settles_to_an_inflated_covariance(precision):
    gamma = 0.2
    kept, accepted = many("ula", normal(precision), gamma, num_steps=300, burn_in=60, thin=4)
    inflated = np.linalg.inv(precision) @ np.linalg.inv(np.eye(2) - gamma / 2 * precision)
    assert_normal(kept, MEAN, inflated)
    assert np.all(accepted == 1)


def test_the_inflated_variances_of_the_worked_example_are_these():
    kept, _ = many("ula", normal(PRECISIONS["diagonal"]), 0.2, num_steps=300, burn_in=60, thin=4)
    assert_mean(np.mean((kept - MEAN) ** 2, axis=1), [1.1111, 0.41667])


def test_a_small_step_leaves_hardly_any_inflation():
    # At γ = 0.01 the formula adds half a per cent to the variance 1 and two per cent to ¼.
    kept, _ = many("ula", normal(PRECISIONS["diagonal"]), 0.01, chains=1000, num_steps=1500, burn_in=500, thin=50)
    variance = np.mean((kept - MEAN) ** 2, axis=1)
    assert_mean(variance, [1 / 0.995, 0.25 / 0.98])
    np.testing.assert_allclose(np.mean(variance, axis=0), [1, 0.25], rtol=0.05)


@pytest.mark.parametrize(("share", "grows"), [(0.99, False), (1.01, True)])
@pytest.mark.parametrize("kind", ["ula", "sgld"])
def test_a_langevin_chain_diverges_just_above_the_stability_limit_and_not_below(kind, share, grows):
    precision = PRECISIONS["full"]
    gamma = share * kernels.stability_limit(kind, float(np.max(np.linalg.eigvalsh(precision))))
    kept, _ = many(kind, normal(precision), gamma, chains=10, num_steps=2000, burn_in=1999)
    # Below, the variance is at most P⁻¹/(1 − 0.99), ten standard deviations; above, 1.02²⁰⁰⁰ ≈ 10¹⁷.
    assert np.all(np.abs(kept - MEAN) > 1e6) == grows
    assert np.all(np.abs(kept - MEAN) < 1e3) != grows


@pytest.mark.parametrize(("share", "moves"), [(0.95, True), (1.05, False)])
def test_leapfrog_steps_are_accepted_below_the_stability_limit_and_not_above(share, moves):
    precision = PRECISIONS["diagonal"]
    epsilon = share * kernels.stability_limit("hmc", 4.0)
    _, accepted = many("hmc", normal(precision), epsilon, chains=50, num_steps=50, leapfrog=30)
    assert (np.mean(accepted) > 0.3) == moves
    assert (np.mean(accepted) < 0.01) != moves


@each_precision
@pytest.mark.parametrize(("kind", "step_size"), [("mala", 0.3), ("hmc", 0.6), ("nuts", 0.6)])
def test_an_exact_kernel_has_no_bias(kind, step_size, precision):
    # No small steps: acceptance is well below one, so that a wrong ratio would show. Two leapfrog steps and not three,
    # which take half a turn in one direction and come back to where they began.
    how = {"num_steps": 120, "burn_in": 40, "thin": 4, "leapfrog": 2}
    kept, accepted = many(kind, normal(precision), step_size, chains=1000 if kind == "nuts" else 4000, **how)
    assert_normal(kept, MEAN, np.linalg.inv(precision))
    assert np.all((accepted > 0.3) & (accepted < 0.999))


def test_the_chain_of_a_minibatch_gradient_has_the_same_mean():
    centres = jnp.array([[0.0, -1.0], [3.0, -3.0], [0.0, -2.0]])  # examples, whose mean is MEAN

    def log_density(z, key):
        chosen = centres[jax.random.randint(key, (), 0, 3)]
        return -0.5 * 3 * jnp.sum((flat(z) - chosen) ** 2)  # n/b = 3 times that of one example

    kept, _ = many("sgld", log_density, 0.05, num_steps=200, burn_in=40, thin=4)
    whole, _ = many("ula", normal(3 * np.eye(2)), 0.05, num_steps=200, burn_in=40, thin=4, seed=1)
    assert_mean(np.mean(kept, axis=1), MEAN)
    assert_mean(np.mean(kept, axis=1) - np.mean(whole, axis=1), 0.0)
    # Gradient noise of variance 9·2 and 9·⅔ joins the Langevin noise: 2γ becomes 2γ + γ² var, over 2γP(1 − γP/2).
    noise = 9 * np.var(np.asarray(centres), axis=0)
    assert_mean(np.mean((kept - MEAN) ** 2, axis=1), (1 + 0.05 / 2 * noise) / (3 * (1 - 0.05 * 3 / 2)))


def test_the_preconditioned_chain_has_the_right_mean():
    kept, _ = many("psgld", normal(PRECISIONS["full"]), 0.1, start=MEAN + 1, num_steps=400, burn_in=200, thin=10)
    assert_mean(np.mean(kept, axis=1), MEAN)


def test_the_preconditioned_step_is_that_of_rmsprop_with_noise_to_match():
    gamma, slope = 0.3, 50.0
    kept, _ = many("psgld", lambda z, key: slope * jnp.sum(flat(z)), gamma, start=[0.0, 0.0], num_steps=1)
    rate = gamma / (1e-5 + math.sqrt(0.99 + 0.01 * slope**2))
    assert_mean(kept[:, 0], rate * slope)
    assert_mean((kept[:, 0] - rate * slope) ** 2, 2 * rate)


def test_ascent_ends_at_the_mode():
    kept, _ = many("map", normal(PRECISIONS["full"]), 0.05, chains=2, start=[0.0, 0.0], num_steps=1000, burn_in=999)
    np.testing.assert_allclose(kept[:, 0], np.stack([MEAN, MEAN]), atol=1e-3)


@pytest.mark.parametrize("kind", ["ula", "mala", "map"])
def test_only_every_thinth_position_after_the_burn_in_is_kept(kind):
    start = tree(jnp.zeros(2))

    def run(num_steps, **how):
        density, key = normal(PRECISIONS["full"]), jax.random.key(3)
        return kernels.sample(kind, density, start, 0.3, key, num_steps=num_steps, **how)

    every = flat(run(8).kept)
    for n in (1, 4, 8):  # a chain of n steps is the beginning of a longer one
        np.testing.assert_allclose(flat(run(n).last), every[n - 1], rtol=1e-5)
    for burn_in, thin in ((3, 1), (2, 2), (1, 3), (7, 5)):
        chain = run(8, burn_in=burn_in, thin=thin)
        np.testing.assert_allclose(flat(chain.kept), every[burn_in::thin], rtol=1e-5)
        np.testing.assert_allclose(flat(chain.last), every[-1], rtol=1e-5)


def test_the_positions_of_ascent_are_those_of_a_loop_by_hand():
    start, density, adam = tree(jnp.zeros(2)), normal(PRECISIONS["full"]), optax.adam(0.3)
    position, state, every = start, adam.init(start), []
    for _ in range(5):
        slope = jax.grad(lambda z: -density(z, None))(position)
        moves, state = adam.update(slope, state)
        position = optax.apply_updates(position, moves)
        every.append(flat(position))
    chain = kernels.sample("map", density, start, 0.3, jax.random.key(0), num_steps=5, burn_in=1, thin=2)
    np.testing.assert_allclose(flat(chain.kept), jnp.stack(every)[1::2], rtol=1e-5)


def sizes_in(jaxpr):
    """Numbers in each array that a program makes, its loops included."""
    for eqn in jaxpr.eqns:
        yield from (math.prod(v.aval.shape) for v in eqn.outvars)
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from sizes_in(inner)


def test_a_chain_takes_the_memory_of_what_it_keeps_and_a_bounded_block_of_noise(monkeypatch):
    def run(key):
        return kernels.sample(
            "ula", lambda z, _: -jnp.sum(z * z), jnp.zeros(1000), 0.1, key, num_steps=500, burn_in=495
        )

    monkeypatch.setattr(kernels, "NOISE_AT_ONCE", 20_000)
    program = jax.make_jaxpr(run)(jax.random.key(0)).jaxpr
    assert max(math.prod(v.aval.shape) for eqn in program.eqns for v in eqn.outvars) == (5 + 1) * 1000
    assert max(sizes_in(program)) <= 20_480  # rounded up to whole lots


def test_where_noise_is_drawn_in_blocks_every_step_has_its_own(monkeypatch):
    def steps(at_once):
        monkeypatch.setattr(kernels, "NOISE_AT_ONCE", at_once)
        start = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
        chain = kernels.sample("ula", lambda z, _: 0.0 * z["a"][0], start, 0.5, jax.random.key(0), num_steps=4001)
        return np.diff(
            np.hstack([chain.kept["a"], chain.kept["b"]]), axis=0
        ).ravel()  # √(2γ) ξ with γ = ½: standard normal

    for at_once in (50, 7000, 10**6):  # 10 steps in a block, three blocks of which the last is shorter, one block
        noise = steps(at_once)
        assert len(np.unique(noise)) > 0.99 * len(noise)
        assert abs(noise.mean()) < 4 / len(noise) ** 0.5
        assert abs(noise.var() - 1) < 4 * (2 / len(noise)) ** 0.5


@each_kind
def test_one_key_gives_one_chain_and_another_key_another(kind):
    def run(seed):
        start, density = tree(jnp.zeros(2)), normal(PRECISIONS["full"])
        return kernels.sample(kind, density, start, 0.3, jax.random.key(seed), num_steps=5)

    np.testing.assert_array_equal(flat(run(0).kept), flat(run(0).kept))
    assert np.array_equal(flat(run(0).last), flat(run(1).last)) == (kind == "map")


@each_kind
def test_chains_side_by_side_are_those_one_after_the_other_on_two_devices(kind):
    def one(key):
        start, density = tree(jnp.zeros(2)), normal(PRECISIONS["full"])
        return kernels.sample(kind, density, start, 0.3, key, num_steps=6, burn_in=2)

    def keys():
        return jax.random.split(jax.random.key(0), 4)

    beside = jax.jit(jax.vmap(one))(keys())
    mesh, spec = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec("d")
    loop = jax.shard_map(lambda keys: jax.lax.map(one, keys), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert flat(beside.kept).shape == (4, 4, 2)
    np.testing.assert_allclose(flat(beside.kept), flat(jax.jit(loop)(keys()).kept), rtol=1e-4)


@pytest.mark.parametrize("kind", EXACT)
def test_the_target_of_an_exact_kernel_stays_one_density_whatever_it_draws(kind):
    def log_density(z, key):
        return -0.5 * 1e4 * jnp.sum((flat(z) - 10 * jax.random.normal(key, (2,))) ** 2)

    how = {"num_steps": 400, "burn_in": 300, "start": [0.0, 0.0]}
    kept, _ = many(kind, log_density, kernels.step_size_for(kind, 1e4), chains=4, **how)
    assert np.max(np.std(kept, axis=1)) < 0.02  # that of the target is 0.01; its centres are tens apart
    assert np.min(np.std(np.mean(kept, axis=1), axis=0)) > 1


def test_the_curvature_of_a_quadratic_is_its_largest_eigenvalue():
    for precision in PRECISIONS.values():
        found = kernels.curvature(normal(precision), tree(jnp.zeros(2)), jax.random.key(0), num_iterations=30)
        np.testing.assert_allclose(found, np.max(np.linalg.eigvalsh(precision)), rtol=1e-4)


def test_ten_iterations_come_from_below_and_near_enough_for_half_the_limit():
    spectrum = jnp.linspace(0.1, 7.0, 400)
    for seed in range(5):
        found = kernels.curvature(lambda z, _: -0.5 * jnp.sum(spectrum * z * z), jnp.ones(400), jax.random.key(seed))
        assert 0.8 * 7 < found <= 7 * (1 + 1e-5)


def test_the_curvature_is_that_at_the_position():
    def quartic(z, key):
        del key
        return -jnp.sum(z**4)

    at = [kernels.curvature(quartic, jnp.array([z, 0.1]), jax.random.key(0)) for z in (1.0, 3.0)]
    np.testing.assert_allclose(at, [12.0, 108.0], rtol=1e-4)


@pytest.mark.parametrize("slope", [0.0, 1.0], ids=["constant", "linear"])
def test_a_density_without_curvature_gives_finite_steps(slope):
    flatness = kernels.curvature(lambda z, _: slope * jnp.sum(z), jnp.zeros(3), jax.random.key(0))
    assert flatness == np.float32(kernels.FLATTEST)
    assert all(jnp.isfinite(kernels.step_size_for(kind, flatness)) for kind in KINDS)


def test_a_density_that_curves_upwards_is_told_by_its_magnitude():
    found = kernels.curvature(lambda z, _: 1.5 * jnp.sum(z * z), jnp.ones(3), jax.random.key(0))
    np.testing.assert_allclose(found, 3.0, rtol=1e-5)


@each_kind
def test_the_chosen_step_is_at_most_half_the_stability_limit(kind):
    for size in (1, 650):
        step, limit = kernels.step_size_for(kind, 4.0, size), kernels.stability_limit(kind, 4.0)
        assert 0 < step <= limit / 2
        assert step.dtype == limit.dtype == jnp.float32


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("size", [1, 650])
def test_the_chosen_step_is_accepted_from_the_mode_when_all_directions_are_stiff(kind, size):
    step = kernels.step_size_for(kind, 4.0, size)
    run = jax.jit(lambda key: kernels.sample(kind, stiff, jnp.zeros(size), step, key, num_steps=100).accepted)
    assert run(jax.random.key(0)) > 0.6


def stiff(z, key):
    del key
    return -2 * jnp.sum(z * z)
