"""The options of reading data and of dealing them to clients, declared once for Python, command line and manifest."""

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

from priory.core.errors import UsageError
from priory.data import checks

__all__ = ["ROLES", "PartitionOptions", "ReadOptions", "check_names", "names", "takes"]

ROLES = ("target", "client", "group", "scale", "drop")  # of columns that are no inputs
Function = TypeVar("Function", bound=Callable[..., Any])


class Options:
    """Keyword arguments as the fields of a dataclass; every value is one that a manifest can hold."""

    @classmethod
    def make(cls, given: Mapping[str, Any]) -> Self:
        """Return the options from keyword arguments; a text may stand for one of several, and (50, 950) for 50/950."""
        check_names(given, cls)
        return cls(
            **{name: _plain(value, several=isinstance(getattr(cls, name), tuple)) for name, value in given.items()}
        )

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not left out, as a manifest has them."""
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return {name: value for name, value in listed.items() if value not in (None, [], "")}


@dataclass(frozen=True)
class ReadOptions(Options):
    """How a file or a data frame is read.

    Attributes:
        target: Column to predict (CSV).
        client: Column that names the client of a row (CSV); without it the rows must be partitioned.
        drop: Columns that are no features (CSV, and radon's floor or log_uranium).
        group: Column whose equal rows never fall on both sides of a split, such as a patient (CSV).
        scale: Column of known standard errors of the target (CSV); on the command line also the noise of a regression:
            a number, or learned.
        task: Whether the target is a class or a number; by default inferred from it, and printed for a CSV file.
        scaling: standard, unit ([0, 1]), symmetric ([-1, 1]) or none; by default what suits the data.
        schema: Schema file that states columns, bounds and classes, which are then not read from the rows (CSV, NPZ).
    """

    target: str | None = None
    client: str | None = None
    drop: tuple[str, ...] = ()
    group: str | None = None
    scale: str | None = None
    task: Literal["classification", "regression"] | None = None
    scaling: str | None = None
    schema: str | None = None

    def refuse(self, name: str, *unwanted: str) -> None:
        """Raise where an option is given that means nothing for the data of this name."""
        for key, value in self.given.items():
            if key in unwanted:
                raise UsageError(f"{key}={value!r} does not apply to data {name!r}; leave it out.")


@dataclass(frozen=True)
class PartitionOptions(Options):
    """How the rows of a data set are dealt to clients and split; the same options give the same bytes.

    Attributes:
        partition: iid, dirichlet:A, dirichlet:A:coarse, shards:S, classes:K, classes:K:paired or natural; by default
            natural where the data have clients, else iid.
        clients: How many clients; all natural ones by default. Fewer natural clients are drawn at random.
        seed: Seed of partition, splits and transforms; the same federation whatever the seed of the run.
        test: Fraction of each client's rows that test it, stratified, where the data have no test part of their own.
        validation: Fraction of each client's training part that is set aside for tuning and calibration; the test part
            stays as it was.
        newcomers: Fraction of the clients that is held out whole, placed last and evaluated after onboarding.
        per_class: TRAIN/TEST examples per class and client, from the official parts pooled, such as 50/950.
        sizes: Training examples per client before validation, such as 0.9=5,0.1=10: 5 for 90 % of the clients, 10 for
            the rest.
        transform: Changes by client: invert-half, mix:DATASET, rotate-by-client or corrupt-by-client; one or several.
        min_examples: Training examples that every client must have, validation included; natural clients below it are
            left out.
        align: Unlabelled rows known to all: own:500 or own:500:classes=5 of these rows, held out before they are dealt;
            DATASET:500 of another data set; FILE.npz or FILE.npz:500.
    """

    partition: str | None = None
    clients: int | None = None
    seed: int = field(default=0, metadata={"flag": "data_seed"})  # a run has a seed of its own
    test: float = 0.2
    validation: float = 0.0
    newcomers: float = 0.0
    per_class: str | None = None
    sizes: str | None = None
    transform: tuple[str, ...] = ()
    min_examples: int = 1
    align: str | None = None


def names(*kinds: type[Any]) -> list[str]:
    """Return the names of the options of these dataclasses."""
    return [one.name for kind in kinds for one in dataclasses.fields(kind)]


def check_names(given: Mapping[str, Any], *kinds: type[Any]) -> None:
    """Raise on a name that is not an option."""
    known = names(*kinds)
    for name in given:
        if name not in known:
            raise checks.unknown("setting of data", name, known)


def takes(*kinds: type[Any]) -> Callable[[Function], Function]:
    """Return a decorator that shows the options of dataclasses in the signature and the docstring of a function.

    They stand in place of its last parameter, `**options`.
    """

    def documented(function: Function) -> Function:
        signature, text = inspect.signature(function), inspect.cleandoc(function.__doc__ or "")
        own = list(signature.parameters.values())[:-1]
        more = [
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
            for kind in kinds
            for one in dataclasses.fields(kind)
        ]
        function.__signature__ = signature.replace(parameters=own + more)  # type: ignore[attr-defined]
        attributes = [inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2] for kind in kinds]
        function.__doc__ = "\n".join([f"{text}\n\nOptions:", *attributes])
        return function

    return documented


def _plain(value: Any, several: bool) -> Any:
    if several:
        return (value,) if isinstance(value, str) else tuple(value or ())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else value
