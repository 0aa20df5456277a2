"""Where the time of a pFedBayes step goes, on one core: each part alone in a compiled loop, and a step as a whole.

    taskset -c 0 python bench/pfedbayes_step.py

MLP 784-100-10, batch 50, Adam on both distributions. The floor is the matrix products that no implementation can do
without: of the first layer, for means and for variances, forward and for the gradient.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from priory import PFedBayes, Work
from priory.bayes import gaussian
from priory.core import rng
from priory.fed.method import Task
from priory.fed.shard import Pool, Shard
from priory.models import noisy
from priory.models.likelihood import Categorical
from priory.models.model import Head, Params, parse

STEPS, LAUNCHES, BATCH, INPUTS = 100, 10, 50, 784
MODEL = parse("mlp:100", input_shape=(INPUTS,), num_outputs=10)


def main() -> None:
    programs = {name: (jax.jit(program), start) for name, (program, start) in parts().items()}
    for program, start in programs.values():
        jax.block_until_ready(program(start))
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(LAUNCHES):  # in turn, so that a busy moment hits all alike
        for name, (program, start) in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(program(start))
            best[name] = min(best[name], (time.perf_counter() - started) / STEPS)
    print("| part | µs a step |\n|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {1e6 * seconds:.0f} |")


def parts() -> dict[str, tuple[Callable[[Any], Any], Any]]:
    """A program of many repetitions for each part, and what it starts from."""
    weights = MODEL.init(jax.random.key(0), (INPUTS,)).weights
    free = gaussian.around(weights, -2.5)
    q, w = gaussian.of(free), gaussian.of(gaussian.around(weights, -2.4))
    x = jax.random.normal(jax.random.key(1), (BATCH, INPUTS))
    adam = PFedBayes().optimiser.build()

    def nll(q: gaussian.Gaussian, key: jax.Array) -> jax.Array:
        outputs, _ = noisy.apply(MODEL, Params(q.mean, {}), q.sd, x, key, "layers")
        return -jnp.mean(jax.nn.log_softmax(outputs)[:, 0])

    def likelihood(i: jax.Array, q: gaussian.Gaussian) -> gaussian.Gaussian:
        return near(q, jax.grad(nll)(q, jax.random.fold_in(jax.random.key(0), i)))

    def products(_: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        mean, variance = pair
        return near(pair, (x.T @ (x @ mean), (x * x).T @ ((x * x) @ variance)))

    def noise(i: jax.Array, carry: jax.Array) -> jax.Array:
        return carry + 1e-9 * jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (BATCH, 110))

    def divergences(_: jax.Array, q: gaussian.Gaussian) -> gaussian.Gaussian:
        return near(near(q, gaussian.kl_gradient(q, w)), gaussian.kl_gradient_of_prior(q, w))

    def widths(_: jax.Array, both: tuple[Any, Any]) -> tuple[Any, Any]:
        return tuple(near(one, gaussian.Free(one.mean, gaussian.of(one).sd)) for one in both)

    def adams(_: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        moves, state = adam.update(carry[0], carry[1], carry[0])
        return near(carry[0], moves), state

    kernel = (q.mean["Dense_0"]["kernel"], q.sd["Dense_0"]["kernel"])
    return {
        "matrix products of the first layer (the floor)": (repeated(products), kernel),
        "likelihood: forward and back through noisy layers, products included": (repeated(likelihood), q),
        "of which normal numbers": (repeated(noise), jnp.zeros((BATCH, 110))),
        "gradients of both divergences": (repeated(divergences), q),
        "widths of both, softplus": (repeated(widths), (free, free)),
        "Adam on both": (repeated(adams), ((free, free), adam.init((free, free)))),
        "**a whole step**": whole_step(),
    }


def near(values: Any, gradient: Any) -> Any:
    """The values, moved a little: nothing may be known to stay the same, or it is computed once."""
    return jax.tree.map(lambda value, slope: value - 1e-9 * slope, values, gradient)


def repeated(step: Callable[[jax.Array, Any], Any]) -> Callable[[Any], Any]:
    return lambda start: jax.lax.fori_loop(0, STEPS, step, start)


def whole_step() -> tuple[Callable[[Any], Any], Any]:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(1000, INPUTS)).astype(np.float32), draw.integers(0, 10, 1000).astype(np.int32)
    pool = Pool(jnp.asarray(x), jnp.asarray(y), None, jnp.float32(0), jnp.float32(1))
    data = Shard(pool, jnp.array([0]), jnp.array([1000]), 1000)
    task = Task(MODEL, Categorical(10), (INPUTS,), 1, 1000, Head("Dense_1"))
    method = PFedBayes(work=Work(steps=STEPS, batch_size=BATCH))
    down = method.broadcast(method.init_server(task, rng.root(0)))
    return lambda down: method.client_update(
        task, down, method.init_client(task, down, rng.root(1)), data, rng.root(2)
    ), down


if __name__ == "__main__":
    main()
