"""Networks of the papers, as Flax Linen modules: channels last, inputs as they come from the data."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from priory.models.conv import halve

__all__ = ["CNN", "MLP", "POOL", "Factor", "Intercept", "Reddi"]

POOL = "pool"


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

    Attributes:
        channels: Of each convolution.
        width: Units of the first dense layer.
        side: Of a convolution's window.
    """

    num_outputs: int
    channels: tuple[int, ...] = (32, 64)
    width: int = 128
    side: int = 5

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x[..., None] if x.ndim == 3 else x
        for channels in self.channels:
            x = halve(nn.relu(nn.Conv(channels, (self.side, self.side))(x)))
        x = nn.relu(nn.Dense(self.width)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_outputs)(x)


class Reddi(nn.Module):
    """3x3 convolutions with ReLU and without padding, 2x2 max-pooling, dropout, a dense layer, dropout, the last layer.

    Reddi et al., Adaptive Federated Optimization, ICLR 2021, arXiv:2003.00295, table 4: its network for EMNIST. Without
    the last layer it is the embedding of FedVI, which for CIFAR-100 has five convolutions.

    Attributes:
        stages: Channels of each convolution in turn, and `POOL` where the image is halved; once more after the last.
        width: Units of the dense layer.
    """

    num_outputs: int
    stages: tuple[int | str, ...] = (32, 64)
    width: int = 128

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        x = x[..., None] if x.ndim == 3 else x
        for stage in (*self.stages, POOL):
            x = halve(x) if isinstance(stage, str) else nn.relu(nn.Conv(stage, (3, 3), padding="VALID")(x))
        x = nn.Dropout(0.25, deterministic=not train)(x).reshape(x.shape[0], -1)
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(self.width)(x)))
        return nn.Dense(self.num_outputs)(x)

    @classmethod
    def smallest(cls, stages: tuple[int | str, ...]) -> int:
        """Return how many pixels on a side an image must have for something to be left of it."""
        side = 1
        for stage in reversed((*stages, POOL)):
            side = 2 * side if isinstance(stage, str) else side + 2
        return side


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
