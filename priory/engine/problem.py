"""The problem that a federation poses: likelihood, network and head, checked before anything is compiled."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from priory.core import rng, trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.data import Federation
from priory.engine import demand
from priory.engine.architectures import Tasks
from priory.engine.settings import Settings
from priory.fed.method import Task
from priory.models.likelihood import Categorical, Gaussian, WithScale
from priory.models.model import Head, Model, as_model, default, default_spec, parse, several


@dataclass(frozen=True, eq=False)
class Question:
    """What a federation asks, without anybody's examples: all that a server knows of the data.

    Attributes:
        name: Of the data.
        input_shape: Of one example.
        num_classes: None for regression.
        has_scale: Whether the targets of a regression come with standard errors.
        num_clients: N, without newcomers.
        num_examples: |D|, their training examples together.
        public: Inputs known to all as a model sees them, or None.
    """

    name: str
    input_shape: tuple[int, ...]
    num_classes: int | None
    has_scale: bool
    num_clients: int
    num_examples: int
    public: np.ndarray | None = None


def question_of(federation: Federation) -> Question:
    """What a federation asks."""
    num = federation.num_clients
    return Question(
        federation.name,
        federation.input_shape,
        federation.num_classes,
        federation.scale is not None,
        num,
        int(federation.train.count[:num].sum()),
        None if federation.public is None else federation.inputs(federation.public),
    )


def tasks_of(federation: Federation, chosen: Settings, model: Any = None) -> Tasks:
    """The problem that a federation poses to each group of clients, one group unless several models are given."""
    return tasks_for(question_of(federation), chosen, model)


def tasks_for(asked: Question, chosen: Settings, model: Any = None) -> Tasks:
    """The same from what is known of the data."""
    likelihood, outputs = _likelihood(asked, chosen)
    shape, num = asked.input_shape, asked.num_clients
    public = None if asked.public is None else jnp.asarray(asked.public)

    def task(network: Model, name: str) -> Task:
        network = with_likelihood(network, likelihood)
        demand.check_model(network, shape, name)
        _check_outputs(network, shape, outputs + isinstance(network, WithScale))
        if chosen.head is not None:
            _check_head(network, shape, chosen.head)
        head = Head(chosen.head if chosen.head is not None else network.last_layer(shape))
        return Task(network, likelihood, shape, num, asked.num_examples, head, public)

    networks = _networks(shape, outputs, chosen, model)
    specs = several(chosen.models) if chosen.models else (chosen.model or default_spec(shape, outputs),)
    names = specs if model is None else [type(one).__name__ for one in networks]
    return tuple(map(task, networks, names))


def with_likelihood(network: Model, likelihood: Categorical | Gaussian) -> Model:
    """The network with an output more where the likelihood learns its scale."""
    learned = isinstance(likelihood, Gaussian) and likelihood.scale == "learned"
    return WithScale(network) if learned else network


def names_of(chosen: Settings, model: Any, tasks: Tasks) -> tuple[str, ...]:
    """What the models of the groups are called in tables."""
    if isinstance(model, list):
        return tuple(one if isinstance(one, str) else type(one).__name__ for one in model)
    return several(chosen.models) if chosen.models is not None else ("all",) * len(tasks)


def _networks(shape: tuple[int, ...], outputs: int, chosen: Settings, model: Any) -> list[Model]:
    """The networks that were named or given; a list of them is for clients in turn."""

    def named(spec: str) -> Model:
        return parse(spec, input_shape=shape, num_outputs=outputs)

    if model is not None and chosen.models is not None:
        raise UsageError(f"models={chosen.models} and model= both name networks; give one of them.")
    if isinstance(model, list):
        if not model:
            raise UsageError("model=[] names no network; give at least one.")
        return [named(one) if isinstance(one, str) else as_model(one) for one in model]
    if model is not None:
        return [as_model(model)]
    if chosen.models is not None:
        return [named(spec) for spec in several(chosen.models)]
    return [default(shape, outputs) if chosen.model is None else named(chosen.model)]


def _likelihood(asked: Question, chosen: Settings) -> tuple[Categorical | Gaussian, int]:
    if asked.num_classes is not None:
        if chosen.scale is not None:
            raise UsageError(
                f"scale={chosen.scale} belongs to a regression, but {asked.name} has classes; leave it out."
            )
        return Categorical(asked.num_classes), asked.num_classes
    known = asked.has_scale
    scale = chosen.scale if chosen.scale is not None else ("column" if known else "learned")
    if scale == "column" and not known:
        raise UsageError(f"scale=column needs standard errors, which {asked.name} has not; give a number or learned.")
    return Gaussian(scale), 1


def _check_head(network: Model, shape: tuple[int, ...], pattern: str) -> None:
    """Raise when a head names no parameter."""
    weights = jax.eval_shape(lambda key: network.init(key, shape), jax.eval_shape(rng.root, 0)).weights
    paths = [trees.path_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(weights)[0]]
    if not any(Head(pattern)(path) for path in paths):
        raise UsageError(f"head={pattern!r} matches no parameter of the model; choose among {', '.join(paths)}.")


def _check_outputs(network: Model, shape: tuple[int, ...], outputs: int) -> None:
    """Raise when the model does not fit the data, before anything is compiled."""

    def forward(key: Key) -> Any:
        return network.apply(network.init(key, shape), jnp.zeros((2, *shape)))[0]

    try:
        got = jax.eval_shape(forward, jax.eval_shape(rng.root, 0)).shape
    except UsageError:
        raise
    except Exception as error:  # whatever a user's network raises on a shape it cannot take
        raise UsageError(f"The model cannot take inputs of shape {shape} ({error}); choose one that does.") from error
    if got != (2, outputs):
        raise UsageError(
            f"The model gives outputs of shape {got[1:]} where the data need {(outputs,)}; change its last layer."
        )
