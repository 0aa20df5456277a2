"""A network with fixed effects φ and random effects z: what a chain on z and a gradient in φ need of it.

Where z is a dense last layer, the chain sees the features of φ and never the network again, and the gradient in φ of a
mean over many z is one backward pass through the body.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from priory.bayes import kernels
from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import replace
from priory.fed.method import Predictive, Task, even_mixture
from priory.fed.shard import Batch, Shard
from priory.models import features
from priory.models.model import Params

Weights = Any


@dataclass(frozen=True)
class Mixed:
    """The network with its fixed effects in place; lives inside one trace.

    Attributes:
        task: The problem.
        phi: The fixed effects, with the statistics.
        like: Random effects of the right shapes, whatever they hold.
    """

    task: Task
    phi: Params
    like: Weights

    @property
    def split(self) -> features.Split | None:
        return features.split(cast(Hashable, self.task.model), self.task.input_shape, self.task.is_head)

    def seen(self, batch: Batch) -> Batch:
        """Return the batch as `outputs` takes it: features for inputs, where z is the last layer."""
        if self.split is None:
            return batch
        return replace(batch, x=self.split.features(self.phi, self.like, batch.x)[0])

    def seen_whole(self, data: Shard, batch_size: int) -> Batch:
        """Return all examples of a client, `batch_size` of them through the body at a time."""
        whole = data.padded()
        if self.split is None:
            return whole
        order = jnp.arange(max(1, data.capacity))

        def part(i: Array) -> Array:
            return self.seen(data.take(order, i, batch_size)).x

        shape = jax.eval_shape(part, jnp.int32(0))
        parts = -(-data.capacity // batch_size)
        start = jnp.zeros((parts, *shape.shape), shape.dtype)
        # Only as many as the client has: a small one costs what it has, whoever else is there.
        found = jax.lax.fori_loop(0, data.num_batches(batch_size), lambda i, all_: all_.at[i].set(part(i)), start)
        return replace(whole, x=found.reshape(parts * batch_size, -1)[: data.capacity])

    def outputs(self, z: Weights, x: Array) -> Array:
        """Return the network's outputs, as it predicts, from the inputs that `seen` returns."""
        if self.split is not None:
            return self.split.outputs(z, x)
        return self.task.model.apply(self._with(z), x)[0]

    def log_likelihood(self, z: Weights, seen: Batch) -> Array:
        """Return Σ log p(y | z, φ, x) over the rows that count."""
        assert seen.y is not None, "unlabelled data have no likelihood"
        return jnp.sum(seen.mask * self.task.likelihood.log_prob(self.outputs(z, seen.x), seen.y, seen.scale))

    def curvature(self, z: Weights, seen: Batch, factor: Array | float, precision: Weights, key: Key) -> Array:
        """Return the largest eigenvalue of factor · Σ_j c_j A_jᵀA_j + diag(precision).

        A_j is the Jacobian of the outputs in z and c_j a bound on the likelihood's curvature, so that this bounds the
        curvature of −log p(z | D) everywhere if the outputs are linear in z and the prior is Gaussian.
        """
        assert seen.y is not None, "unlabelled data have no likelihood"
        at_z = self.outputs(z, seen.x)
        weight = factor * seen.mask * self.task.likelihood.curvature(at_z, seen.y, seen.scale)

        def quadratic(other: Weights, key: Key) -> Array:
            # Its Hessian at z is the matrix above: the residuals vanish there.
            del key
            moved = jnp.sum(weight[:, None] * (self.outputs(other, seen.x) - at_z) ** 2)
            return -0.5 * (moved + trees.dot(precision, jax.tree.map(jnp.square, trees.sub(other, z))))

        return kernels.curvature(quadratic, z, key)

    def body_gradient(self, zs: Weights, data: Shard, batch_size: int, whole: bool, key: Key) -> tuple[Weights, Params]:
        """Return ∇_φ of the mean over zs (axis 0) of log p(D | z, φ), in training, and φ with the new statistics.

        Over all examples, or n/b times that of b random ones.
        """
        start = (trees.zeros(self.phi.weights), self.phi.stats)
        if not whole:
            key_batch, key_net = jax.random.split(key)
            gradient, stats = self._gradient(zs, self.phi.stats, data.batch(key_batch, batch_size), key_net)
            return trees.scale(data.count / batch_size, gradient), Params(self.phi.weights, stats)
        order = jnp.arange(max(1, data.capacity))

        def add(i: Array, carry: tuple[Weights, Any]) -> tuple[Weights, Any]:
            total, stats = carry
            batch = data.take(order, i, batch_size)
            gradient, stats = self._gradient(zs, stats, batch, jax.random.fold_in(key, i))
            return trees.add(total, gradient), stats

        gradient, stats = jax.lax.fori_loop(0, data.num_batches(batch_size), add, start)
        return gradient, Params(self.phi.weights, stats)

    def predict(self, zs: Weights, x: Array) -> Predictive:
        """Return the mixture of networks with random effects zs (axis 0), which count equally."""
        if self.split is not None:
            x = self.split.features(self.phi, self.like, x)[0]
        return even_mixture(jax.lax.map(lambda z: self.outputs(z, x), zs))

    def _gradient(self, zs: Weights, stats: Any, batch: Batch, key: Key) -> tuple[Weights, Any]:
        def mean(weights: Weights) -> tuple[Array, Any]:
            if self.split is not None:
                x, new = self.split.features(Params(weights, stats), self.like, batch.x, key=key)
                outputs = jax.vmap(lambda z: self.split.outputs(z, x))(zs)  # type: ignore[union-attr]
            else:
                networks = jax.vmap(
                    lambda z: self.task.model.apply(Params(trees.merge(z, weights), stats), batch.x, key=key)
                )
                outputs, new = networks(zs)
                new = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), new)
            assert batch.y is not None, "unlabelled data have no likelihood"
            log_prob = self.task.likelihood.log_prob(outputs, batch.y, batch.scale)
            return jnp.sum(batch.mask * jnp.mean(log_prob, axis=0)), new

        return jax.grad(mean, has_aux=True)(self.phi.weights)

    def _with(self, z: Weights) -> Params:
        return Params(trees.merge(z, self.phi.weights), self.phi.stats)
