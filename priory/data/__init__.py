"""Data sets, partitions and transforms: arrays in, a federation out."""

from priory.data.arrays import from_arrays
from priory.data.dataset import Dataset, PartitionOptions
from priory.data.datasets import Entry, describe, from_spec, load
from priory.data.federation import Federation, Split
from priory.data.tables import Encoder, from_frame

__all__ = [
    "Dataset",
    "Encoder",
    "Entry",
    "Federation",
    "PartitionOptions",
    "Split",
    "describe",
    "from_arrays",
    "from_frame",
    "from_spec",
    "load",
]
