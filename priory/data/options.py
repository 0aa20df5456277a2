"""The options of a partition, checked and taken apart before any row is touched."""

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np

from priory.core.errors import UsageError
from priory.data import alignment, checks, partition
from priory.data.alignment import Alignment
from priory.data.dataset import Dataset
from priory.data.partition import Partition

__all__ = ["Options", "Plan", "plan"]

MOST_ROWS = 1 << 62


@dataclass(frozen=True)
class Options:
    """The arguments of `Dataset.partition`, as the user gave them."""

    spec: str | None
    clients: int | None
    seed: int
    test: float
    validation: float
    newcomers: float
    per_class: tuple[int, int] | str | None
    sizes: str | None
    transforms: tuple[str, ...]
    min_examples: int
    align: str | None


@dataclass(frozen=True)
class Plan:
    """`Options` that fit the data set."""

    partition: Partition
    clients: int | None  # None: all natural clients
    seed: int
    test: float
    validation: float
    newcomers: float
    per_class: tuple[int, int] | None
    sizes: tuple[tuple[float, int], ...]
    transforms: tuple[str, ...]
    min_examples: int
    align: Alignment | None

    @property
    def least_rows(self) -> int:
        """The fewest rows that leave a client `min_examples` training rows after its test split."""

        def left(rows: int) -> int:
            return rows - min(int(np.floor(self.test * rows + 0.5)), rows - 1)

        return bisect.bisect_left(range(MOST_ROWS), self.min_examples, lo=self.min_examples, key=left)

    def spec(self) -> dict[str, Any]:
        """The keyword arguments that give this plan, without those that were left out."""
        given = {
            "partition": str(self.partition),
            "clients": self.clients,
            "seed": self.seed,
            "test": self.test,
            "validation": self.validation,
            "newcomers": self.newcomers,
            "per_class": self.per_class and "{}/{}".format(*self.per_class),
            "sizes": ",".join(f"{share!r}={count}" for share, count in self.sizes),
            "transform": list(self.transforms),
            "min_examples": self.min_examples,
            "align": self.align and str(self.align),
        }
        return {name: value for name, value in given.items() if value is not None and value not in ("", [])}


def plan(dataset: Dataset, options: Options) -> Plan:
    """The options checked against each other and against the data set."""
    spec = options.spec or ("iid" if dataset.client is None else "natural")
    chosen = partition.parse(spec)
    clients = None if options.clients is None else checks.whole("clients", options.clients, 1)
    if chosen.kind == "natural" and dataset.client is None:
        raise UsageError(
            f"partition 'natural' needs clients, and {dataset.name} has none; name the client column, "
            "or use iid, dirichlet:A, shards:S or classes:K."
        )
    if chosen.kind == "natural" and clients is not None and clients > len(dataset.clients):
        raise UsageError(
            f"clients={clients} exceeds the {len(dataset.clients)} clients of {dataset.name}; choose at most that."
        )
    if options.spec is None and dataset.client is None and clients is None:
        raise UsageError(
            f"nothing says which rows of {dataset.name} belong to which client; give clients=N to deal them out"
            f"{', or the client column' if dataset.features else ''}."
        )
    if chosen.kind != "natural" and clients is None:
        raise UsageError(f"partition '{chosen}' does not say for how many clients; give clients=N.")
    if chosen.kind in ("dirichlet", "shards", "classes") and dataset.num_classes is None:
        raise UsageError(
            f"partition '{chosen}' deals by class, and {dataset.name} is a regression; use iid or natural."
        )
    per_class = None if options.per_class is None else parse_per_class(options.per_class)
    if per_class is not None and dataset.num_classes is None:
        raise UsageError(
            f"per_class={options.per_class!r} needs classes, and {dataset.name} is a regression; leave it out."
        )
    if per_class is not None and dataset.group is not None:
        raise UsageError("per_class cannot keep the rows of a group together; leave out per_class or group.")
    return Plan(
        partition=chosen,
        clients=clients,
        seed=checks.whole("seed", options.seed, 0),
        test=checks.fraction("test", options.test),
        validation=checks.fraction("validation", options.validation),
        newcomers=checks.fraction("newcomers", options.newcomers),
        per_class=per_class,
        sizes=() if options.sizes is None else parse_sizes(options.sizes),
        transforms=options.transforms,
        min_examples=_least(dataset, options.min_examples),
        align=None if options.align is None else alignment.parse(options.align),
    )


def _least(dataset: Dataset, value: int) -> int:
    """The training examples that every client must have, which cannot be more than there are."""
    least = checks.whole("min_examples", value, 1)
    if least > len(dataset.y):
        raise UsageError(
            f"min_examples={least} exceeds the {len(dataset.y)} examples of {dataset.name}; choose at most that."
        )
    return least


def parse_per_class(value: tuple[int, int] | str) -> tuple[int, int]:
    """(training, test) examples per class and client from '50/950' or (50, 950)."""
    try:
        train, test = (int(part) for part in (value.split("/") if isinstance(value, str) else value))
    except (TypeError, ValueError):
        raise UsageError(f"per_class={value!r} is malformed; write TRAIN/TEST, for example 50/950.") from None
    if train < 1 or test < 0:
        raise UsageError(f"per_class={value!r} is out of range; give 1 or more to train and 0 or more to test.")
    return train, test


def parse_sizes(text: str) -> tuple[tuple[float, int], ...]:
    """((fraction of clients, training examples), ...) from '0.9=5,0.1=10'; the fractions add up to 1."""
    remedy = "write fraction=examples, for example 0.9=5,0.1=10"
    sizes = []
    for item in text.split(","):
        share, equals, count = item.partition("=")
        if not equals:
            raise UsageError(f"sizes={text!r} is malformed at {item!r}; {remedy}.")
        where = f"sizes={text!r}"
        sizes.append(
            (
                checks.number(share, float, where=where, remedy=remedy),
                checks.number(count, int, where=where, remedy=remedy),
            )
        )
    total = sum(share for share, _ in sizes)
    if abs(total - 1.0) > 1e-6:
        raise UsageError(f"the fractions of sizes={text!r} add up to {total:g}; make them add up to 1.")
    return tuple(sizes)
