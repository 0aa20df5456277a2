"""Networks whose weights are drawn from independent Gaussians, with noise of little variance in their gradients.

One draw for a whole minibatch makes its examples share their noise. Two devices give every example noise of its own at
the price of one more product, and leave the distribution of each example's output as it is:

local      A dense layer on one vector an example draws its outputs, N(xW + b, x²S² + s²), and not its weights: Kingma,
           Salimans and Welling, Variational Dropout and the Local Reparameterization Trick, NeurIPS 2015,
           arXiv:1506.02557.
Flipout    A layer on many positions, which share their weights, turns the signs of one draw by example and channel: Wen
           et al., Flipout, ICLR 2018, arXiv:1803.04386. Noise for each position would be another distribution.

Any other weights are drawn once a call. Where a loss is a sum over examples, the expected loss and its gradients are
the same every way; batch norm in training ties examples together, and there they are close and no more.
"""

import functools
from collections.abc import Callable, Container, Hashable, Mapping
from typing import Any, Literal, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import get_opaque_trace_state
from jax.flatten_util import ravel_pytree

from priory.core import trees
from priory.models.linen import first_of, watching
from priory.models.model import Model, Params, PyTree

__all__ = ["apply"]

Weights = Any
Device = Literal["local", "flipout"]

# The batch that a network is tried on; a prime, so that no other axis passes for it.
_TRIAL_BATCH = 1009


def apply(
    model: Model, mean: Params, sd: Weights, x: Array, key: Array, by: Literal["layers", "weights"] = "layers"
) -> tuple[Array, PyTree]:
    """Return the outputs and new statistics, in training, of a network with weights drawn from N(mean, sd²).

    `sd` is a tree like the weights, and gradients reach both. By "layers" a draw is for each example where it can be;
    by "weights" it is one draw of them all.
    """
    devices = _devices(cast(Hashable, model), x.shape[1:]) if by == "layers" else {}
    # One split and few draws: each takes longer to compile than the rest of a layer.
    (key_model, key_weights), *pairs = jax.random.split(key, (1 + len(devices), 2))
    weights = _sample(key_weights, mean.weights, sd, except_in=devices)
    keys = dict(zip(devices, pairs, strict=True))
    with nn.intercept_methods(functools.partial(_perturb, devices, sd, keys)):
        return model.apply(Params(weights, mean.stats), x, key=key_model)


def _sample(key: Array, mean: Weights, sd: Weights, except_in: Container[str]) -> Weights:
    """Return one draw of the weights, those of the excepted layers at their mean."""
    still, drawn = trees.partition(mean, lambda path: path.rpartition("/")[0] in except_in)
    _, spread = trees.partition(sd, lambda path: path.rpartition("/")[0] in except_in)
    flat, unravel = ravel_pytree(drawn)
    noise = unravel(jax.random.normal(key, flat.shape, flat.dtype))
    return trees.merge(still, jax.tree.map(lambda m, s, e: m + s * e, drawn, spread, noise))


def _perturb(
    devices: Mapping[str, Device],
    sd: Weights,
    keys: Mapping[str, Array],
    next_fun: Callable[..., Any],
    args: Any,
    kwargs: Any,
    context: nn.module.InterceptorContext,
) -> Any:
    """Return the outputs of a layer with its noise."""
    module, mean = context.module, next_fun(*args, **kwargs)
    path = "/".join(module.path)
    if context.method_name != "__call__" or path not in devices:
        return mean
    noise = _local_noise if devices[path] == "local" else _flipout_noise
    return mean + noise(module, _at(sd, module), first_of(args, kwargs), mean, keys[path])


def _local_noise(module: Any, sd: Mapping[str, Array], x: Array, mean: Array, keys: Array) -> Array:
    """Return noise of the variance x²S² + s² for each example and unit."""
    # Squares leave the range of half precision long before the numbers do.
    wide = jnp.promote_types(sd["kernel"].dtype, jnp.float32)
    squares = {name: jnp.square(leaf.astype(wide)) for name, leaf in sd.items()}
    variance = jnp.matmul(jnp.square(x.astype(wide)), squares["kernel"], precision=module.precision)
    if "bias" in squares:
        variance = variance + squares["bias"][None]
    positive = variance > 0  # without noise the root has no slope, and 0 is the expected one
    root = jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1)), 0)
    return (root * jax.random.normal(keys[0], mean.shape, wide)).astype(mean.dtype)


def _flipout_noise(module: Any, sd: Mapping[str, Array], x: Array, mean: Array, keys: Array) -> Array:
    """Return the layer with noise for weights, one draw ε, its input and output channels turned by signs r and t.

    They make it r ε t for an example: of the same distribution, and uncorrelated with what other examples get.
    """
    key_weights, key_signs = keys
    num_inputs, num_outputs = x.shape[-1], mean.shape[-1]
    signs = jax.random.rademacher(key_signs, (mean.shape[0], num_inputs + num_outputs), mean.dtype)
    signs = signs.reshape(mean.shape[0], *(1,) * (mean.ndim - 2), num_inputs + num_outputs)
    noise = _sample(key_weights, jax.tree.map(jnp.zeros_like, sd), sd, except_in=())
    # A detached copy, since a layer reads its own weights; other interceptors meet it as they met the layer.
    outputs = module.clone(parent=None).apply({"params": noise}, x * signs[..., :num_inputs])
    return outputs * signs[..., num_inputs:]


@functools.lru_cache(maxsize=64)
def _devices(model: Model, input_shape: tuple[int, ...]) -> dict[str, Device]:
    """Return the device of each layer that needs no draw of its weights: those called once on whole examples."""
    calls: dict[str, list[Device | None]] = {}

    def run(key: Array) -> Array:
        key_init, key_call = jax.random.split(key)
        params = model.init(key_init, input_shape)
        outside = get_opaque_trace_state()

        def see(module: nn.Module, x: Array, _: Array) -> None:
            if type(module) in (nn.Dense, nn.Conv):
                # A transformation around the layer (a scan, a vmap, a normalised kernel) hides calls, axes or weights.
                plain = get_opaque_trace_state() == outside and _reads(module, params.weights)
                calls.setdefault("/".join(module.path), []).append(_device(module, x) if plain else None)

        with watching(see):
            return model.apply(params, jnp.zeros((_TRIAL_BATCH, *input_shape)), key=key_call)[0]

    jax.eval_shape(run, jax.eval_shape(lambda: jax.random.key(0)))
    return {path: found[0] for path, found in calls.items() if len(found) == 1 and found[0] is not None}


def _device(module: nn.Module, x: Array) -> Device | None:
    """Return the device of one call of a layer, or None if its leading axis is not that of the examples."""
    if x.ndim < 2 or x.shape[0] != _TRIAL_BATCH:
        return None
    if isinstance(module, nn.Dense) and x.ndim == 2:
        own_product = module.dot_general is not None or module.dot_general_cls is not None
        return None if own_product else "local"
    window = module.kernel_size if isinstance(module, nn.Conv) else ()
    rank = 1 if isinstance(window, int) else len(window)
    # A convolution of lower rank takes the examples for an axis of space. A layer that is the whole network has the
    # path of its detached copy.
    return "flipout" if x.ndim >= rank + 2 and module.path else None


def _reads(module: nn.Module, weights: Weights) -> bool:
    """Return whether the layer's kernel and bias are the very arrays that stand at its path among the weights."""
    given = _at(weights, module)
    if not isinstance(given, Mapping) or not set(given) <= {"kernel", "bias"}:
        return False
    return "kernel" in given and all(module.get_variable("params", name) is leaf for name, leaf in given.items())


def _at(tree: Any, module: nn.Module) -> Any:
    for name in module.path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree
