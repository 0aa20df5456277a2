"""A grid over the settings of a method, cut into parts that are run side by side."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from priory.core import trees
from priory.core.errors import UsageError
from priory.data import Federation
from priory.engine import Settings, grid
from priory.engine.grid import Control
from priory.engine.prepared import Prepared, prepare
from priory.fed import schedule
from priory.fed.method import Method
from priory.stats import Estimate, estimate
from priory.store import TrialDirectory
from priory.tune import trials
from priory.tune.trials import Trial
from priory.tune.validation import RoundCount, without_test


@dataclass(frozen=True)
class Axis:
    """One hyper-parameter and the values it takes.

    Attributes:
        name: As a user types it.
        path: Field names that lead to it in the method.
        values: To be tried.
        is_static: Whether a new value means a new compilation.
    """

    name: str
    path: tuple[str, ...]
    values: tuple[Any, ...]
    is_static: bool


@dataclass(frozen=True)
class Setting:
    """One point of the grid and how it did on the validation rows.

    Attributes:
        values: By name of the hyper-parameter.
        method: The method with these values.
        scores: One record for each seed, with `personal` and `global` as in summary.json.
    """

    values: dict[str, Any]
    method: Method
    scores: list[dict[str, Any]]

    def score(self, name: str) -> Estimate:
        """Return the mean over seeds of a score such as `personal.accuracy`."""
        part, score = name.split(".")
        return estimate([record[part] and record[part][score] for record in self.scores])


@dataclass(frozen=True)
class Part:
    """Trials that are run side by side: a cell of the grid.

    Attributes:
        kind: The number of its program.
        number: Its own among the parts of the program.
        trials: Those that are scored.
        size: How many are run: the last trial is repeated, so that all parts of a program have one size.
    """

    kind: int
    number: int
    trials: Sequence[Trial]
    size: int

    @property
    def name(self) -> str:
        """Its first and last trial."""
        return " to ".join(dict.fromkeys((self.trials[0].name, self.trials[-1].name)))

    @property
    def repeated(self) -> list[Trial]:
        """The trials that are run."""
        return [*self.trials, *[self.trials[-1]] * (self.size - len(self.trials))]

    def run(
        self,
        held: Federation,
        settings: Settings,
        told: Callable[[int], None],
        stop: Callable[[], bool],
        kept: TrialDirectory | None,
    ) -> dict[str, Any] | None:
        """Return the scores of the trials by name, kept as soon as they are there; None if the part was stopped."""
        place = f"{self.kind}-{self.number}"
        begin = None if kept is None else partial(kept.checkpoint, place)
        ready = prepare(self.trials[0].method, held, settings)
        scores = trials.scores_of(ready, self.repeated, told, stop, begin)
        if not scores:
            return None
        found = {trial.name: one for trial, one in zip(self.trials, scores, strict=False)}
        if kept is not None:
            kept.add(found)
            kept.drop(place)
        return found


def tune(
    method: Method,
    federation: Federation,
    axes: Sequence[Axis],
    *,
    seeds: int,
    settings: Settings,
    kept: TrialDirectory | None = None,
    control: Control = grid.UNWATCHED,
) -> list[Setting]:
    """Return the points of the grid, in its order, with their scores on the validation rows; test rows are not read.

    All of them are checked before the first is run. Points that lack the score of a seed, since the tuning was stopped
    or a part failed, are left out.

    Args:
        federation: With a validation part.
        seeds: How many, counted from the seed of the settings.
        kept: Where scores and checkpoints are kept, and looked for first; nowhere by default.
    """
    held = without_test(federation)
    points = [[Trial(*point, settings.seed + i) for i in range(seeds)] for point in _points(method, axes)]
    scores = {} if kept is None else kept.scores()
    parts = _missing_parts(points, axes, held, settings, scores)
    if kept is not None:
        kept.begin()

    def count(place: int, completed: int = settings.rounds) -> None:
        RoundCount(control.told, place, len(parts)).advanced(completed, settings.rounds, {})

    def run(place: int, part: Part) -> dict[str, Any] | None:
        return None if control.stop() else part.run(held, settings, partial(count, place), control.stop, kept)

    for _, found in grid.run(parts, run, control, count).results:
        scores.update(found)
    return [
        Setting(some[0].values, some[0].method, [scores[trial.name] for trial in some])
        for some in points
        if all(trial.name in scores for trial in some)
    ]


def ranked(settings: Sequence[Setting], by: str) -> list[Setting]:
    """Return the settings, best first by the mean over seeds; those without a finite score come last."""
    sign = -1.0 if by.endswith("accuracy") else 1.0

    def key(setting: Setting) -> float:
        mean = setting.score(by).value
        return math.inf if mean is None else sign * mean

    return sorted(settings, key=key)


def _points(method: Method, axes: Sequence[Axis]) -> Iterator[tuple[Method, dict[str, Any]]]:
    """Yield the method and its values at every point of the grid."""
    for values in itertools.product(*(axis.values for axis in axes)):
        point = method
        for axis, value in zip(axes, values, strict=True):
            point = schedule.put(point, axis.path, value)
        yield point, dict(zip((axis.name for axis in axes), values, strict=True))


def _missing_parts(
    points: Sequence[Sequence[Trial]],
    axes: Sequence[Axis],
    held: Federation,
    settings: Settings,
    scores: dict[str, Any],
) -> list[Part]:
    """Return the parts that lack scores, program by program; raise whatever any trial of them would raise."""
    for some in points:
        some[0].method.check()
    programs: dict[tuple[Any, ...], list[Trial]] = {}
    for some in points:
        fixed = tuple(some[0].values[axis.name] for axis in axes if axis.is_static)
        programs.setdefault(fixed, []).extend(some)
    parts: list[Part] = []
    for kind, own in enumerate(programs.values()):
        if all(trial.name in scores for trial in own):
            continue
        ready = prepare(own[0].method, held, settings)
        if len(ready.tasks) > 1:
            raise UsageError(
                f"models={settings.models} are several, and tuning compares settings on one; give --model."
            )
        if ready.ledger is not None:
            raise UsageError(
                f"dp={ready.ledger.mode} would be spent anew by every run of a tuning, and no total is kept; tune "
                "without it, on data that need no protection."
            )
        size = _size_of_parts(ready, len(own))
        cut = [Part(kind, i // size, own[i : i + size], size) for i in range(0, len(own), size)]
        trials.rehearse(ready, cut[0].repeated)
        parts += [part for part in cut if not all(trial.name in scores for trial in part.trials)]
    return parts


def _size_of_parts(ready: Prepared, num: int) -> int:
    """Return how many of so many trials run side by side: their client states fit, and all parts have one size."""
    size = max(1, trees.num_bytes(ready.record) * ready.task.num_clients)
    most = ready.settings.resident_bytes // size
    if most < 1:
        raise UsageError(
            f"The state of {ready.task.num_clients} clients takes {size} bytes and tuning keeps it on the devices; "
            f"raise resident-bytes to at least that."
        )
    return -(-num // -(-num // most))
