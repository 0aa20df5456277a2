"""What voids a certificate, in the words of all methods for which it does."""

import jax

from priory.fed.method import Task


def own_statistics(task: Task) -> str | None:
    """Why a posterior with statistics of its own has no certificate; None where the model keeps none."""
    stats = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0))).stats
    if not jax.tree.leaves(stats):
        return None
    return (
        "the statistics of its batch norm are fitted to the client's own rows and are no draw of q; choose a model "
        "without batch norm"
    )


def trained_head(update: str) -> str | None:
    """Why a head that is frozen in training has no certificate; None where the whole network is learned together."""
    if update == "full":
        return None
    return (
        f"update={update} leaves a head that has no prior, and personalisation fits it to the client's own rows; "
        "choose update=full"
    )
