"""Networks of the papers, as Flax Linen modules: channels last, inputs as they come from the data."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from priory.models.conv import halve

__all__ = ["CNN", "MLP", "Factor", "Intercept"]


class MLP(nn.Module):
    """Dense layers with ReLU between them on the flattened input; no widths give a linear model."""

    widths: tuple[int, ...]
    num_outputs: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.num_outputs)(x)


class CNN(nn.Module):
    """5x5 convolutions with ReLU, each followed by 2x2 max-pooling, then two dense layers.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017, with the
    128 hidden units of the EMNIST literature.
    """

    num_outputs: int
    channels: tuple[int, ...] = (32, 64)
    width: int = 128

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x[..., None] if x.ndim == 3 else x
        for channels in self.channels:
            x = halve(nn.relu(nn.Conv(channels, (5, 5))(x)))
        x = nn.relu(nn.Dense(self.width)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_outputs)(x)


class Intercept(nn.Module):
    """One learned constant an output, `intercept`, whatever the input: for groups without covariates."""

    num_outputs: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        intercept = self.param("intercept", nn.initializers.zeros, (self.num_outputs,))
        return jnp.broadcast_to(intercept, (x.shape[0], self.num_outputs))


class Factor(nn.Module):
    """Two linear maps without biases on the flattened input, y = zᵀ φᵀ x: φ to `rank` numbers, and z from there.

    Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021, arXiv:2102.07078.
    """

    rank: int
    num_outputs: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Dense(self.rank, use_bias=False)(x.reshape(x.shape[0], -1))
        return nn.Dense(self.num_outputs, use_bias=False)(x)
