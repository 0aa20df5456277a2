"""A network on sets: dense layers with ReLU on each element, the mean over them, and one dense layer more.

Zaheer et al., Deep Sets, NeurIPS 2017, arXiv:1703.06114. The order of the elements does not matter, and a set repeated
is the same set. The mean of the last layer's outputs is the last layer's output of the mean, which costs one row.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from priory.models.nets import MLP

__all__ = ["SetNet"]

Weights = Any


@dataclass(frozen=True)
class SetNet:
    """The network; its weights are those of an `MLP`.

    Attributes:
        widths: Units of the layers that see each element.
        num_outputs: Numbers that describe the set.
    """

    widths: tuple[int, ...]
    num_outputs: int

    def init(self, key: Array, num_inputs: int) -> Weights:
        """Return fresh weights for elements of `num_inputs` numbers."""
        return MLP(self.widths, self.num_outputs).init(key, jnp.zeros((1, num_inputs)))["params"]

    def elements(self, weights: Weights, x: Array) -> Array:
        """Return what the mean is taken of: (elements, inputs) become (elements, units)."""
        for number in range(len(self.widths)):
            layer = weights[f"Dense_{number}"]
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None, :])
        return x

    def whole(self, weights: Weights, mean: Array) -> Array:
        """Return the set's numbers (outputs,), from the mean (units,) of its elements."""
        layer = weights[f"Dense_{len(self.widths)}"]
        return mean @ layer["kernel"] + layer["bias"]
