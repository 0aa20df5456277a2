"""The number of clusters of a method, chosen on validation rows: the fewest that are as good as the best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from priory.core.errors import UsageError
from priory.data import Federation
from priory.engine import check as check_run
from priory.engine import simulate
from priory.fed import schedule
from priory.fed.method import Method
from priory.stats import standard_error
from priory.tune.validation import RoundCount, without_test

MOST_CLUSTERS = 4  # that `clusters="auto"` tries


@dataclass(frozen=True, eq=False)
class Tried:
    """How a number of clusters did on the validation rows.

    Attributes:
        clusters: K.
        nll: Mean negative log-likelihood of each client's validation rows under its own posterior, (clients with any,).
    """

    clusters: int
    nll: np.ndarray


def check(method: Method, federation: Federation, **options: Any) -> None:
    """Raise whatever `simulate` would raise on these arguments, after `settle` where a number of clusters is open."""
    if is_open(method):
        _check_choice(federation, options)
        method = schedule.put(method, ("clusters",), 1)
    check_run(method, federation, **options)


def settle(method: Method, federation: Federation, **options: Any) -> Any:
    """Return the method with a number where `clusters="auto"` asks for one; any other method as it is.

    K in 1 … min(4, clients) is chosen on the validation rows, each after a run with the same `options`, which are those
    of the final run (rounds, seed, model, …): the smallest within one standard error of the best.
    """
    if not is_open(method):
        return method
    return schedule.put(method, ("clusters",), fewest(try_clusters(method, federation, **options)))


def is_open(method: Method) -> bool:
    """Return whether the method's number of clusters is still to be chosen."""
    return bool(getattr(method, "clusters", None) == "auto")


def try_clusters(
    method: Method,
    federation: Federation,
    *,
    told: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> list[Tried]:
    """Run with 1 … min(4, clients) clusters and score each on the validation rows; test rows are not read.

    Args:
        federation: With a validation part.
        told: Given how many of how many rounds are done, over all runs.
        stop: Asked between blocks of rounds; when true, the list ends with the numbers that were tried.
    """
    _check_choice(federation, options)
    held = without_test(federation)
    numbers = range(1, min(MOST_CLUSTERS, federation.num_clients) + 1)
    found = []
    for number in numbers:
        listener = RoundCount(told, number - 1, len(numbers))
        how: dict[str, Any] = {**options, "eval_every": 0}
        run = simulate(schedule.put(method, ("clusters",), number), held, listener=listener, stop=stop, **how)
        if stop():
            break
        assert run.personal is not None, "there are validation rows"
        scores = run.personal.per_client
        found.append(Tried(number, scores["nll"][scores["count"] > 0]))
    return found


def _check_choice(federation: Federation, options: dict[str, Any]) -> None:
    """Raise where the validation rows cannot decide the number of clusters."""
    share = options.get("exclude_uncertain")
    if share:
        raise UsageError(f"exclude-uncertain={share} needs the rows that clusters=auto is chosen on; give a number.")
    if federation.validation.count[: federation.num_clients].sum() == 0:
        raise UsageError("clusters=auto is chosen on validation rows, and there are none; use --validation 0.2.")


def fewest(tried: Sequence[Tried]) -> int:
    """Return the smallest K whose mean nll over clients is within one standard error of the best K's.

    The standard error is that of the paired differences, client by client: how easy a client is does not enter.
    """
    finite = [one for one in tried if np.all(np.isfinite(one.nll))]
    if not finite:
        raise UsageError("clusters=auto found no number whose validation likelihood is finite; lower the step size.")
    best = min(finite, key=lambda one: float(np.mean(one.nll)))

    def is_as_good(one: Tried) -> bool:
        worse = one.nll - best.nll
        return bool(np.mean(worse) <= (standard_error(worse.tolist()) or 0.0))

    return min(one.clusters for one in finite if is_as_good(one))
