"""The options of a partition, checked and taken apart before any row is touched."""

import bisect

import numpy as np

from priory.core.errors import UsageError
from priory.data import alignment, checks, partition
from priory.data.dataset import Dataset
from priory.data.options import PartitionOptions
from priory.data.partition import Partition

__all__ = ["Plan", "parse_per_class", "parse_sizes", "plan"]

MOST_ROWS = 1 << 62


class Plan(PartitionOptions):
    """Options that fit the data set, each as the manifest has it."""

    @property
    def dealing(self) -> Partition:
        """The partition, taken apart."""
        return partition.parse(str(self.partition))

    @property
    def least_rows(self) -> int:
        """The fewest rows that leave a client `min_examples` training rows after its test split."""

        def left(rows: int) -> int:
            return rows - min(int(np.floor(self.test * rows + 0.5)), rows - 1)

        return bisect.bisect_left(range(MOST_ROWS), self.min_examples, lo=self.min_examples, key=left)


def plan(dataset: Dataset, options: PartitionOptions) -> Plan:
    """Return the options checked against each other and against the data set."""
    spec = options.partition or ("iid" if dataset.client is None else "natural")
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
    if options.partition is None and dataset.client is None and clients is None:
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
    least = checks.whole("min_examples", options.min_examples, 1)
    if least > len(dataset.y):
        raise UsageError(
            f"min_examples={least} exceeds the {len(dataset.y)} examples of {dataset.name}; choose at most that."
        )
    checked = {
        "partition": str(chosen),
        "clients": clients,
        "seed": checks.whole("seed", options.seed, 0),
        "test": checks.fraction("test", options.test),
        "validation": checks.fraction("validation", options.validation),
        "newcomers": checks.fraction("newcomers", options.newcomers),
        "per_class": per_class and "{}/{}".format(*per_class),
        "sizes": None if options.sizes is None else ",".join(f"{a!r}={n}" for a, n in parse_sizes(options.sizes)),
        "min_examples": least,
        "align": None if options.align is None else str(alignment.parse(options.align)),
    }
    return Plan(**vars(options) | checked)


def parse_per_class(value: str) -> tuple[int, int]:
    """Return (training, test) examples per class and client from '50/950'."""
    try:
        train, test = (int(part) for part in str(value).split("/"))
    except ValueError:
        raise UsageError(f"per_class={value!r} is malformed; write TRAIN/TEST, for example 50/950.") from None
    if train < 1 or test < 0:
        raise UsageError(f"per_class={value!r} is out of range; give 1 or more to train and 0 or more to test.")
    return train, test


def parse_sizes(text: str) -> tuple[tuple[float, int], ...]:
    """Return ((fraction of clients, training examples), ...) from '0.9=5,0.1=10'; the fractions add up to 1."""
    remedy = "write fraction=examples, for example 0.9=5,0.1=10"
    sizes = []
    for item in text.split(","):
        share, equals, count = item.partition("=")
        if not equals:
            raise UsageError(f"sizes={text!r} is malformed at {item!r}; {remedy}.")
        where = f"sizes={text!r}"
        fraction = checks.number(share, float, where=where, remedy=remedy)
        sizes.append((fraction, checks.number(count, int, where=where, remedy=remedy)))
    total = sum(share for share, _ in sizes)
    if abs(total - 1.0) > 1e-6:
        raise UsageError(f"the fractions of sizes={text!r} add up to {total:g}; make them add up to 1.")
    return tuple(sizes)
