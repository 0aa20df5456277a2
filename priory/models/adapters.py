"""Networks of other libraries as models: Flax NNX, Equinox, and pairs of plain functions.

A model must be hashable and free of arrays, so the description of an NNX or Equinox network is the *factory* that makes
it. It runs again whenever the model is traced; the arrays it makes are replaced by the parameters, and the compiler
drops them.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from priory.core.errors import UsageError
from priory.models import conv
from priory.models.linen import Linen
from priory.models.model import Model, Params, arguments, shapes

__all__ = ["Equinox", "Functions", "Nnx", "adapt"]

PyTree = Any


def adapt(anything: Any) -> Model:
    """Return the model of a module, factory or pair; see `as_model`."""
    if isinstance(anything, nn.Module):
        return Linen(anything)
    if isinstance(anything, nnx.Module):
        return Nnx(_Instance(anything))
    if _is_equinox(anything):
        return Equinox(_Instance(anything))
    if isinstance(anything, tuple) and len(anything) == 2 and all(callable(part) for part in anything):
        return Functions(*anything)
    if callable(anything) and not (inspect.isclass(anything) and issubclass(anything, nn.Module)):
        takes = arguments(anything)
        if "rngs" in takes:
            return Nnx(anything)
        if "key" in takes:
            return Equinox(anything)
    raise UsageError(
        f"model={anything!r} cannot be run; give a Linen module, an NNX module or a factory taking `rngs`, an Equinox "
        "module or a factory taking `key`, or a pair of functions (init, apply)."
    )


@dataclass(frozen=True)
class Nnx:
    """The model of an NNX module made by `factory(rngs=...)`; variables other than parameters are its statistics."""

    factory: Callable[..., nnx.Module]

    def init(self, key: Array, input_shape: tuple[int, ...]) -> Params:
        del input_shape
        weights, stats = _states(self.factory(rngs=nnx.Rngs(key)))
        return _copy(Params(nnx.to_pure_dict(weights), nnx.to_pure_dict(stats)))

    def apply(self, params: Params, x: Array, *, key: Array | None = None) -> tuple[Array, PyTree]:
        module: Any = self.factory(rngs=nnx.Rngs(jax.random.key(0) if key is None else key))
        weights, stats = _states(module)
        nnx.replace_by_pure_dict(weights, params.weights)
        nnx.replace_by_pure_dict(stats, params.stats)
        nnx.update(module, weights, stats)
        if jax.default_backend() == "cpu":
            _exchange_convolutions(module)
        if key is None:
            module.eval()
            return module(x), params.stats
        module.train()
        outputs = module(x)
        return outputs, nnx.to_pure_dict(_states(module)[1])

    def last_layer(self, input_shape: tuple[int, ...]) -> str:
        return _last_used(self, input_shape)


@dataclass(frozen=True)
class Equinox:
    """The model of an Equinox module made by `factory(key=...)`, mapped over the batch.

    Weights are its floating-point arrays, in a dict by path such as `layers/0/weight`. If the module's call takes
    `key`, each example of a training batch gets its own.
    """

    factory: Callable[..., Any]

    def init(self, key: Array, input_shape: tuple[int, ...]) -> Params:
        params = _copy(Params({path: leaf for path, leaf in _leaves(self.factory(key=key)) if _is_weight(leaf)}))
        _warn_of_convolutions(self, params, input_shape, "Equinox")
        return params

    def apply(self, params: Params, x: Array, *, key: Array | None = None) -> tuple[Array, PyTree]:
        import equinox as eqx

        made = self.factory(key=jax.random.key(0))
        leaves = [params.weights[path] if _is_weight(leaf) else leaf for path, leaf in _leaves(made)]
        module: Any = jax.tree.unflatten(jax.tree.structure(made), leaves)
        module = eqx.nn.inference_mode(module, value=key is None)
        takes = inspect.signature(type(module).__call__).parameters
        if "state" in takes:
            raise UsageError(
                f"model={type(module).__name__} carries Equinox state, but only modules called with one example can be "
                "adapted; use layer or group normalisation, or a Linen module with batch normalisation."
            )
        if "key" not in takes:
            return jax.vmap(module)(x), params.stats
        if key is None:
            return jax.vmap(lambda example: module(example, key=None))(x), params.stats
        outputs = jax.vmap(lambda example, own: module(example, key=own))(x, jax.random.split(key, x.shape[0]))
        return outputs, params.stats

    def last_layer(self, input_shape: tuple[int, ...]) -> str:
        return _last_used(self, input_shape)


@dataclass(frozen=True)
class Functions:
    """The model of two plain functions: `make(key, input_shape) -> weights` and `run(weights, x) -> outputs`."""

    make: Callable[[Array, tuple[int, ...]], PyTree]
    run: Callable[[PyTree, Array], Array]

    def init(self, key: Array, input_shape: tuple[int, ...]) -> Params:
        params = Params(self.make(key, input_shape))
        _warn_of_convolutions(self, params, input_shape, getattr(self.run, "__name__", "apply"))
        return params

    def apply(self, params: Params, x: Array, *, key: Array | None = None) -> tuple[Array, PyTree]:
        del key
        return self.run(params.weights, x), params.stats

    def last_layer(self, input_shape: tuple[int, ...]) -> str:
        return _last_used(self, input_shape)


@dataclass(frozen=True, eq=False)
class _Instance:
    """A factory that returns the module it was given, weights included; equal to another of the very same module."""

    module: Any

    def __call__(self, *, rngs: nnx.Rngs | None = None, key: Array | None = None) -> Any:
        del key
        if rngs is None:
            return self.module
        module = nnx.clone(self.module)  # a call must not change the user's own
        for _, node in nnx.iter_graph(module):
            if isinstance(node, nnx.RngStream):
                node.key.set_value(rngs())
        return module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Instance) and other.module is self.module

    def __hash__(self) -> int:
        return id(self.module)


def _is_equinox(anything: Any) -> bool:
    equinox = sys.modules.get("equinox")  # whoever holds such a module has imported the library
    return equinox is not None and isinstance(anything, equinox.Module)


def _copy(params: Params) -> Params:
    # A caller may donate its parameters to a compiled function, which must not empty the arrays of a user's module.
    return jax.tree.map(jnp.copy, params)


def _states(module: nnx.Module) -> tuple[Any, Any]:
    """Return parameters, and all other variables but the random ones."""
    states: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return states[1], states[3]


def _exchange_convolutions(module: nnx.Module) -> None:
    for path, node in nnx.iter_graph(module):
        name = "/".join(str(part) for part in path)
        if isinstance(node, nnx.Conv) and node.conv_general_dilated is lax.conv_general_dilated:
            node.conv_general_dilated = conv.stand_in(name)
        elif isinstance(node, nnx.ConvTranspose):
            conv.warn_slow(name, "ConvTranspose has no fast form")


def _leaves(tree: PyTree) -> list[tuple[str, Any]]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in found]


def _is_weight(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _trace(model: Model, params: Params, input_shape: tuple[int, ...]) -> Jaxpr:
    def run(weights: PyTree, stats: PyTree, x: Array) -> Array:
        return model.apply(Params(weights, stats), x)[0]

    return jax.make_jaxpr(run)(params.weights, params.stats, jnp.zeros((1, *input_shape))).jaxpr


def _warn_of_convolutions(model: Model, params: Params, input_shape: tuple[int, ...], name: str) -> None:
    if jax.default_backend() != "cpu":
        return
    steps = _steps(_trace(model, params, input_shape), {})
    if any(primitive == "conv_general_dilated" for primitive, _ in steps):
        conv.warn_slow(name, "only Flax layers are exchanged")


def _last_used(model: Model, input_shape: tuple[int, ...]) -> str:
    """Return the pattern of the weights used from the last matrix on, the one whose first use comes latest.

    Only the computation tells: containers of weights forget the order of layers.
    """
    params = shapes(model, input_shape)
    leaves = _leaves(params.weights)
    if not leaves:
        raise UsageError(f"model={model!r} has no weights; give a model that can be trained.")
    jaxpr = _trace(model, params, input_shape)
    number = {variable: index for index, variable in enumerate(jaxpr.invars[: len(leaves)])}
    first: dict[int, int] = {}
    for time, (_, used) in enumerate(_steps(jaxpr, number)):
        for index in used:
            first.setdefault(index, time)
    matrices = [index for index in first if len(leaves[index][1].shape) >= 2] or list(first)
    start = max(first[index] for index in matrices)
    return _pattern([leaves[index][0] for index in first if first[index] >= start], [path for path, _ in leaves])


def _steps(jaxpr: Jaxpr, number: dict[Any, int]) -> Iterator[tuple[str, list[int]]]:
    """Yield each primitive operation in order, nested ones too, with the numbers of the weights it reads."""
    for equation in jaxpr.eqns:
        used = [number.get(v) if not isinstance(v, Literal) else None for v in equation.invars]
        inner = [value for value in equation.params.values() if isinstance(value, ClosedJaxpr | Jaxpr)]
        if not inner:
            yield equation.primitive.name, [index for index in used if index is not None]
        for value in inner:
            nested = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            # Operands of a nested computation are the last ones, whatever stands before them.
            pairs = zip(reversed(nested.invars), reversed(used), strict=False)
            yield from _steps(nested, {v: index for v, index in pairs if index is not None})


def _pattern(head: list[str], every: list[str]) -> str:
    """Return the layer that holds exactly the paths of the head, or else these paths one by one."""
    if len(head) == len(every):
        return ""
    layer = head[0].rpartition("/")[0]
    if layer and {path for path in every if path.startswith(layer + "/")} == set(head):
        return re.escape(layer)
    return "|".join(re.escape(path) for path in sorted(head))
