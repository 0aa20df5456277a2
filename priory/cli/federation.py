"""The flags that describe a federation, and the federation that they describe."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import tyro

from priory import report
from priory.cli import flags
from priory.cli.flags import Flag
from priory.data import Federation, PartitionOptions, ReadOptions
from priory.data.build import build
from priory.data.datasets import read


@dataclass(frozen=True)
class DataFlags:
    """Which data, how they are dealt to clients, and how they are read.

    Attributes:
        data: Name of a data set (see `priory datasets`), or the path of a .csv or .npz (x, y, client) file.
    """

    data: str = ""
    partition: PartitionOptions = field(default_factory=PartitionOptions)
    reading: ReadOptions = field(default_factory=ReadOptions)

    def federation(self, told: bool = True) -> Federation:
        """Return the federation that the flags describe.

        Args:
            told: Print how the columns of a table were read.
        """
        loaded = read(self.data, replace(self.reading, scale=self.column()))
        if told and Path(self.data).suffix == ".csv":
            report.say(loaded.describe())
        return build(loaded, self.partition)

    def column(self) -> str | None:
        """Return the column of standard errors, if `--scale` names one."""
        return self._split_scale()[0]

    def noise(self) -> float | str | None:
        """Return the `scale` of the run's settings."""
        return self._split_scale()[1]

    def _split_scale(self) -> tuple[str | None, float | str | None]:
        """Return the column of standard errors and the scale of the likelihood: `--scale` is one or the other."""
        scale = self.reading.scale
        if scale is None or scale in ("learned", "column"):
            return None, scale
        try:
            number = float(scale)
        except ValueError:
            return scale, "column"
        return (None, number) if math.isfinite(number) else (scale, None)


def data_flags(validation: float = 0.0) -> list[Flag]:
    """Return the flags of a federation; the data must be named."""
    name, *found = flags.flags_of(DataFlags(partition=PartitionOptions(validation=validation)))
    several = [flags.several(flag) if isinstance(flag.default, tuple) else flag for flag in found]
    return [replace(name, default=tyro.MISSING), *several]


def from_values(values: dict[str, Any]) -> DataFlags:
    """Return the parsed flags of a federation."""
    rows = {name: flags.flatten(values[name]) for name in ("transform", "drop")}
    return cast(DataFlags, flags.build(DataFlags(), values | rows))
