"""Local work: which optimiser, how much of it, and the loop over minibatches that the methods share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.checks import at_least, choices, positive
from priory.fed.method import Task
from priory.fed.shard import Batch, Shard
from priory.models.model import Params

Carry = TypeVar("Carry")
Objective = Callable[[Params, Batch, Key], tuple[Array, Any]]
Proximal = Literal["implicit", "explicit"]


@struct
class Optimiser:
    """An Optax optimiser as data: it has equality, prints into a manifest and becomes flags.

    Attributes:
        kind: Which optimiser takes the local steps.
        step_size: η, the learning rate.
        momentum: Heavy-ball momentum of sgd.
        weight_decay: Decoupled weight decay, times the step size.
        clip: Largest norm of a minibatch gradient; None leaves gradients alone.
    """

    kind: Literal["sgd", "adam", "rmsprop"] = static(default="sgd")
    step_size: float = 0.1
    momentum: float = static(default=0.0)  # static: without momentum there is no state to carry
    weight_decay: float = 0.0
    clip: float | None = static(default=None)

    def build(self, pull: "Pull | None" = None) -> optax.GradientTransformation:
        """The Optax transform, of a loss to which `pull` is added."""
        scalings = {
            "sgd": lambda: optax.trace(self.momentum) if self.momentum else optax.identity(),
            "adam": optax.scale_by_adam,
            "rmsprop": optax.scale_by_rms,
        }
        implicit = self.kind == "sgd" and pull is not None and pull.proximal == "implicit"
        return optax.chain(
            optax.identity() if self.clip is None else optax.clip_by_global_norm(self.clip),
            pull.gradient() if pull and not implicit else optax.identity(),
            scalings[self.kind](),
            optax.add_decayed_weights(self.weight_decay),
            optax.scale_by_learning_rate(self.step_size),
            pull.implicit(self.step_size / (1 - self.momentum)) if pull and implicit else optax.identity(),
        )

    def check(self) -> None:
        """Raise on a rate that cannot be meant."""
        choices(self)
        positive("step-size", self.step_size)
        at_least("weight-decay", self.weight_decay, 0)
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={self.momentum} lies outside [0, 1); choose one such as 0.9.")
        if self.momentum and self.kind != "sgd":
            raise UsageError(f"momentum={self.momentum} belongs to sgd, not to {self.kind}; leave it at 0.")
        if self.clip is not None:
            positive("clip", self.clip)


@struct
class Work:
    """How much a client does in a round; everything here shapes a loop, so everything is static.

    Attributes:
        epochs: Passes over the client's own examples.
        steps: Minibatches drawn with replacement instead of passes; overrides epochs.
        batch_size: b, examples in a minibatch.
    """

    epochs: int = static(default=1)
    steps: int | None = static(default=None)
    batch_size: int = static(default=32)

    def check(self) -> None:
        """Raise on an amount of work that cannot be done."""
        at_least("epochs", self.epochs, 0)
        at_least("batch-size", self.batch_size, 1)
        if self.steps is not None:
            at_least("steps", self.steps, 1)
            if self.epochs != 1:
                raise UsageError(
                    f"epochs={self.epochs} has no effect beside steps={self.steps}; add steps=None to count epochs, or "
                    "leave epochs out."
                )


@dataclass(frozen=True)
class Pull:
    """A quadratic penalty ½ Σ_j strength_j (w_j − centre_j)² beside the loss of a fit.

    Sgd takes it as an implicit step after that of the loss, w ← (w + ηs·c)/(1 + ηs), with the rate η/(1 − momentum)
    that momentum gives the loss, so that both have their optimum in the same place; it is stable at any strength. Adam
    and RMSprop bound their steps by themselves and see its gradient. Lives inside one trace.

    Attributes:
        centre: Where the weights are pulled, as a function of where they are.
        strength: A number for each weight, or one for each leaf.
        proximal: How sgd takes the penalty; "explicit" adds its gradient to that of the loss.
    """

    centre: Callable[[Any], Any]
    strength: Any
    proximal: Proximal = "implicit"

    def gradient(self) -> optax.GradientTransformation:
        """The transform that adds the gradient of the penalty."""

        def add(gradient: Any, weights: Any) -> Any:
            centre = self.centre(weights)
            return jax.tree.map(lambda g, s, w, c: g + s * (w - c), gradient, self.strength, weights, centre)

        return optax.stateless(add)

    def implicit(self, rate: Array | float) -> optax.GradientTransformation:
        """The transform that takes an implicit step on the penalty after the updates so far."""
        closer = jax.tree.map(lambda s: 1 / (1 + rate * s), self.strength)

        def move(updates: Any, weights: Any) -> Any:
            centre = self.centre(weights)
            return jax.tree.map(lambda u, k, w, c: (c - w) + k * ((w - c) + u), updates, closer, weights, centre)

        return optax.stateless(move)


def each_batch(step: Callable[[Carry, Batch, Key], Carry], carry: Carry, data: Shard, work: Work, key: Key) -> Carry:
    """The carry after `step` has seen every minibatch of the local work.

    The trip count follows the client's own size, so a small client costs little beside a large one; an epoch ends with
    a partial batch, its missing rows masked.
    """
    key_data, key_step = jax.random.split(key)
    if work.steps is not None:

        def draw(i: Array, carry: Carry) -> Carry:
            batch = data.batch(jax.random.fold_in(key_data, i), work.batch_size)
            return step(carry, batch, jax.random.fold_in(key_step, i))

        return jax.lax.fori_loop(0, work.steps, draw, carry)

    num_batches = data.num_batches(work.batch_size)

    def epoch(e: Array, carry: Carry) -> Carry:
        order = data.order(jax.random.fold_in(key_data, e))
        key_epoch = jax.random.fold_in(key_step, e)

        def take(i: Array, carry: Carry) -> Carry:
            return step(carry, data.take(order, i, work.batch_size), jax.random.fold_in(key_epoch, i))

        return jax.lax.fori_loop(0, num_batches, take, carry)

    return jax.lax.fori_loop(0, work.epochs, epoch, carry)


def fit(
    objective: Objective,
    params: Params,
    data: Shard,
    optimiser: Optimiser,
    work: Work,
    key: Key,
    pull: Pull | None = None,
) -> tuple[Params, Array]:
    """The parameters after local training, and the mean of the objective (without the pull) over its steps.

    `objective(params, batch, key)` gives a scalar to minimise and the new statistics; `params.weights` may be any
    part of a network (a head, a body) that the objective completes.
    """
    transform = optimiser.build(pull)

    def step(carry: tuple, batch: Batch, key: Key) -> tuple:
        params, state, total, steps = carry

        def loss(weights: Any) -> tuple[Array, Any]:
            return objective(Params(weights, params.stats), batch, key)

        (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(params.weights)
        updates, state = transform.update(gradient, state, params.weights)
        return Params(optax.apply_updates(params.weights, updates), stats), state, total + value, steps + 1

    start = (params, transform.init(params.weights), jnp.float32(0), jnp.int32(0))
    params, _, total, steps = each_batch(step, start, data, work, key)
    return params, total / jnp.maximum(steps, 1)


class Finetunes(Protocol):
    """A method whose personal models are trained from a shared network, with a rate that no schedule changes."""

    @property
    def optimiser(self) -> Optimiser: ...
    @property
    def work(self) -> Work: ...
    @property
    def finetune_epochs(self) -> int: ...
    @property
    def finetune_step_size(self) -> float: ...


def check_finetune(method: Finetunes) -> None:
    """Raise on settings of the fine-tuning that are out of range."""
    at_least("finetune-epochs", method.finetune_epochs, 0)
    positive("finetune-step-size", method.finetune_step_size)


def finetune_work(method: Finetunes) -> tuple[Optimiser, Work]:
    """Return the solver and the work of the fine-tuning."""
    optimiser = replace(method.optimiser, step_size=method.finetune_step_size)
    return optimiser, Work(epochs=method.finetune_epochs, batch_size=method.work.batch_size)


def finetune(
    method: Finetunes, objective: Objective, params: Params, data: Shard, key: Key, pull: Pull | None = None
) -> Params:
    """Return a network after the passes over a client's data that make it a personal one."""
    return fit(objective, params, data, *finetune_work(method), key, pull)[0]


def total_nll(task: Task, params: Params, data: Shard, batch_size: int) -> Array:
    """The negative log-likelihood of all examples of a client, summed a batch at a time."""
    order = jnp.arange(data.capacity)

    def step(i: Array, total: Array) -> Array:
        batch = data.take(order, i, batch_size)
        return total + jnp.sum(batch.mask) * task.nll(params, batch)[0]

    return jax.lax.fori_loop(0, data.num_batches(batch_size), step, jnp.float32(0))
