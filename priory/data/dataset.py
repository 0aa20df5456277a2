"""A data set before partitioning: rows, labels, and what is known of where they came from."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from priory.data.encoder import Encoder, Feature
from priory.data.federation import Federation
from priory.data.options import PartitionOptions, takes

if TYPE_CHECKING:
    from priory.data.columns import Column

__all__ = ["Dataset"]


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
    features: tuple[Feature, ...] | None = None
    columns: "tuple[Column, ...]" = ()
    encoder: Encoder | None = None
    pixel_max: int | None = None
    shift: np.ndarray | None = field(default_factory=lambda: np.zeros((), np.float32))
    factor: np.ndarray | None = field(default_factory=lambda: np.ones((), np.float32))
    truth: dict[str, np.ndarray] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)

    @takes(PartitionOptions)
    def partition(self, spec: str | None = None, **options: Any) -> Federation:
        """Return a federation of these rows; the same arguments give the same bytes.

        Args:
            spec: The partition, as below.
            options: Those of `PartitionOptions`.
        """
        from priory.data.build import build

        given = options if spec is None else {"partition": spec, **options}
        return build(self, PartitionOptions.make(given))

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
