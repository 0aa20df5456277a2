"""From what the models say of every example to the tables of a run."""

import math
from typing import Any

import numpy as np

from priory.core.errors import UsageError
from priory.evaluate import ClassRows
from priory.uncertainty.answers import Answers, ForeignInputs
from priory.uncertainty.classes import class_part
from priory.uncertainty.parts import Doubts, foreign_of, top_of
from priory.uncertainty.tables import Foreign, Uncertainty
from priory.uncertainty.targets import target_part

NO_LABELS = {
    "newcomers_unlabelled": "A client without labels has no labelled rows to calibrate on; give some of its labels.",
    "newcomers_global": "A client without data has no rows to calibrate on; give some with labels.",
}


def check(level: Any, bootstrap: Any) -> None:
    """Raise `UsageError` on a level or a number of replicates that means nothing."""
    if not 0 < level < 1:
        raise UsageError(f"level={level} is no probability between 0 and 1; give one such as 0.9.")
    if bootstrap < 0 or bootstrap == 1:
        raise UsageError(f"bootstrap={bootstrap} gives no standard error; give 2 or more, such as 200, or 0 for none.")


def measure(
    parts: dict[str, Answers],
    inputs: ForeignInputs | None,
    *,
    classes: tuple[str, ...],
    rounds: int,
    level: float,
    bootstrap: int,
) -> Uncertainty:
    """The tables of a run, from what each kind of model says.

    Args:
        parts: By the names of `Uncertainty.parts`; one whose clients have no test examples is left out.
        inputs: What `parts["personal"].foreign` was asked about.
    """
    parts = {name: answers for name, answers in parts.items() if len(answers.test.y)}
    if "personal" not in parts:
        raise UsageError("No client has test examples to measure uncertainty on; partition the data with test=0.2.")
    is_classes = isinstance(parts["personal"].test.rows, ClassRows)
    tests = {name: answers.test for name, answers in parts.items()}
    doubts: dict[str, Doubts] = {name: (test.total, np.asarray(test.rows.epistemic)) for name, test in tests.items()}
    foreign = parts["personal"].foreign
    every = [*doubts.values(), *([] if foreign is None else [(foreign[:, 0], foreign[:, 1])])]
    # The same edges everywhere, so that histograms can be laid over one another.
    most = math.log(max(len(classes), 2)) if is_classes else 1.0
    top_both = most if is_classes else top_of([both for both, _ in every], most)
    top_epistemic = top_of([epistemic for _, epistemic in every], most)
    make = class_part if is_classes else target_part
    ood: Foreign | None = None
    if inputs is not None:
        ood = foreign_of(parts["personal"], doubts["personal"], inputs, (top_both, top_epistemic), bootstrap)
    return Uncertainty(
        kind="classification" if is_classes else "regression",
        classes=classes,
        rounds=rounds,
        level=level,
        bootstrap=bootstrap,
        parts={
            name: make(answers, level, bootstrap, top_epistemic, NO_LABELS.get(name)) for name, answers in parts.items()
        },
        ood=ood,
    )


def stands_for(found: Uncertainty, inputs: ForeignInputs | None, rounds: int, level: float, bootstrap: int) -> bool:
    """Whether these tables are what the arguments ask for."""
    asked = inputs is None or (found.ood is not None and found.ood.checksum == inputs.checksum)
    return asked and (found.rounds, found.level, found.bootstrap) == (rounds, level, bootstrap)
