"""What a report needs and a run directory may not hold: the uncertainty of its models, the mixing of its chains."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from priory import data, methods
from priory.core.errors import UsageError
from priory.data import arrays, tables
from priory.effects import num_coordinates
from priory.engine import Run, load
from priory.fed import capabilities
from priory.report.records import Record

MOST_EFFECTS = 1000  # random effects of a client whose chains are looked at


def measured(
    record: Record,
    run: Run | None = None,
    ood: Any = None,
    told: Callable[[str], None] = lambda line: None,
    trust_code: bool = False,
) -> Record:
    """The record with what was still to be measured; `missing` says why, where the run cannot be loaded.

    Args:
        run: The run itself, where it is at hand.
        ood: Foreign inputs, as `Run.uncertainty` takes them.
        told: Given a line before something that takes time.
        trust_code: As for `priory.load`.
    """
    is_tested, has_chains = record.summary["personal"] is not None, _has_effects(record.method)
    if not is_tested:
        missing = "No client has test examples to measure it on; partition the data with test=0.2."
        record = dataclasses.replace(record, missing=missing)
    is_open = is_tested and (record.uncertainty is None or ood is not None)
    if not is_open and not has_chains:
        return record
    told(f"measuring {'the uncertainty' if is_open else 'the chains'} of {record.path}")
    try:
        run = run or _loaded(record, trust_code)
    except UsageError as error:
        if ood is not None:  # it was asked for, so that silence would not do
            raise
        told(str(error))
        return dataclasses.replace(record, missing=str(error))
    uncertainty = run.uncertainty(ood=ood) if is_open else record.uncertainty
    record = dataclasses.replace(record, uncertainty=uncertainty)
    return _judged(record, run) if has_chains else record


def foreign(name: str) -> Any:
    """The foreign inputs of that name: a data set, a .npz file with x, or a .csv file with the columns of the run."""
    if Path(name).suffix == ".npz":
        return arrays.read_npz(name, needed=("x",))["x"]
    return tables.read_csv(name) if Path(name).suffix == ".csv" else data.load(name)


def _has_effects(name: str) -> bool:
    try:
        return issubclass(methods.get(name), capabilities.MixedEffects)
    except UsageError:  # it is not installed
        return False


def _loaded(record: Record, trust_code: bool) -> Run:
    if not (record.path / "checkpoint").is_dir():
        raise UsageError(f"{record.path} has no checkpoint to measure it from; run its manifest again.")
    try:
        return load(record.path, trust_code=trust_code)
    except UsageError as error:
        raise UsageError(f"The run in {record.path} cannot be loaded: {error}") from None


def _judged(record: Record, run: Run) -> Record:
    """The record with R-hat and effective sample size of its chains, unless these are too many to look at."""
    num = num_coordinates(run.method, run.task, run.method.broadcast(run.server))
    if num > MOST_EFFECTS:
        text = f"A client has {num} random effects, and a report looks at no more than {MOST_EFFECTS}."
        return dataclasses.replace(record, missing=text)
    with warnings.catch_warnings():  # the page says it
        warnings.simplefilter("ignore", capabilities.AdviceWarning)
        return dataclasses.replace(record, effects=run.effects())
