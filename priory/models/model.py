"""What the federation knows of a network: how to make its parameters, how to run it, and which layer comes last.

A model is a hashable description without arrays, so it can be a static field of a task: two equal descriptions share
one compilation. Its parameters are a `Params`: weights, which methods learn, and statistics, which they only average.
"""

import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
from jax import Array

from priory.core import rng
from priory.core.errors import UsageError, untrusted
from priory.core.struct import struct

__all__ = ["Head", "Model", "Params", "as_model", "check_trusted", "code_named", "default", "default_spec", "parse"]

PyTree = Any
BUILT_IN = ("linear", "mlp", "cnn", "cnn3", "reddi", "intercept", "factor")
FACTORY = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")


@struct
class Params:
    """Statistics are not weights: no prior, penalty or clip touches them.

    Attributes:
        weights: What is learned.
        stats: Running statistics of batch normalisation; an empty dict without it.
    """

    weights: PyTree
    stats: PyTree = field(default_factory=dict)


@runtime_checkable
class Model(Protocol):
    """A hashable description of a network; examples have shape `input_shape`, batches one axis more in front."""

    def init(self, key: Array, input_shape: tuple[int, ...]) -> Params:
        """Fresh parameters."""
        ...

    def apply(self, params: Params, x: Array, *, key: Array | None = None) -> tuple[Array, PyTree]:
        """Outputs `(batch, num_outputs)` and statistics.

        A key means training: dropout draws from it and batch statistics are updated. Without one the model is evaluated
        and the statistics come back as they were.
        """
        ...

    def last_layer(self, input_shape: tuple[int, ...]) -> str:
        """The pattern of the last layer's parameter paths, such as `Dense_1`, which `Head` understands."""
        ...


@dataclass(frozen=True)
class Head:
    """A predicate on parameter paths that is true where `pattern` matches leading components of the path.

    A path joins names by "/". The pattern is a prefix or a regular expression and must end at a "/" or at the end of
    the path; "a|b" names two prefixes, and the empty pattern matches every path.

    >>> Head("Dense_1")("Dense_1/kernel"), Head("Dense_1")("Dense_10/kernel"), Head("Dense_[12]")("Dense_2/bias")
    (True, False, True)
    """

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UsageError(
                f"head={self.pattern!r} is not a regular expression ({error}); give a prefix of parameter paths such "
                "as Dense_1, or a valid expression."
            ) from None

    def __call__(self, path: str) -> bool:
        return self.pattern == "" or re.match(rf"(?:{self.pattern})(?:/|$)", path) is not None


def as_model(anything: Any) -> Model:
    """The model that describes `anything`: a model, a Linen module, an NNX or Equinox module or factory, or a pair.

    A factory is a function or class that takes `rngs` (NNX) or `key` (Equinox); it is called anew by `init`. A module
    instance of these libraries already holds weights, and `init` returns them. A pair is two plain functions,
    `init(key, input_shape) -> weights` and `apply(weights, x) -> outputs`.
    """
    from priory.models.adapters import adapt  # here, because the adapters build on this file

    return anything if isinstance(anything, Model) and not inspect.isclass(anything) else adapt(anything)


def shapes(model: Model, input_shape: tuple[int, ...]) -> Params:
    """Return the shapes and types of fresh parameters."""
    return jax.eval_shape(lambda key: model.init(key, input_shape), jax.eval_shape(rng.root, 0))


def parse(spec: str, *, input_shape: tuple[int, ...], num_outputs: int) -> Model:
    """The model named by `spec`: "linear", "mlp:256,128", "cnn:16,32", "cnn3:16,32,64", "reddi", "factor:2" and so on.

    "mlp" alone has one hidden layer of 256 units; the numbers after "cnn" are the channels of its 5x5 convolutions;
    "cnn3" has 3x3 ones, and the last of its numbers is the width of its dense layer; so it is with "reddi", where
    "pool" may stand between them; "intercept" learns a constant and reads no input; "factor:RANK" is linear through
    RANK numbers, without biases. A factory, "package.module:factory", is called with `num_outputs` if it takes an
    argument, and what it returns goes through `as_model`.
    """
    from priory.models import nets
    from priory.models.linen import Linen

    name, _, argument = spec.partition(":")
    match name:
        case "linear" if not argument:
            return Linen(nets.MLP((), num_outputs))
        case "mlp":
            return Linen(nets.MLP(_widths(spec, argument or "256"), num_outputs))
        case "cnn":
            channels = _widths(spec, argument) if argument else nets.CNN.channels
            _check_image(spec, input_shape, smallest=2 ** len(channels))
            return Linen(nets.CNN(num_outputs, channels))
        case "cnn3" if argument:
            numbers = _widths(spec, argument)
            _check_image(spec, input_shape, smallest=2 ** (len(numbers) - 1))
            return Linen(nets.CNN(num_outputs, numbers[:-1], numbers[-1], side=3))
        case "reddi":
            stages, width = _stages(spec, argument) if argument else (nets.Reddi.stages, nets.Reddi.width)
            _check_image(spec, input_shape, smallest=nets.Reddi.smallest(stages))
            return Linen(nets.Reddi(num_outputs, stages, width))
        case "intercept" if not argument:
            return Linen(nets.Intercept(num_outputs))
        case "factor" if argument:
            return Linen(nets.Factor(_rank(spec, argument), num_outputs))
    if not _imports(spec):
        raise UsageError(
            f"model={spec!r} is unknown; choose linear, mlp, mlp:WIDTH[,WIDTH...], cnn, cnn:CHANNELS[,CHANNELS...], "
            "cnn3:CHANNELS[,CHANNELS...],WIDTH, reddi, reddi:CHANNELS[,CHANNELS...],WIDTH, intercept, factor:RANK or "
            "package.module:factory."
        )
    factory = _imported(spec, name, argument)
    try:
        built = _build(factory, num_outputs)
    except Exception as error:  # whatever a user's factory raises
        raise UsageError(
            f"model={spec!r} cannot be built ({type(error).__name__}: {error}); give a factory that takes the number "
            "of outputs, or nothing."
        ) from error
    return as_model(built)


def code_named(model: str | None, models: str | None) -> str | None:
    """Return the first model that `parse` would import, of the settings `model` and `models`; None if it would not.

    It looks at the same text as `parse`: all of `model`, and each entry of `models`.

    >>> code_named("mynet:make", None), code_named("mlp:256,128", "cnn,mlp:8")
    ('mynet:make', None)
    """
    return next(filter(_imports, (model or "", *several(models or ""))), None)


def check_trusted(names: Mapping[str, Any], file: Path, trust_code: bool) -> None:
    """Raise where a file names a model that is Python code, unless the user trusts it.

    Code of an installed package needs trust as well: a file that may call any function of any package can do harm.

    Args:
        names: The values of `model` and `models` in the file; None where there is none.
    """
    for setting, value in names.items():
        if value is not None and not isinstance(value, str):
            raise UsageError(f"{file} has {setting}={value!r}, which is not text; write a name such as 'mlp:256'.")
    code = code_named(names.get("model"), names.get("models"))
    if code is not None and not trust_code:
        raise untrusted("model", code, file)


def several(text: str) -> tuple[str, ...]:
    """The models of a list; numbers and the word pool go on with the model before them.

    >>> several("mlp:32,mlp:256,128,cnn")
    ('mlp:32', 'mlp:256,128', 'cnn')
    """
    specs: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if specs and (part.isdigit() or part == "pool"):
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return tuple(specs)


def default(input_shape: tuple[int, ...], num_outputs: int) -> Model:
    """The model that suits the shape of the data, see `default_spec`."""
    return parse(default_spec(input_shape, num_outputs), input_shape=input_shape, num_outputs=num_outputs)


def default_spec(input_shape: tuple[int, ...], num_outputs: int) -> str:
    """The name of the model that suits the shape of the data.

    Images of at least 16 by 16 pixels get the convolutional network, and other inputs one hidden layer: 64 units for up
    to 64 features, 256 above. Regression on up to 32 features is linear.
    """
    num_features = math.prod(input_shape)
    if len(input_shape) >= 2 and min(input_shape[:2]) >= 16:
        return "cnn"
    if num_outputs == 1 and num_features <= 32:
        return "linear"
    return "mlp:64" if num_features <= 64 else "mlp:256"


def _imports(spec: str) -> bool:
    """Return whether `parse` would import a module to build the model of that name."""
    found = FACTORY.fullmatch(spec)
    return found is not None and found[1] not in BUILT_IN


def _widths(spec: str, argument: str) -> tuple[int, ...]:
    parts = argument.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"model={spec!r} needs positive whole numbers after the colon; write for example mlp:256,128.")
    return tuple(int(part) for part in parts)


def _stages(spec: str, argument: str) -> tuple[tuple[int | str, ...], int]:
    """Channels and poolings of the convolutions, and the width of the dense layer."""
    parts = argument.split(",")
    numbers = [part for part in parts if part != "pool"]
    if len(numbers) < 2 or parts[-1] == "pool" or not all(part.isascii() and part.isdigit() for part in numbers):
        raise UsageError(
            f"model={spec!r} needs channels, with the word pool where wanted, and at last the width of its dense "
            "layer; write for example reddi:8,16,pool,32,128."
        )
    _widths(spec, ",".join(numbers))
    return tuple(part if part == "pool" else int(part) for part in parts[:-1]), int(parts[-1])


def _rank(spec: str, argument: str) -> int:
    if not (argument.isascii() and argument.isdigit() and int(argument) > 0):
        raise UsageError(f"model={spec!r} needs one positive whole number after the colon; write for example factor:2.")
    return int(argument)


def _check_image(spec: str, input_shape: tuple[int, ...], smallest: int) -> None:
    if len(input_shape) not in (2, 3) or min(input_shape[:2]) < smallest:
        raise UsageError(
            f"model={spec!r} needs images of at least {smallest} by {smallest} pixels, but an example has shape "
            f"{input_shape}; choose mlp or linear."
        )


def _imported(spec: str, module: str, attribute: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a user's file raises while it is imported
        raise UsageError(
            f"model={spec!r} cannot be imported ({type(error).__name__}: {error}); give package.module:factory of an "
            "installed package or of a file in the current directory."
        ) from error


def _build(named: Any, num_outputs: int) -> Any:
    if not inspect.isroutine(named) and not inspect.isclass(named):
        return named  # already a module, a model or a pair
    factory: Callable[..., Any] = named
    takes = arguments(factory)
    if "rngs" in takes or "key" in takes:
        return functools.partial(factory, num_outputs=num_outputs) if "num_outputs" in takes else factory
    if "num_outputs" in takes:
        return factory(num_outputs=num_outputs)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return factory(num_outputs) if any(kind in positional for kind in takes.values()) else factory()


def arguments(factory: Callable[..., Any]) -> dict[str, Any]:
    """The kind of each argument of a function, class or `functools.partial`, by name."""
    if isinstance(factory, functools.partial):
        return arguments(factory.func)
    # A class is read through `__init__`: the metaclasses of NNX and Equinox hide its arguments.
    function = factory.__init__ if inspect.isclass(factory) else factory
    kinds = {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
    hidden = {"self", "parent", "name"} if inspect.isclass(factory) and issubclass(factory, nn.Module) else {"self"}
    return {name: kind for name, kind in kinds.items() if name not in hidden}
