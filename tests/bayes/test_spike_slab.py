"""Spike and slab: the bound and its gradients, gates that are hard forward and relaxed backward, and λ = 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from priory.bayes import gaussian, spike_slab
from priory.bayes.gaussian import Gaussian
from priory.bayes.spike_slab import Free, SpikeSlab
from priory.core import trees

TAU = np.float32(0.5)
KEY = jax.random.key(5)

# One program each, where an eager call is one for each operation.
of = jax.jit(spike_slab.of)
chain = jax.jit(spike_slab.chain)
kl = jax.jit(spike_slab.kl)
kl_gradient = jax.jit(spike_slab.kl_gradient)
kl_gradient_of_prior = jax.jit(spike_slab.kl_gradient_of_prior)
draw = jax.jit(spike_slab.draw)
draw_dense = jax.jit(gaussian.draw)
gate = jax.jit(spike_slab.gate)
relaxed_gate = jax.jit(spike_slab.relaxed_gate)
logit_of = jax.jit(spike_slab.logit_of)


@jax.jit
@jax.grad
def slope_of_draw(q):
    """The gradient of the sum of one draw."""
    return jnp.sum(spike_slab.draw(KEY, q, TAU)["w"])


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def some(seed: int) -> Free:
    draw = np.random.default_rng(seed)

    def leaves(centre: float, spread: float) -> dict[str, np.ndarray]:
        return {
            name: np.asarray(centre + spread * draw.normal(size=shape), np.float32)
            for name, shape in (("a", (3, 2)), ("b", (4,)))
        }

    return Free(leaves(0, 1), leaves(-1, 0.5), leaves(0.5, 2))


def same(num: int, mean: float, sd: float, inclusion: float) -> SpikeSlab:
    """Independent weights that are all alike."""
    logit = float(logit_of(np.float32(inclusion)))
    return SpikeSlab(*({"w": np.full(num, value, np.float32)} for value in (mean, sd, logit, inclusion)))


def standard(num: int) -> Gaussian:
    return Gaussian({"w": np.zeros(num, np.float32)}, {"w": np.ones(num, np.float32)})


def sigmoid(logit: np.ndarray) -> np.ndarray:
    return np.float32(1 / (1 + np.exp(-np.float64(logit))))


def assert_close(a, b, rtol=1e-6, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def assert_zero(tree):
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, np.zeros(leaf.shape)), tree)


def test_the_bound_is_zero_at_equality():
    assert kl(of(some(0)), of(some(0))) == 0


def test_both_gradients_are_exactly_zero_at_equality():
    free = some(0)
    q = of(free)
    assert_zero(chain(free, kl_gradient(q, q)))
    assert_zero(chain(free, kl_gradient_of_prior(q, q)))


def test_gradients_are_those_of_automatic_differentiation():
    q, w = some(0), some(1)

    def bound(q, w):
        return spike_slab.kl(spike_slab.of(q), spike_slab.of(w))

    of_q, of_w = jax.jit(jax.grad(bound, argnums=(0, 1)))(q, w)
    at_q, at_w = of(q), of(w)
    assert_close(chain(q, kl_gradient(at_q, at_w)), of_q, rtol=2e-5, atol=1e-5)
    assert_close(chain(w, kl_gradient_of_prior(at_q, at_w)), of_w, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("inclusion", [0.05, 0.5, 0.999])
def test_the_bound_is_the_divergence_of_the_mixtures_with_their_atoms(inclusion):
    """KL(q ‖ w) = (1 − λ) log (1 − λ)/(1 − λ_w) at the atom, and an integral over the rest."""
    m, s, m_w, s_w, inclusion_w = 0.4, 0.3, -0.2, 0.5, 0.3
    q, w = stats.norm(m, s), stats.norm(m_w, s_w)

    def integrand(x):
        return inclusion * q.pdf(x) * (np.log(inclusion / inclusion_w) + q.logpdf(x) - w.logpdf(x))

    true = (1 - inclusion) * np.log((1 - inclusion) / (1 - inclusion_w)) + integrate.quad(integrand, -4, 5)[0]
    bound = kl(same(1, m, s, inclusion), same(1, m_w, s_w, inclusion_w))
    np.testing.assert_allclose(bound, true, rtol=1e-5)


@pytest.mark.parametrize("inclusion", [1e-5, 0.01, 0.99])
def test_a_small_step_of_lambda_has_an_accurate_bound(inclusion):
    """Over many weights rounding would outweigh a divergence of λ(1 − λ)δ²/2 each."""
    logit, step = np.float32(np.log(inclusion / (1 - inclusion))), np.float32(0.01)
    q = same(1000, 0.0, 1.0, inclusion)
    q = SpikeSlab(q.mean, q.sd, {"w": np.full(1000, logit)}, q.inclusion)
    w = SpikeSlab(q.mean, q.sd, {"w": np.full(1000, logit + step)}, q.inclusion)
    a, b = np.float64(q.logit["w"][0]), np.float64(w.logit["w"][0])
    p, r = 1 / (1 + np.exp(-a)), 1 / (1 + np.exp(-b))
    true = p * np.log(p / r) + (1 - p) * np.log((1 - p) / (1 - r))
    np.testing.assert_allclose(kl(q, w), 1000 * true, rtol=3e-3)


@pytest.mark.parametrize("inclusion", [0.0, 0.003, 0.3, 0.99, 1.0])
def test_a_gate_is_open_with_probability_lambda(inclusion):
    num = 200_000
    gates = np.asarray(draw(KEY, same(num, 1.0, 0.0, inclusion), TAU)["w"], np.float64)
    assert set(np.unique(gates)) <= {0.0, 1.0}
    error = np.sqrt(inclusion * (1 - inclusion) / num)
    assert abs(np.mean(gates) - inclusion) <= 5 * error + 1e-6  # 1e-6: λ in single precision


def test_a_relaxed_gate_hardens_as_the_temperature_falls():
    u, logit = np.linspace(0.05, 0.95, 19, dtype=np.float32), np.full(19, 0.3, np.float32)
    hard = np.asarray(gate(logit, sigmoid(logit), u, TAU))
    distance = [np.max(np.abs(relaxed_gate(logit, u, np.float32(t)) - hard)) for t in (1, 0.1, 1e-3)]
    assert distance[0] > distance[1] > distance[2]
    assert distance[2] < 1e-6
    assert 0 < np.sum(hard) < 19, "both kinds of gates are there"


def test_moments_of_a_weight_are_those_of_the_mixture():
    num, m, s, inclusion = 200_000, 0.7, 0.4, 0.6
    theta = np.asarray(draw(KEY, same(num, m, s, inclusion), TAU)["w"], np.float64)
    mean, variance = inclusion * m, inclusion * (s**2 + m**2) - (inclusion * m) ** 2
    assert abs(theta.mean() - mean) < 5 * np.sqrt(variance / num)
    squares = (theta - mean) ** 2
    assert abs(squares.mean() - variance) < 5 * squares.std() / np.sqrt(num)


def test_with_lambda_one_the_draw_and_its_gradients_are_those_of_the_gaussian():
    q = of(some(0))
    ones = jax.tree.map(np.ones_like, q.mean)
    full = SpikeSlab(q.mean, q.sd, q.logit, ones)

    def length(weights):
        return trees.norm_squared(weights)

    sparse, slope = jax.jit(jax.value_and_grad(lambda q: length(spike_slab.draw(KEY, q, TAU))))(full)
    dense, expected = jax.jit(jax.value_and_grad(lambda q: length(gaussian.draw(KEY, q))))(Gaussian(q.mean, q.sd))
    assert sparse == dense
    assert_close(slope.mean, expected.mean, rtol=0, atol=0)
    assert_close(slope.sd, expected.sd, rtol=0, atol=0)


def test_with_lambda_one_the_bound_is_that_of_gaussians():
    logit = jax.tree.map(lambda leaf: np.full_like(leaf, 99.0), some(0).mean)
    q, w = (of(Free(f.mean, f.rho, logit)) for f in (some(0), some(1)))
    slabs = Gaussian(q.mean, q.sd), Gaussian(w.mean, w.sd)
    np.testing.assert_allclose(kl(q, w), jax.jit(gaussian.kl)(*slabs), rtol=1e-5)
    assert_close(kl_gradient(q, w).sd, jax.jit(gaussian.kl_gradient)(*slabs).sd, rtol=2e-6)
    of_prior = jax.jit(gaussian.kl_gradient_of_prior)(*slabs)
    assert_close(kl_gradient_of_prior(q, w).mean, of_prior.mean, rtol=2e-6)


def test_gates_are_hard_forward_and_relaxed_backward():
    """∂θ/∂μ = γ, ∂θ/∂σ = γ g, ∂θ/∂logit λ = γ̃(1 − γ̃)/τ · (μ + σ g)."""
    num = 50
    q, unit = same(num, 0.7, 0.4, 0.6), same(num, 1.0, 0.0, 0.6)
    gates, slopes = (np.asarray(part["w"]) for part in (draw(KEY, unit, TAU), slope_of_draw(unit).logit))
    noise = np.asarray(draw_dense(KEY, standard(num))["w"])
    gradient = slope_of_draw(q)
    np.testing.assert_allclose(gradient.mean["w"], gates, rtol=1e-6)
    np.testing.assert_allclose(gradient.sd["w"], gates * noise, rtol=1e-6)
    np.testing.assert_allclose(gradient.logit["w"], slopes * (0.7 + 0.4 * noise), rtol=1e-5, atol=1e-7)
    assert_zero(gradient.inclusion)


def test_the_slope_of_a_gate_is_that_of_the_relaxed_one():
    u, logit = np.linspace(0.05, 0.95, 19, dtype=np.float32), np.full(19, 0.3, np.float32)

    def hard(a):
        return jnp.sum(spike_slab.gate(a, jax.nn.sigmoid(a), u, TAU))

    def soft(a):
        return jnp.sum(spike_slab.relaxed_gate(a, u, TAU))

    found, relaxed = jax.jit(lambda a: (jax.grad(hard)(a), jax.grad(soft)(a)))(logit)
    np.testing.assert_allclose(found, relaxed, rtol=1e-5)


def test_gates_and_noise_are_independent():
    num = 200_000
    gates = draw(KEY, same(num, 1.0, 0.0, 0.5), TAU)["w"]
    noise = np.asarray(draw_dense(KEY, standard(num))["w"])
    for moment in (noise, np.square(noise)):
        assert abs(np.corrcoef(gates, moment)[0, 1]) < 5 / np.sqrt(num)


def test_the_mean_is_shrunk_and_the_median_cut():
    q = SpikeSlab({"w": jnp.array([2.0, 2.0])}, None, None, {"w": jnp.array([0.75, 0.25])})
    np.testing.assert_allclose(spike_slab.mean_of(q)["w"], [1.5, 0.5])
    np.testing.assert_allclose(spike_slab.median_of(q)["w"], [2.0, 0.0])


def test_density_is_the_mean_inclusion_over_all_weights():
    q = SpikeSlab(None, None, None, {"a": jnp.full((2, 3), 0.5), "b": jnp.full(2, 0.1)})
    np.testing.assert_allclose(spike_slab.density(q), (6 * 0.5 + 2 * 0.1) / 8, rtol=1e-6)


def test_inclusion_stays_inside_its_bounds_and_comes_back():
    free = Free(*({"w": np.float32([-99.0, 99.0])} for _ in range(3)))
    inclusion = of(free).inclusion["w"]
    np.testing.assert_allclose(inclusion, [1e-6, 1 - 1e-6], rtol=1e-3)
    np.testing.assert_allclose(logit_of(np.float32([0.0, 1.2])), of(free).logit["w"], rtol=2e-3)
    gradient = SpikeSlab(*({"w": np.float32([-1.0, 1.0])} for _ in range(4)))
    np.testing.assert_array_equal(chain(free, gradient).logit["w"], [-1.0, 1.0])


def test_the_logit_of_an_inclusion_gives_it_back():
    inclusion = np.float32([1e-5, 0.01, 0.5, 0.99])
    np.testing.assert_allclose(sigmoid(logit_of(inclusion)), inclusion, rtol=1e-5)


def test_around_a_network_all_weights_are_alike():
    q = of(jax.jit(spike_slab.around)({"w": np.arange(3, dtype=np.float32)}, -2.5, 0.99))
    np.testing.assert_array_equal(q.mean["w"], np.arange(3.0))
    np.testing.assert_allclose(q.sd["w"], np.full(3, 0.07889), rtol=1e-4)
    np.testing.assert_allclose(q.inclusion["w"], np.full(3, 0.99), rtol=1e-6)
