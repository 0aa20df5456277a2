"""Markov kernels: the law that each chain settles to, its bookkeeping, and the step sizes.

Statistics come from independent chains, so a standard error is the spread over them; a test allows five.
"""

import math
from functools import cache, partial

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


def normal(z, key, precision):
    """log N(z; m, P⁻¹) up to a constant, of a tree."""
    del key
    away = flat(z) - jnp.asarray(MEAN, jnp.float32)
    return -0.5 * away @ precision @ away


def of(density, parameters):
    """A density with its parameters, which stay traced: tests that differ in them share a program."""
    return lambda z, key: density(z, key, *parameters)


def numbers(values):
    return np.asarray(values, np.float32)


HOW = ("num_steps", "burn_in", "thin", "leapfrog")


@partial(jax.jit, static_argnames=("kind", "density", "chains", *HOW))
def _many(kind, density, parameters, step_size, start, seed, chains, **how):
    def one(key):
        return kernels.sample(kind, of(density, parameters), tree(start), step_size, key, **how)

    chain = jax.vmap(one)(jax.random.split(jax.random.key(seed), chains))
    return flat(chain.kept), chain.accepted


def many(kind, density, step_size, *parameters, chains=2000, start=MEAN, seed=0, **how):
    """Independent chains from one place, float64 positions (chains, kept, 2), and their acceptance rates."""
    parameters = tuple(map(numbers, parameters))
    kept, accepted = _many(kind, density, parameters, step_size, numbers(start), seed, chains, **how)
    return np.asarray(kept, np.float64), np.asarray(accepted)


@partial(jax.jit, static_argnames=("kind", *HOW))
def single(kind, precision, seed, **how):
    """The positions that one chain from zero keeps, with steps of 0.3, and the last."""
    chain = kernels.sample(kind, of(normal, (precision,)), tree(jnp.zeros(2)), 0.3, jax.random.key(seed), **how)
    return flat(chain.kept), flat(chain.last)


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


SETTLED = {"num_steps": 300, "burn_in": 60, "thin": 4}


@cache
def unadjusted(name):
    return many("ula", normal, 0.2, PRECISIONS[name], **SETTLED)


@pytest.mark.parametrize("name", PRECISIONS)
def test_an_unadjusted_chain_settles_to_an_inflated_covariance(name):
    precision = PRECISIONS[name]
    kept, accepted = unadjusted(name)
    inflated = np.linalg.inv(precision) @ np.linalg.inv(np.eye(2) - 0.2 / 2 * precision)
    assert_normal(kept, MEAN, inflated)
    assert np.all(accepted == 1)


def test_the_inflated_variances_of_the_worked_example_are_these():
    kept, _ = unadjusted("diagonal")
    assert_mean(np.mean((kept - MEAN) ** 2, axis=1), [1.1111, 0.41667])


def test_a_small_step_leaves_hardly_any_inflation():
    # At γ = 0.01 the formula adds half a per cent to the variance 1 and two per cent to ¼.
    kept, _ = many("ula", normal, 0.01, PRECISIONS["diagonal"], chains=1000, num_steps=1500, burn_in=500, thin=50)
    variance = np.mean((kept - MEAN) ** 2, axis=1)
    assert_mean(variance, [1 / 0.995, 0.25 / 0.98])
    np.testing.assert_allclose(np.mean(variance, axis=0), [1, 0.25], rtol=0.05)


@pytest.mark.parametrize(("share", "grows"), [(0.99, False), (1.01, True)])
@pytest.mark.parametrize("kind", ["ula", "sgld"])
def test_a_langevin_chain_diverges_just_above_the_stability_limit_and_not_below(kind, share, grows):
    precision = PRECISIONS["full"]
    gamma = share * kernels.stability_limit(kind, float(np.max(np.linalg.eigvalsh(precision))))
    kept, _ = many(kind, normal, gamma, precision, chains=10, num_steps=2000, burn_in=1999)
    # Below, the variance is at most P⁻¹/(1 − 0.99), ten standard deviations; above, 1.02²⁰⁰⁰ ≈ 10¹⁷.
    assert np.all(np.abs(kept - MEAN) > 1e6) == grows
    assert np.all(np.abs(kept - MEAN) < 1e3) != grows


@pytest.mark.parametrize(("share", "moves"), [(0.95, True), (1.05, False)])
def test_leapfrog_steps_are_accepted_below_the_stability_limit_and_not_above(share, moves):
    precision = PRECISIONS["diagonal"]
    epsilon = share * kernels.stability_limit("hmc", 4.0)
    _, accepted = many("hmc", normal, epsilon, precision, chains=50, num_steps=50, leapfrog=30)
    assert (np.mean(accepted) > 0.3) == moves
    assert (np.mean(accepted) < 0.01) != moves


@each_precision
@pytest.mark.parametrize(
    ("kind", "step_size"), [("mala", 0.3), ("hmc", 0.6), pytest.param("nuts", 0.6, marks=pytest.mark.slow)]
)
def test_an_exact_kernel_has_no_bias(kind, step_size, precision):
    # No small steps: acceptance is well below one, so that a wrong ratio would show. Two leapfrog steps and not three,
    # which take half a turn in one direction and come back to where they began.
    chains, num_steps = (400, 80) if kind == "nuts" else (2000, 120)  # a step of nuts is many
    how = {"num_steps": num_steps, "burn_in": num_steps // 3, "thin": 4, "leapfrog": 2}
    kept, accepted = many(kind, normal, step_size, precision, chains=chains, **how)
    assert_normal(kept, MEAN, np.linalg.inv(precision))
    assert np.all((accepted > 0.3) & (accepted < 0.999))


CENTRES = np.array([[0.0, -1.0], [3.0, -3.0], [0.0, -2.0]])  # examples, whose mean is MEAN


def of_one_example(z, key, centres):
    chosen = centres[jax.random.randint(key, (), 0, 3)]
    return -0.5 * 3 * jnp.sum((flat(z) - chosen) ** 2)  # n/b = 3 times that of one example


def test_the_chain_of_a_minibatch_gradient_has_the_same_mean():
    kept, _ = many("sgld", of_one_example, 0.05, CENTRES, **SETTLED)
    whole, _ = many("ula", normal, 0.05, 3 * np.eye(2), seed=1, **SETTLED)
    assert_mean(np.mean(kept, axis=1), MEAN)
    assert_mean(np.mean(kept, axis=1) - np.mean(whole, axis=1), 0.0)
    # Gradient noise of variance 9·2 and 9·⅔ joins the Langevin noise: 2γ becomes 2γ + γ² var, over 2γP(1 − γP/2).
    noise = 9 * np.var(CENTRES, axis=0)
    assert_mean(np.mean((kept - MEAN) ** 2, axis=1), (1 + 0.05 / 2 * noise) / (3 * (1 - 0.05 * 3 / 2)))


def test_the_preconditioned_chain_has_the_right_mean():
    kept, _ = many("psgld", normal, 0.1, PRECISIONS["full"], start=MEAN + 1, num_steps=400, burn_in=200, thin=10)
    assert_mean(np.mean(kept, axis=1), MEAN)


def sloped(z, key, slope):
    del key
    return slope * jnp.sum(flat(z))


def test_the_preconditioned_step_is_that_of_rmsprop_with_noise_to_match():
    gamma, slope = 0.3, 50.0
    kept, _ = many("psgld", sloped, gamma, slope, start=[0.0, 0.0], num_steps=1)
    rate = gamma / (1e-5 + math.sqrt(0.99 + 0.01 * slope**2))
    assert_mean(kept[:, 0], rate * slope)
    assert_mean((kept[:, 0] - rate * slope) ** 2, 2 * rate)


def test_ascent_ends_at_the_mode():
    kept, _ = many("map", normal, 0.05, PRECISIONS["full"], chains=2, start=[0.0, 0.0], num_steps=1000, burn_in=999)
    np.testing.assert_allclose(kept[:, 0], np.stack([MEAN, MEAN]), atol=1e-3)


# Bookkeeping is the same for all kinds, and ascent compiles fastest.
KEPT = {
    "map": ((1, 4, 8), ((3, 1), (2, 2), (1, 3), (7, 5))),
    "ula": ((4, 8), ((3, 1), (1, 3))),
    "mala": ((1, 8), ((2, 2), (7, 5))),
}


@pytest.mark.parametrize("kind", KEPT)
def test_only_every_thinth_position_after_the_burn_in_is_kept(kind):
    lengths, cuts = KEPT[kind]
    run = partial(single, kind, numbers(PRECISIONS["full"]), 3)
    every, _ = run(num_steps=8)
    for n in lengths:  # a chain of n steps is the beginning of a longer one
        np.testing.assert_allclose(run(num_steps=n)[1], every[n - 1], rtol=1e-5)
    for burn_in, thin in cuts:
        kept, last = run(num_steps=8, burn_in=burn_in, thin=thin)
        np.testing.assert_allclose(kept, every[burn_in::thin], rtol=1e-5)
        np.testing.assert_allclose(last, every[-1], rtol=1e-5)


@jax.jit
def ascent_by_hand(precision):
    position, adam = tree(jnp.zeros(2)), optax.adam(0.3)
    state, every = adam.init(position), []
    for _ in range(5):
        slope = jax.grad(lambda z: -normal(z, None, precision))(position)
        moves, state = adam.update(slope, state)
        position = optax.apply_updates(position, moves)
        every.append(flat(position))
    return jnp.stack(every)


def test_the_positions_of_ascent_are_those_of_a_loop_by_hand():
    precision = numbers(PRECISIONS["full"])
    kept, _ = single("map", precision, 0, num_steps=5, burn_in=1, thin=2)
    np.testing.assert_allclose(kept, np.asarray(ascent_by_hand(precision))[1::2], rtol=1e-5)


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

        def run(key):
            start = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
            return kernels.sample("ula", lambda z, _: 0.0 * z["a"][0], start, 0.5, key, num_steps=4001).kept

        kept = jax.jit(run)(jax.random.key(0))
        # √(2γ) ξ with γ = ½: standard normal
        return np.diff(np.hstack([kept["a"], kept["b"]]), axis=0).ravel()

    for at_once in (50, 7000, 10**6):  # 10 steps in a block, three blocks of which the last is shorter, one block
        noise = steps(at_once)
        assert len(np.unique(noise)) > 0.99 * len(noise)
        assert abs(noise.mean()) < 4 / len(noise) ** 0.5
        assert abs(noise.var() - 1) < 4 * (2 / len(noise)) ** 0.5


def around_a_draw(z, key, precision, spread):
    """log N(z; m + spread · ξ, P⁻¹), where ξ is drawn with the key."""
    away = flat(z) - jnp.asarray(MEAN, jnp.float32) - spread * jax.random.normal(key, (2,))
    return -0.5 * away @ precision @ away


FOUR = {"chains": 4, "start": [0.0, 0.0], "num_steps": 60, "burn_in": 40}


def density_of(kind, precision, spread):
    """The density above, or where nothing is drawn and the kind is not exact, one that compiles faster."""
    parameters = numbers(precision), numbers(spread)
    return (around_a_draw, parameters) if kind in EXACT else (normal, parameters[:1])


def four(kind, seed=0, step_size=0.3, precision=PRECISIONS["full"], spread=0.0):
    """What four chains keep, side by side."""
    density, parameters = density_of(kind, precision, spread)
    return many(kind, density, np.float32(step_size), *parameters, seed=seed, **FOUR)[0]


@each_kind
def test_one_key_gives_one_chain_and_another_key_another(kind):
    np.testing.assert_array_equal(four(kind, 0), four(kind, 0))
    assert np.array_equal(four(kind, 0)[:, -1], four(kind, 1)[:, -1]) == (kind == "map")


@each_kind
def test_chains_side_by_side_are_those_one_after_the_other_on_two_devices(kind):
    def one(key):
        density = of(*density_of(kind, PRECISIONS["full"], 0.0))
        chain = kernels.sample(kind, density, tree(jnp.zeros(2)), 0.3, key, num_steps=60, burn_in=40)
        return flat(chain.kept)

    mesh, spec = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec("d")
    loop = jax.shard_map(lambda keys: jax.lax.map(one, keys), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    beside = four(kind)
    assert beside.shape == (4, 20, 2)
    np.testing.assert_allclose(beside, jax.jit(loop)(jax.random.split(jax.random.key(0), 4)), rtol=1e-4)


@pytest.mark.parametrize("kind", EXACT)
def test_the_target_of_an_exact_kernel_stays_one_density_whatever_it_draws(kind):
    kept = four(kind, step_size=kernels.step_size_for(kind, 1e4), precision=1e4 * np.eye(2), spread=10.0)
    assert np.max(np.std(kept, axis=1)) < 0.02  # that of the target is 0.01; its centres are tens apart
    assert np.min(np.std(np.mean(kept, axis=1), axis=0)) > 1


@partial(jax.jit, static_argnames=("density", "num_iterations"))
def curvature(density, position, *parameters, seed=0, num_iterations=10):
    return kernels.curvature(of(density, parameters), position, jax.random.key(seed), num_iterations)


def test_the_curvature_of_a_quadratic_is_its_largest_eigenvalue():
    position = {"a": numbers(0), "b": numbers([[0]])}
    for precision in PRECISIONS.values():
        found = curvature(normal, position, numbers(precision), num_iterations=30)
        np.testing.assert_allclose(found, np.max(np.linalg.eigvalsh(precision)), rtol=1e-4)


def quadratic(z, key, spectrum):
    del key
    return -0.5 * jnp.sum(spectrum * z * z)


def test_ten_iterations_come_from_below_and_near_enough_for_half_the_limit():
    spectrum = np.linspace(0.1, 7.0, 400, dtype=np.float32)
    for seed in range(5):
        found = curvature(quadratic, np.ones(400, np.float32), spectrum, seed=seed)
        assert 0.8 * 7 < found <= 7 * (1 + 1e-5)


def test_the_curvature_is_that_at_the_position():
    def quartic(z, key):
        del key
        return -jnp.sum(z**4)

    at = [curvature(quartic, numbers([z, 0.1])) for z in (1.0, 3.0)]
    np.testing.assert_allclose(at, [12.0, 108.0], rtol=1e-4)


def linear(z, key, slope):
    del key
    return slope * jnp.sum(z)


@pytest.mark.parametrize("slope", [0.0, 1.0], ids=["constant", "linear"])
def test_a_density_without_curvature_gives_finite_steps(slope):
    flatness = curvature(linear, np.zeros(3, np.float32), slope)
    assert flatness == np.float32(kernels.FLATTEST)
    assert all(np.isfinite(kernels.step_size_for(kind, flatness)) for kind in KINDS)


def test_a_density_that_curves_upwards_is_told_by_its_magnitude():
    found = curvature(quadratic, np.ones(3, np.float32), numbers([-3.0, -3.0, -3.0]))
    np.testing.assert_allclose(found, 3.0, rtol=1e-5)


@each_kind
def test_the_chosen_step_is_at_most_half_the_stability_limit(kind):
    for size in (1, 650):
        step, limit = kernels.step_size_for(kind, 4.0, size), kernels.stability_limit(kind, 4.0)
        assert 0 < step <= limit / 2
        assert step.dtype == limit.dtype == jnp.float32


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("size", [1, pytest.param(650, marks=pytest.mark.slow)])
def test_the_chosen_step_is_accepted_from_the_mode_when_all_directions_are_stiff(kind, size):
    step = kernels.step_size_for(kind, 4.0, size)
    run = jax.jit(lambda key: kernels.sample(kind, stiff, jnp.zeros(size), step, key, num_steps=100).accepted)
    assert run(jax.random.key(0)) > 0.6


def stiff(z, key):
    del key
    return -2 * jnp.sum(z * z)
