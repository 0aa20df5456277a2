"""A data set before partitioning: rows, labels, and what is known of where they came from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from priory.data.federation import Federation

if TYPE_CHECKING:
    from priory.data.columns import Column
    from priory.data.tables import Encoder, Feature

__all__ = ["Dataset", "PartitionOptions"]


class PartitionOptions(TypedDict, total=False):
    """The keyword arguments of `Dataset.partition`."""

    clients: int | None
    seed: int
    test: float
    validation: float
    newcomers: float
    per_class: tuple[int, int] | str | None
    sizes: str | None
    transform: str | Sequence[str] | None
    min_examples: int
    align: str | None


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Rows to be dealt to clients; made by `load`, `from_frame` or `arrays.dataset`.

    Attributes:
        x: (examples, ...) uint8 or float32; for a table the raw columns, encoded when partitioned.
        y: (examples,) int32 labels from 0, or float32 targets.
        num_classes: None for regression.
        client: (examples,) codes into `clients`, the natural clients, or None.
        coarse: (examples,) int32 coarse classes from 0, or None.
        group: (examples,) codes into `groups`; rows of one group never fall on both sides of a split.
        scale: (examples,) known standard error of each target.
        official_test: (examples,) bool, the test part that the data came with.
        features: The schema of a table; None for arrays and images.
        columns: How each column of a table was read, see `describe`.
        encoder: How a table is encoded, where a schema states it; None: fitted on the training rows.
        pixel_max: Largest value of a uint8 pixel; None when the rows are not images.
        shift: float32, one number or one per channel; None: the mean of the training rows.
        factor: float32 like `shift`; None: one over the deviation of the training rows.
        truth: What is known of each natural client; first axis clients.
        source: The arguments of `load` that give this data set.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int | None
    classes: tuple[str, ...] = ()
    client: np.ndarray | None = None
    clients: tuple[str, ...] = ()
    coarse: np.ndarray | None = None
    group: np.ndarray | None = None
    groups: tuple[str, ...] = ()
    scale: np.ndarray | None = None
    official_test: np.ndarray | None = None
    features: "tuple[Feature, ...] | None" = None
    columns: "tuple[Column, ...]" = ()
    encoder: "Encoder | None" = None
    pixel_max: int | None = None
    shift: np.ndarray | None = field(default_factory=lambda: np.zeros((), np.float32))
    factor: np.ndarray | None = field(default_factory=lambda: np.ones((), np.float32))
    truth: dict[str, np.ndarray] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)

    def partition(
        self,
        spec: str | None = None,
        *,
        clients: int | None = None,
        seed: int = 0,
        test: float = 0.2,
        validation: float = 0.0,
        newcomers: float = 0.0,
        per_class: tuple[int, int] | str | None = None,
        sizes: str | None = None,
        transform: str | Sequence[str] | None = None,
        min_examples: int = 1,
        align: str | None = None,
    ) -> Federation:
        """A federation of these rows; the same arguments give the same bytes.

        Args:
            spec: 'iid', 'dirichlet:A', 'dirichlet:A:coarse', 'shards:S', 'classes:K', 'classes:K:paired' or 'natural';
                by default natural where the data have clients, else iid.
            clients: How many; by default all natural clients. Fewer natural clients are drawn at random.
            test: Fraction of each client's rows, stratified; not used where the data have an official test part.
            validation: Fraction of each client's training part; the test part stays as it was.
            newcomers: Fraction of the clients held out whole and placed last.
            per_class: Training and test examples per class and client, from all rows pooled: (50, 950) or '50/950'.
            sizes: Training examples per client before validation: '0.9=5,0.1=10' gives 90 % of the clients 5.
            transform: One or several of 'invert-half', 'mix:DATASET', 'rotate-by-client', 'corrupt-by-client'.
            min_examples: Training examples every client must have, validation included; natural clients below it
                are left out.
            align: Unlabelled rows known to all: 'own:500' or 'own:500:classes=5' of these rows, held out before they
                are dealt, 'DATASET:500' of another data set, 'FILE.npz' or 'FILE.npz:500'; see `alignment`.
        """
        from priory.data.build import Options, build

        transforms = (transform,) if isinstance(transform, str) else tuple(transform or ())
        return build(
            self,
            Options(
                spec, clients, seed, test, validation, newcomers, per_class, sizes, transforms, min_examples, align
            ),
        )

    def describe(self) -> str:
        """Return how the columns of a table were read, one on each line: role, kind of values, missing ones."""
        from priory.data.columns import lines

        if not self.columns:
            return repr(self)
        return "\n".join([f"{self.name}: {len(self.y)} rows, {len(self.columns)} columns", *lines(self.columns)])

    def __repr__(self) -> str:
        task = "regression" if self.num_classes is None else f"{self.num_classes} classes"
        clients = f", {len(self.clients)} natural clients" if self.client is not None else ""
        shape = "x".join(map(str, self.x.shape[1:]))
        return f"<Dataset {self.name}: {len(self.y)} examples of {shape} {self.x.dtype}, {task}{clients}>"
