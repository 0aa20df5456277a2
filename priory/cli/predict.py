"""`priory predict`: what a client's model says of the rows of a file, with its doubts."""

import dataclasses
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from priory import report
from priory.cli import flags
from priory.cli.app import DIVERGED
from priory.cli.models import named_model
from priory.cli.rows import predictions
from priory.cli.run import run_groups
from priory.core.errors import UsageError
from priory.core.files import write_atomically
from priory.core.text import spreadsheet_cell
from priory.data import checks, tables
from priory.data.form import Form
from priory.data.rows import Rows, read_rows
from priory.engine import PersonalModel
from priory.engine.prediction import ASSUMPTION, check_abstain, check_level

TEXT = (
    "Predict the rows of a file with the model of one client: of a run, of a client that was onboarded later, or of a "
    "directory that `priory export` wrote. Each row gets probabilities and their entropy, the share of it that more "
    "data could remove, and a prediction set; a regression gets mean, standard deviation and intervals."
)
SAVEZ = ("file", "allow_pickle")  # arguments of NumPy, which no array can have as a name
ENDINGS = (".csv", ".parquet", ".npz")


@dataclass(frozen=True)
class Options:
    """What is predicted, by whom and where it goes.

    Attributes:
        data: The rows: .csv or .parquet with the columns of the run's table, or .npz with x (and scale).
        out: File for the predictions, .csv, .parquet or .npz; one that exists is not overwritten.
        client: Name of the client (see `priory clients DIR`); not needed for an exported model.
        level: Probability that a prediction set or an interval should cover.
        abstain: Marks rows whose most probable class is less probable than this, which the model should not decide.
        keep: Columns of the table that are carried over, such as an identifier.
    """

    data: str = ""
    out: str = ""
    client: str | None = None
    level: float = 0.9
    abstain: float | None = None
    keep: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise on what can be seen before anything is read."""
        check_level(self.level)
        if self.abstain is not None:
            check_abstain(self.abstain)
        place = Path(self.out)
        if place.suffix not in ENDINGS:
            raise UsageError(f"out={self.out} ends in none of {', '.join(ENDINGS)}; choose one of those.")
        if place.suffix == ".parquet":
            tables.check_parquet()
        if place.exists():
            raise UsageError(f"out={self.out} exists already and is never overwritten; choose another file.")
        if not place.absolute().parent.is_dir():
            raise UsageError(f"out={self.out} lies in no directory that exists; make it, or choose another file.")


def predict(argv: Sequence[str]) -> int:
    """The exit code of `priory predict`."""
    wanted = [_as_flag(flag) for flag in flags.flags_of(Options())]
    groups = run_groups("predict") | {"predict": flags.group("predict", "", wanted)}
    values = flags.parse(groups, argv, prog="priory predict", text=TEXT)
    chosen = Options(**{**values["predict"], "keep": flags.flatten(values["predict"]["keep"])})
    chosen.check()
    named = named_model(values, chosen.client)
    if chosen.abstain is not None and named.form.num_classes is None:
        raise UsageError(
            f"abstain={chosen.abstain:g} is for classes, and {named.form.name} is a regression; leave it out, and "
            "judge by the width from low to high."
        )
    rows = read_rows(named.form, named.likelihood, chosen.data)
    kept, model = _kept(named.form, rows, chosen), named.make()
    columns = _predicted(model, rows, chosen)
    is_npz = Path(chosen.out).suffix == ".npz"
    taken = {*_stacked(columns, model.form.classes), *SAVEZ} if is_npz else columns.keys()
    twice = sorted(kept.keys() & taken)
    if twice:
        raise UsageError(
            f"keep={twice[0]} is a name that {chosen.out} needs itself; rename the column of {chosen.data}."
        )
    write_atomically(Path(chosen.out), _content(Path(chosen.out).suffix, kept, columns, model.form.classes))
    _tell(report.console(), model, columns, chosen)
    bad = int(np.isnan(columns["entropy" if "entropy" in columns else "sd"]).sum())
    if bad:
        warnings.warn(
            f"{bad} of {len(rows.x)} predictions are not finite: either training of this client's model diverged, "
            f"which the end of the run says, or these rows of {chosen.data} are far from those that it learned from.",
            stacklevel=2,
        )
        return DIVERGED
    return 0


def _as_flag(flag: flags.Flag) -> flags.Flag:
    """The flag so that it must be given, or may be given several times, where it is so."""
    if flag.name in ("data", "out"):
        return dataclasses.replace(flag, default=flags.REQUIRED)
    return flags.several(flag) if flag.name == "keep" else flag


def _kept(form: Form, rows: Rows, chosen: Options) -> dict[str, np.ndarray]:
    """The columns that are carried over; any other that the model does not know is refused."""
    given = [] if rows.table is None else [str(name) for name in rows.table.columns]
    for name in chosen.keep:
        if name not in given:
            raise checks.unknown("column", name, given)
    extra = [name for name in form.extra(given) if name not in chosen.keep]
    if extra:
        named = checks.listing(map(repr, extra))
        raise UsageError(
            f"{chosen.data} has columns that the training data had not: {named}; leave them out, or carry them over "
            f"with --keep {' '.join(extra[:3])}."
        )
    return {name: rows.table[name].to_numpy() for name in chosen.keep}


def _predicted(model: PersonalModel, rows: Rows, chosen: Options) -> dict[str, np.ndarray]:
    """The columns of all rows, a batch at a time."""
    found = [one.columns(chosen.level, chosen.abstain) for one in predictions(model, rows)]
    return {name: np.concatenate([columns[name] for columns in found]) for name in found[0]}


def _content(ending: str, kept: dict[str, Any], columns: dict[str, Any], classes: tuple[str, ...]) -> str | bytes:
    """What the file of the predictions holds."""
    if ending == ".npz":
        found: dict[str, Any] = _stacked(columns, classes)
        found |= {name: values.astype(str) if values.dtype == object else values for name, values in kept.items()}
        raw = io.BytesIO()
        np.savez(raw, **found)
        return raw.getvalue()
    import pandas as pd

    if ending == ".parquet":
        raw = io.BytesIO()
        pd.DataFrame({**kept, **columns}).to_parquet(raw, index=False)
        return raw.getvalue()
    text = kept | {name: _as_text(values) for name, values in columns.items()}
    frame = pd.DataFrame({name: _without_formulas(values) for name, values in text.items()})
    header = [spreadsheet_cell(name) for name in text]
    return frame.to_csv(index=False, lineterminator="\n", header=header)


def _as_text(values: np.ndarray) -> Any:
    """What a CSV file holds of predictions: six digits of a number, the classes of a set between bars."""
    if values.dtype == object:
        return ["|".join(row) for row in values]
    return [f"{value:.6g}" for value in values] if values.dtype.kind == "f" else values


def _without_formulas(values: Any) -> Any:
    """Escape the texts of a column; numbers stay as they are."""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OUT":
        return values
    return [spreadsheet_cell(value) if isinstance(value, str) else value for value in values]


def _stacked(columns: dict[str, np.ndarray], classes: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The columns with one array for what each class has."""
    if not classes:
        return columns
    own = [f"p_{name}" for name in classes]
    found = {name: values for name, values in columns.items() if name not in (*own, "set")}
    found |= {"classes": np.array(classes), "probabilities": np.stack([columns[name] for name in own], axis=1)}
    if "set" in columns:
        found["set"] = np.array([[name in row for name in classes] for row in columns["set"]])
    return found


def _tell(console: Console, model: PersonalModel, columns: dict[str, np.ndarray], chosen: Options) -> None:
    """Print what was predicted, and what it rests on."""
    num = len(columns["epistemic_share"])
    unsure = (
        f"mean entropy {columns['entropy'].mean():.3f} nats"
        if "entropy" in columns
        else f"mean standard deviation {columns['sd'].mean():.3g}"
    )
    lines = [f"{num} rows predicted by the model of {model.source.client or 'a newcomer'}, {unsure}"]
    if "abstain" in columns:
        lines.append(
            f"{int(columns['abstain'].sum())} of {num} rows are not to be decided: their top probability is below "
            f"{chosen.abstain:g}"
        )
    if model.calibration is None:
        what = "prediction sets" if "entropy" in columns else "conformal intervals"
        lines.append(
            f"no {what}: the client has no held-out rows to calibrate on; run again with --validation 0.2 for some"
        )
    else:
        size = (
            f"sets of {np.mean([len(row) for row in columns['set']]):.2f} classes" if "set" in columns else "intervals"
        )
        lines.append(
            f"conformal {size} at level {chosen.level:g}, calibrated on {len(model.calibration)} held-out rows; they "
            f"hold if: {ASSUMPTION}"
        )
    lines.append(f"predictions: {chosen.out}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
