"""The server's part of a round: simulator and deployment call the same function."""

from typing import Any

from jax import Array

from priory.core import trees
from priory.core.rng import Key
from priory.fed import privacy
from priory.fed.channel import references_of
from priory.fed.method import Info
from priory.fed.robust import Rule, centre
from priory.fed.visit import RoundContext


def server_step(
    context: RoundContext, server: Any, received: Any, key: Key, *, rule: Rule | None = None
) -> tuple[Any, Info, Array]:
    """Return the next server, its figures, and whether it was discarded because it is not finite.

    A server that is discarded is replaced by the old one, so that what is broadcast and committed is always finite.

    Args:
        received: Stacked messages, or one that stands for them by law 3; for a channel that noises their sum, the
            noised mean of their differences from the reference.
        rule: The centre of the messages that `aggregate` sees in place of their weighted mean.
    """
    method, task, down = context.method, context.task, context.down
    if isinstance(context.channel, privacy.NoisedSum):
        received = privacy.released(context.channel, method, task, down, received)
    elif rule is not None:
        received = centre(rule, received, references_of(method, task, down, received.payload))
    after, info = method.aggregate(task, server, received, key)
    discarded = ~trees.all_finite(after)
    return trees.select(discarded, server, after), info, discarded
