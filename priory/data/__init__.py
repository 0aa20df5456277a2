"""Data sets, partitions and transforms: arrays in, a federation out."""

from priory.data.arrays import from_arrays
from priory.data.dataset import Dataset
from priory.data.datasets import Entry, describe, from_spec, load
from priory.data.encoder import Encoder
from priory.data.federation import Federation, Split
from priory.data.options import PartitionOptions, ReadOptions
from priory.data.tables import from_frame

__all__ = [
    "Dataset",
    "Encoder",
    "Entry",
    "Federation",
    "PartitionOptions",
    "ReadOptions",
    "Split",
    "describe",
    "from_arrays",
    "from_frame",
    "from_spec",
    "load",
]
