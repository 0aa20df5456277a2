"""The flags that describe a federation, and the federation that they describe."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from priory import data, report
from priory.cli import flags
from priory.cli.flags import Flag
from priory.data import Federation


@dataclass(frozen=True)
class DataFlags:
    """Which data, and how they are dealt to clients.

    Attributes:
        data: Name of a data set (see `priory datasets`), or the path of a .csv or .npz (x, y, client) file.
        partition: iid, dirichlet:A, dirichlet:A:coarse, shards:S, classes:K, classes:K:paired or natural; by default
            natural, else iid.
        clients: N, how many clients; all natural ones by default.
        data_seed: Seed of partition, splits and transforms; the same federation whatever the seed of the run.
        test: Fraction of each client's rows that test it, where the data have no test part of their own.
        validation: Fraction of each client's training rows that is set aside for tuning and calibration.
        newcomers: Fraction of the clients that is held out whole and evaluated after onboarding.
        per_class: TRAIN/TEST examples per class and client, from the official parts pooled, such as 50/950.
        sizes: Training examples per client, such as 0.9=5,0.1=10: 5 for 90 % of the clients, 10 for the rest.
        transform: Changes by client: invert-half, mix:DATASET, rotate-by-client or corrupt-by-client.
        min_examples: Training examples that every client must have.
        align: Unlabelled rows known to all: own:500, own:500:classes=5, DATASET:500, FILE.npz or FILE.npz:500.
        scaling: standard, unit ([0, 1]), symmetric ([-1, 1]) or none; by default what suits the data.
        target: Column to predict (CSV).
        client: Column that names the client of a row (CSV).
        drop: Columns that are no features (CSV, and radon's floor or log_uranium).
        group: Column whose equal rows never fall on both sides of a split, such as a patient (CSV).
        task: Whether the target is a class or a number; by default inferred from it, and printed for a CSV file.
        scale: Noise of a regression: a number, learned, or the column of known standard errors (CSV).
        schema: Schema file that states columns, bounds and classes, which are then not read from the rows (CSV, NPZ).
    """

    data: str = ""
    partition: str | None = None
    clients: int | None = None
    data_seed: int = 0
    test: float = 0.2
    validation: float = 0.0
    newcomers: float = 0.0
    per_class: str | None = None
    sizes: str | None = None
    transform: tuple[str, ...] = ()
    min_examples: int = 1
    align: str | None = None
    scaling: str | None = None
    target: str | None = None
    client: str | None = None
    drop: tuple[str, ...] = ()
    group: str | None = None
    task: Literal["classification", "regression"] | None = None
    scale: str | None = None
    schema: str | None = None

    def federation(self, told: bool = True) -> Federation:
        """The federation that the flags describe.

        Args:
            told: Print how the columns of a table were read.
        """
        named = ("target", "client", "drop", "group", "task", "scaling", "schema")
        columns = {name: getattr(self, name) for name in named}
        loaded = data.load(self.data, scale=self.column(), **columns)
        if told and Path(self.data).suffix == ".csv":
            report.say(loaded.describe())
        return loaded.partition(
            self.partition,
            clients=self.clients,
            seed=self.data_seed,
            test=self.test,
            validation=self.validation,
            newcomers=self.newcomers,
            per_class=self.per_class,
            sizes=self.sizes,
            transform=self.transform,
            min_examples=self.min_examples,
            align=self.align,
        )

    def column(self) -> str | None:
        """The column of standard errors, if `--scale` names one."""
        return self._split_scale()[0]

    def noise(self) -> float | str | None:
        """The `scale` of the run's settings."""
        return self._split_scale()[1]

    def _split_scale(self) -> tuple[str | None, float | str | None]:
        """The column of standard errors, and the scale of the likelihood: `--scale` is one or the other."""
        if self.scale is None or self.scale in ("learned", "column"):
            return None, self.scale
        try:
            number = float(self.scale)
        except ValueError:
            return self.scale, "column"
        return (None, number) if math.isfinite(number) else (self.scale, None)


def data_flags(validation: float = 0.0) -> list[Flag]:
    """The flags of a federation; the data must be named."""
    found = []
    for flag in flags.flags_of(DataFlags(validation=validation)):
        if flag.name == "data":
            flag = dataclasses.replace(flag, default=tyro.MISSING)
        found.append(flags.several(flag) if isinstance(flag.default, tuple) else flag)
    return found


def from_values(values: dict[str, Any]) -> DataFlags:
    """The parsed flags of a federation."""
    rows = {name: flags.flatten(values[name]) for name in ("transform", "drop")}
    return DataFlags(**{**values, **rows})
