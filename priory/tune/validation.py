"""Runs that are scored on validation rows in the place of test rows."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from priory.core.errors import UsageError
from priory.data import Federation, Split


@dataclass(frozen=True)
class RoundCount:
    """A listener that counts the rounds of one of several runs that are as long as each other.

    Attributes:
        told: Given how many of how many rounds are done, over all runs.
        before: Runs that are over.
        num_runs: All of them.
    """

    told: Callable[[int, int], None]
    before: int
    num_runs: int

    def advanced(self, completed: int, rounds: int, info: dict[str, float]) -> None:
        del info
        self.told(self.before * rounds + completed, self.num_runs * rounds)

    def evaluated(self, line: dict[str, Any]) -> None:
        del line


def without_test(federation: Federation) -> Federation:
    """Return the federation with its validation part as its test part; the rows of that are taken out of the pool."""
    if federation.validation.total == 0:
        raise UsageError("validation=0 leaves nothing to tune on; give a fraction such as validation=0.2.")
    kept = np.ones(federation.num_examples, bool)
    for start, count in zip(federation.test.start, federation.test.count, strict=True):
        kept[start : start + count] = False
    moved = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)

    def shifted(split: Split) -> Split:
        return Split(moved[split.start], split.count)

    empty = Split(moved[federation.validation.start], np.zeros_like(federation.validation.count))
    return dataclasses.replace(
        federation,
        x=federation.x[kept],
        y=federation.y[kept],
        scale=None if federation.scale is None else federation.scale[kept],
        train=shifted(federation.train),
        validation=empty,
        test=shifted(federation.validation),
    )
