"""Flax Linen modules as models: any module whose call takes a batch, with dropout and batch norm recognised."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from priory.core.errors import UsageError
from priory.models import conv
from priory.models.model import Params, shapes

__all__ = ["Linen", "first_of", "watching"]

PyTree = Any


@dataclass(frozen=True)
class Linen:
    """The model of a Linen module.

    Of the flags `train`, `deterministic` and `use_running_average`, those that the module's `__call__` takes are set; a
    key serves every random stream the module asks for; collections other than `params` are the statistics. On a CPU
    convolutions run as matrix products (see `conv`).
    """

    module: nn.Module

    def init(self, key: Array, input_shape: tuple[int, ...]) -> Params:
        with _fast_convolutions():
            variables: Any = self._call(self.module.init, training=False)(key, jnp.zeros((1, *input_shape)))
        stats = {name: collection for name, collection in variables.items() if name != "params"}
        return Params(variables.get("params", {}), stats)

    def apply(self, params: Params, x: Array, *, key: Array | None = None) -> tuple[Array, PyTree]:
        variables = {"params": params.weights, **params.stats}
        with _fast_convolutions():
            if key is None:
                return self._call(self.module.apply, training=False)(variables, x), params.stats
            # Linen falls back on the stream "params" for every other name.
            outputs, updated = self._call(self.module.apply, training=True)(
                variables, x, rngs={"params": key}, mutable=list(params.stats)
            )
        return outputs, {**params.stats, **updated}

    def last_layer(self, input_shape: tuple[int, ...]) -> str:
        """Return the path of the parametrised module without parametrised children that was called last.

        The order of calls decides: a parameter tree forgets it, and sorts `Dense_10` before `Dense_2`.
        """
        called: list[tuple[str, ...]] = []

        def record(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            outputs = next_fun(*args, **kwargs)
            if context.method_name != "setup":
                called.append(context.module.path)
            return outputs

        with nn.intercept_methods(record):
            weights = shapes(self, input_shape).weights
        for path in reversed(called):
            if _is_leaf_layer(weights, path):
                return "/".join(path)
        raise UsageError(
            f"{type(self.module).__name__} has no layer with parameters; give a model that can be trained."
        )

    def _call(self, function: Callable[..., Any], training: bool) -> Callable[..., Any]:
        flags = {"train": training, "deterministic": not training, "use_running_average": not training}
        takes = inspect.signature(type(self.module).__call__).parameters
        return functools.partial(function, **{name: value for name, value in flags.items() if name in takes})


def _is_leaf_layer(weights: PyTree, path: tuple[str, ...]) -> bool:
    node = weights
    for name in path:
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    return bool(node) and not any(isinstance(child, Mapping) for child in node.values())


@contextlib.contextmanager
def watching(see: Callable[[nn.Module, Array, Array], None]) -> Iterator[None]:
    """Pass each call of a layer, as the layer with its input and its outputs, to a function."""

    def record(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        outputs = next_fun(*args, **kwargs)
        if context.method_name == "__call__":
            see(context.module, first_of(args, kwargs), outputs)
        return outputs

    with nn.intercept_methods(record):
        yield


def first_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Array:
    """Return the input of a layer that was called with these arguments."""
    return args[0] if args else kwargs.get("inputs")  # type: ignore[return-value]


@contextlib.contextmanager
def _fast_convolutions() -> Iterator[None]:
    if jax.default_backend() != "cpu":
        yield
        return
    with nn.intercept_methods(_convolve_fast):
        yield


def _convolve_fast(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """Call a layer with `lax.conv_general_dilated` exchanged inside it.

    The layer itself still runs, so padding modes, masks, biases and other interceptors keep their meaning.
    """
    module = context.module
    if context.method_name != "__call__" or not isinstance(module, nn.Conv | nn.ConvLocal | nn.ConvTranspose):
        return next_fun(*args, **kwargs)
    name = "/".join(module.path) or type(module).__name__
    if not isinstance(module, nn.Conv):
        conv.warn_slow(name, f"{type(module).__name__} has no fast form")
        return next_fun(*args, **kwargs)
    if module.conv_general_dilated is not None or module.conv_general_dilated_cls is not None:
        return next_fun(*args, **kwargs)  # the user's own convolution
    # The instance is this call's bound copy, and frozen only against its author's mistakes.
    object.__setattr__(module, "conv_general_dilated", conv.stand_in(name))
    try:
        return next_fun(*args, **kwargs)
    finally:
        object.__setattr__(module, "conv_general_dilated", None)
