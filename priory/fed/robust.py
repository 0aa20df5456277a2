"""Robust aggregation: a centre of the messages that a few wild ones cannot move far, in place of their mean.

A linear method needs no more of its messages than one that weighs as much as all (law 3 of `fed.method`), so the centre
reaches `aggregate` as a stack of one, and no method knows of it. Every message that is present counts once: a weight is
a claim, and whoever sends a false payload may claim a large one.

    median       of every number by itself
    trimmed:B    mean of every number by itself, without the ⌊B·m⌋ smallest and the ⌊B·m⌋ largest of m messages
    krum[:F]     the message that is nearest to its neighbours, F of m being false
    norm-clip:C  mean of payload − reference, each scaled down to a norm of at most C, with the reference added back

Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018, arXiv:1803.01498, for
median and trimmed mean. Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
NeurIPS 2017, arXiv:1703.02757, for Krum. Sun et al., Can You Really Backdoor Federated Learning?, arXiv:1911.07963, for
clipped norms.
"""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.struct import static, struct
from priory.fed.channel import clipped
from priory.fed.method import Message

SYNTAX = "median, trimmed:SHARE, krum, krum:FALSE or norm-clip:NORM, such as trimmed:0.1"


@struct
class Median:
    """The median of every number; the mean of the two in the middle where there are two."""


@struct
class Trimmed:
    """The mean of every number without the smallest and the largest.

    Attributes:
        share: B in [0, 0.5), the share of the messages that is dropped at each end.
    """

    share: float = static()


@struct
class Krum:
    """The message with the smallest sum of squared distances to its m − F − 2 nearest.

    Messages that tie count equally, so that their order does not matter. The paper's guarantee needs m ≥ 2F + 3. Below
    that one neighbour is looked at: of two messages the centre is the mean, of three the mean of the closest two.

    Attributes:
        false: F, how many messages may be false; as many as the guarantee allows, ⌊(m − 3) / 2⌋, if None.
    """

    false: int | None = static(default=None)


@struct
class NormClip:
    """The mean of what was learned, each scaled down to a norm.

    Attributes:
        norm: C, the largest norm that passes unchanged.
    """

    norm: float = static()


Rule = Median | Trimmed | Krum | NormClip


def parse(text: str) -> Rule:
    """The rule that a text names, checked.

    >>> parse("median"), parse("trimmed:0.1"), parse("krum"), parse("krum:2"), parse("norm-clip:5")
    (Median(), Trimmed(share=0.1), Krum(false=None), Krum(false=2), NormClip(norm=5.0))
    """
    name, _, value = str(text).partition(":")
    try:
        match name:
            case "median" if text == name:
                return Median()
            case "krum" if text == name:
                return Krum()
            case "krum":
                rule: Rule = Krum(int(value))
            case "trimmed":
                rule = Trimmed(float(value))
            case "norm-clip":
                rule = NormClip(float(value))
            case _:
                raise ValueError
    except ValueError:
        raise UsageError(f"robust={text!r} is not understood; write {SYNTAX}.") from None
    match rule:
        case Krum(false=int(false)) if false < 0:
            raise UsageError(f"robust={text!r} has a negative number of false messages; choose krum:1.")
        case Trimmed(share=share) if not 0 <= share < 0.5:
            raise UsageError(f"robust={text!r} drops a share outside [0, 0.5) at each end; choose trimmed:0.1.")
        case NormClip(norm=norm) if not 0 < norm < math.inf:
            raise UsageError(f"robust={text!r} clips to no positive number; choose one such as norm-clip:1.")
    return rule


def centre(rule: Rule, messages: Message, reference: Any) -> Message:
    """The centre of the stacked messages as a stack of one that weighs as many as are present; zeros if nobody is.

    A message of weight 0 is absent and adds nothing, whatever it holds.

    Args:
        reference: What each sender would have sent had it learned nothing, stacked like the payloads.
    """
    _check_numbers(messages.payload)
    present = messages.weight > 0
    num = jnp.sum(present)
    payload: Any
    match rule:
        case Median() | Trimmed():
            payload = trees.weighted_sum(_sorted(messages.payload, present), _weight_by_rank(rule, present))
        case Krum():
            payload = trees.weighted_sum(messages.payload, _nearest(rule, messages.payload, present))
        case NormClip():
            payload = trees.weighted_sum(
                (messages.payload, reference),
                present / jnp.maximum(num, 1),
                of=lambda pair: trees.add(pair[1], clipped(trees.sub(*pair), rule.norm)),
            )
    return jax.tree.map(lambda leaf: leaf[None], Message(payload, num.astype(jnp.float32)))


def _weight_by_rank(rule: Median | Trimmed, present: Array) -> Array:
    """What the smallest, the second, ... of the numbers that are present weigh; those that are absent come last."""
    num, rank = jnp.sum(present), jnp.arange(present.shape[0])
    if isinstance(rule, Median):
        lower, upper = rank == (num - 1) // 2, rank == num // 2
        return jnp.where(num > 0, 0.5 * lower + 0.5 * upper, 0.0)
    # A table, since the share is a decimal that somebody wrote: in floating point ⌊0.29 · 100⌋ is 28.
    table = [math.floor(Fraction(str(rule.share)) * m) for m in range(present.shape[0] + 1)]
    dropped = jnp.asarray(table)[num]
    kept = (rank >= dropped) & (rank < num - dropped)
    return kept / jnp.maximum(num - 2 * dropped, 1)


def _sorted(payload: Any, present: Array) -> Any:
    """Every number's values in ascending order, with +∞ for those that are absent."""

    def one(leaf: Array) -> Array:
        return jnp.sort(jnp.where(_along(present, leaf), leaf, jnp.inf), axis=0)

    return jax.tree.map(one, payload)


def _nearest(rule: Krum, payload: Any, present: Array) -> Array:
    """The weights of the messages: 1 for the nearest to its neighbours, shared among those that tie."""
    num = jnp.sum(present)
    false = jnp.maximum((num - 3) // 2, 0) if rule.false is None else rule.false
    neighbours = jnp.maximum(num - false - 2, 1)
    near = jnp.sort(jnp.where(present[None], _distances(payload, present), jnp.inf), axis=1)
    looked_at = jnp.arange(near.shape[1]) < jnp.minimum(neighbours, num - 1)
    score = jnp.where(present, jnp.sum(jnp.where(looked_at, near, 0.0), axis=1), jnp.inf)
    chosen = present & (score == jnp.min(score))
    return chosen / jnp.maximum(jnp.sum(chosen), 1)


def _distances(payload: Any, present: Array) -> Array:
    """‖payload_i − payload_j‖², (messages, messages), and +∞ from a message to itself.

    Not by inner products: after one wild message, or late in training, the difference of two large ones has no digits.
    """
    known = jax.tree.map(lambda leaf: jnp.where(_along(present, leaf), leaf, 0), payload)

    def to_all(i: Array) -> Array:
        total = jnp.zeros(present.shape[0])
        for leaf in jax.tree.leaves(known):
            total += jnp.sum(jnp.square(leaf - leaf[i][None]).reshape(leaf.shape[0], -1), axis=1)
        return total

    found = lax.map(to_all, jnp.arange(present.shape[0]))
    # From i to j and back may be rounded differently, and the closest two would not tie.
    return jnp.where(jnp.eye(present.shape[0], dtype=bool), jnp.inf, jnp.maximum(found, found.T))


def _along(present: Array, leaf: Array) -> Array:
    return present.reshape((-1,) + (1,) * (leaf.ndim - 1))


def _check_numbers(payload: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(payload)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UsageError(
                f"{trees.path_of(path)} of a message has whole numbers, which have no centre; leave out robust."
            )
