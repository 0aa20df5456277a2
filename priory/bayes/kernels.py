"""Markov chains over pytrees: one function for Langevin, Metropolis and Hamiltonian kernels, and for plain ascent.

A chain is known by its position alone. BlackJAX's states also hold the density there, which is worth nothing once the
density has changed, as it does between rounds; so a state lives as long as one call of `sample`.

    ula, sgld   z + γ ∇log p(z) + √(2γ) ξ; the same step, of a whole or of a minibatch density. Not adjusted: on
                N(m, P⁻¹) the chain settles to mean m and covariance P⁻¹(I − γP/2)⁻¹, and diverges iff γ λ_max(P) ≥ 2.
    mala        The same proposal, accepted or rejected. Exact, as are the next two.
    hmc, nuts   Leapfrog steps of length ε with the identity as mass; `nuts` chooses their number, up to 1023.
    psgld       Preconditioned SGLD, Li et al. 2016, arXiv:1512.07666, with the whole gradient in place of its mean over
                examples, and without the term Γ (derivatives of the preconditioner), which is usually left out.
    map         Iterates of Adam on −log p, without noise: a trajectory to the mode, no sample. The regime of FedPop's
                published image results.

`step_size` is γ for ula, sgld and mala (units of variance), ε for hmc and nuts (a length), γ for psgld (a length too,
since its preconditioner is one over a gradient) and the learning rate for map.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import struct

Position = Any
LogDensity = Callable[[Position, Key], Array]
Kind = Literal["ula", "sgld", "mala", "hmc", "nuts", "psgld", "map"]
KINDS: tuple[Kind, ...] = ("ula", "sgld", "mala", "hmc", "nuts", "psgld", "map")
EXACT: tuple[Kind, ...] = ("mala", "hmc", "nuts")  # these need the density itself: no minibatch
NOISY: tuple[Kind, ...] = ("ula", "sgld", "psgld")

DECAY, DAMPING = 0.99, 1e-5  # of psgld's preconditioner G = 1/(damping + √V), that of RMSprop
FLATTEST = 1e-18  # the least curvature told, so that a step size made of it is finite
NOISE_AT_ONCE = 2**20  # normals drawn in one go, 4 MB: a few at a time cost more than a gradient

State = tuple[Any, ...]  # the position, and what a kernel remembers within one call
Begin = Callable[[Position], State]
Step = Callable[[State, Key, Position], tuple[State, Array]]  # given a tree of normals, if the kernel is noisy


@struct
class Chain:
    """What a chain leaves behind.

    Attributes:
        last: The position after the last step.
        kept: Positions of the kept steps, stacked on axis 0.
        accepted: Mean acceptance probability over all steps; 1 for kernels that accept everything.
    """

    last: Position
    kept: Position
    accepted: Array


def sample(
    kind: Kind,
    log_density: LogDensity,
    start: Position,
    step_size: Array | float,
    key: Key,
    *,
    num_steps: int,
    burn_in: int = 0,
    thin: int = 1,
    leapfrog: int = 10,
) -> Chain:
    """Run a chain of `num_steps` from `start`; of positions 1, 2, … it stores only `[burn_in::thin]`.

    Args:
        log_density: log p up to a constant, and a key for its minibatch (scaled by n/b), fresh at every step. The exact
            kernels give it one key for the whole chain: whatever it draws from that, their target stays one density.
        leapfrog: Leapfrog steps of hmc.
    """
    assert 0 <= burn_in < num_steps, "a chain keeps at least one step"
    num_kept = -(-(num_steps - burn_in) // thin)
    key_density, key_steps, key_noise = jax.random.split(key, 3)
    if kind in EXACT:
        begin, step = _exact(kind, lambda z: log_density(z, jax.random.clone(key_density)), step_size, leapfrog)
    else:
        begin, step = _unadjusted(kind, jax.grad(log_density), step_size)
    flat, unravel = ravel_pytree(start)

    def advance(carry: tuple[State, Position, Array], at: tuple[Array, Array | None]) -> tuple[Any, None]:
        state, kept, accepted = carry
        number, noise = at
        state, probability = step(
            state, jax.random.fold_in(key_steps, number), None if noise is None else unravel(noise)
        )
        place, skipped = jnp.divmod(number - burn_in, thin)
        # What is not kept is written to a row beyond, which goes in the end: a slice, where a scatter would be slow.
        place = jnp.where((number >= burn_in) & (skipped == 0), place, num_kept)
        kept = jax.tree.map(
            lambda rows, leaf: jax.lax.dynamic_update_index_in_dim(rows, leaf, place, 0), kept, state[0]
        )
        return (state, kept, accepted + probability), None

    def block(carry: tuple[State, Position, Array], numbers: Array) -> tuple[Any, None]:
        noise = None
        if kind in NOISY:
            noise = _normals(jax.random.fold_in(key_noise, numbers[0]), (len(numbers), flat.size))
        return jax.lax.scan(advance, carry, (numbers, noise))[0], None

    room = jax.tree.map(lambda leaf: jnp.zeros((num_kept + 1, *leaf.shape), leaf.dtype), start)
    carry = (begin(start), room, jnp.float32(0))
    length = -(-num_steps // -(-num_steps * flat.size // NOISE_AT_ONCE)) if flat.size else num_steps
    numbers, whole = jnp.arange(num_steps), num_steps - num_steps % length
    carry, _ = jax.lax.scan(block, carry, numbers[:whole].reshape(-1, length))
    if whole < num_steps:
        carry, _ = block(carry, numbers[whole:])
    state, kept, accepted = carry
    return Chain(state[0], jax.tree.map(lambda rows: rows[:num_kept], kept), accepted / num_steps)


def curvature(log_density: LogDensity, position: Position, key: Key, num_iterations: int = 10) -> Array:
    """Return the largest eigenvalue of −∇² log p at a position, in magnitude, by power iteration; at least `FLATTEST`.

    It is approached from below: where the spectrum is crowded ten iterations may miss a tenth of it, which a step of
    half the stability limit forgives.
    """
    key_density, key_start = jax.random.split(key)
    gradient = jax.grad(log_density)
    # Linearised once: an iteration costs a product with the Hessian, and no second evaluation of the gradient.
    _, hessian = jax.linearize(lambda z: gradient(z, key_density), position)

    def iterate(_: Array, carry: tuple[Position, Array]) -> tuple[Position, Array]:
        direction, length = carry
        image = hessian(trees.scale(1 / jnp.maximum(length, FLATTEST), direction))
        return image, trees.norm(image)

    flat, unravel = ravel_pytree(position)
    direction = unravel(_normals(key_start, flat.shape))
    _, length = jax.lax.fori_loop(0, num_iterations, iterate, (direction, trees.norm(direction)))
    return jnp.maximum(length, FLATTEST)


def step_size_for(kind: Kind, curvature: Array | float, size: int = 1) -> Array:
    """Return a step that is stable, and for an exact kernel accepted, where λ is the largest curvature of −log p.

    1/λ for ula, half of what is stable: it doubles the variance in the stiffest direction and adds a share of about
    λ_j/(2λ) in flatter ones. A quarter of that for sgld, since some minibatches are steeper than the whole. 1/(λ d^½)
    for mala and 1/(√λ d^⅓) for hmc and nuts, where `size` d coordinates may all be as stiff: at stationarity d^⅓ and
    d^¼ would do, but a chain that starts at the mode would never leave it. The steps of psgld and map have units of
    their own, and are 0.01.
    """
    if kind in ("psgld", "map"):
        return jnp.float32(0.01)
    if kind in ("hmc", "nuts"):
        return size ** (-1 / 3) / jnp.sqrt(curvature)
    share = {"ula": 1.0, "sgld": 0.25, "mala": size**-0.5}[kind]
    return jnp.asarray(share / curvature, jnp.float32)


def stability_limit(kind: Kind, curvature: Array | float) -> Array:
    """Return the step size from which a chain diverges on a Gaussian or, if it is exact, accepts hardly any move."""
    if kind in ("psgld", "map"):
        return jnp.float32(jnp.inf)
    return 2 / jnp.sqrt(curvature) if kind in ("hmc", "nuts") else jnp.asarray(2 / curvature, jnp.float32)


def _exact(
    kind: Kind, log_density: Callable[[Position], Array], step_size: Array | float, leapfrog: int
) -> tuple[Begin, Step]:
    """Return Metropolis-adjusted kernels of BlackJAX; the first part of their states is the position."""
    # BlackJAX computes a logarithm on import. At the top of this file that would open the devices before the command
    # line has chosen them; here it would be traced, were it not for the context.
    with jax.ensure_compile_time_eval():
        import blackjax

    algorithm = {"mala": blackjax.mala, "hmc": blackjax.hmc, "nuts": blackjax.nuts}[kind]
    kernel = algorithm.build_kernel()

    def begin(position: Position) -> State:
        return algorithm.init(position, log_density)

    def step(state: State, key: Key, _: Position) -> tuple[State, Array]:
        mass = () if kind == "mala" else (jnp.ones(trees.size(state[0])),)
        lengths = (leapfrog,) if kind == "hmc" else ()
        # Raw key data: in a vmap the branches of nuts become a select, which JAX's key check takes for a second use.
        state, info = kernel(jax.random.key_data(key), state, log_density, step_size, *mass, *lengths)
        return state, info.acceptance_rate

    return begin, step


def _unadjusted(kind: Kind, gradient: LogDensity, step_size: Array | float) -> tuple[Begin, Step]:
    """Return kernels that accept every move."""
    adam = optax.adam(step_size)
    memories: dict[str, Begin] = {
        "ula": lambda _: (),
        "sgld": lambda _: (),
        # Ones, not zeros: at a vanishing first gradient the noise would be divided by √DAMPING.
        "psgld": lambda position: (jax.tree.map(jnp.ones_like, position),),
        "map": lambda position: (adam.init(position),),
    }

    def begin(position: Position) -> State:
        return (position, *memories[kind](position))

    def step(state: State, key: Key, noise: Position) -> tuple[State, Array]:
        position, *memory = state
        slope = gradient(position, key)
        if kind == "map":
            moves, optimiser = adam.update(trees.scale(-1.0, slope), memory[0], position)
            return (optax.apply_updates(position, moves), optimiser), jnp.float32(1)
        rate: Position = jax.tree.map(lambda _: step_size, position)
        if kind == "psgld":
            memory = [jax.tree.map(lambda v, g: DECAY * v + (1 - DECAY) * g * g, memory[0], slope)]
            rate = jax.tree.map(lambda v: step_size / (DAMPING + jnp.sqrt(v)), memory[0])  # γ G

        def move(z: Array, g: Array, gamma: Array | float, xi: Array) -> Array:
            return z + gamma * g + jnp.sqrt(2 * gamma) * xi  # FedPop, algorithm 1, line 14

        return (jax.tree.map(move, position, slope, rate, noise), *memory), jnp.float32(1)

    return begin, step


def _normals(key: Key, shape: tuple[int, ...]) -> Array:
    """Return standard normals, for less than JAX's default costs.

    This generator takes both words of each block that it encrypts, and not one; whole lots of 1024, since XLA runs
    ragged halves number by number.
    """
    size = math.prod(shape)
    with jax.threefry_partitionable(False):
        return jax.random.normal(key, (-(-size // 1024) * 1024,))[:size].reshape(shape)
