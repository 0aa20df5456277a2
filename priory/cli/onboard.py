"""`priory onboard`: a model for a client that comes after the run, from its labels, its inputs alone, or nothing."""

import csv
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from priory import certificate, report
from priory.cli import flags
from priory.cli.app import DIVERGED
from priory.cli.models import MODEL, ONBOARDED
from priory.cli.rows import predictions
from priory.cli.run import free_path, opened, run_groups, trusting
from priory.core.errors import UsageError
from priory.core.files import check_no_links, write_atomically
from priory.core.sealed import sealed
from priory.core.text import spreadsheet_cell
from priory.data import checks
from priory.data.form import Form
from priory.data.rows import Rows, read_rows
from priory.engine import PersonalModel, Run, load, save_model
from priory.fed.capabilities import SharedModel, Unlabelled
from priory.store import RunDirectory

TEXT = (
    "Give a client that never took part a model of its own, and score it or predict with it. With labels the client "
    "learns as a participant would, with inputs alone where the method can, and without data it gets the model of the "
    "population. The run itself stays as it is. Where the method has one, a model from labels comes with a "
    "certificate: a bound on its error on new rows."
)
NO_DATA, INPUTS, LABELS = "no data", "inputs alone", "inputs and labels"
KEYS = {NO_DATA: "global", INPUTS: "unlabelled", LABELS: "labelled"}  # of scores.json
NAMES = {NO_DATA: "model of the population", INPUTS: "model from inputs alone", LABELS: "personal model"}


@dataclass(frozen=True)
class Options:
    """What the client has, and what is wanted.

    Attributes:
        data: Its examples, with or without labels: .npz (x, y, scale) or .csv with the columns of the run's table.
        predict: File with the rows to predict, in the same form; by default the examples, where they have no labels.
        target: Column of the labels (CSV); by default the one that the run predicts.
        labels: Learn from the labels of the file; with --no-labels they only score what inputs alone give.
        name: Goes to DIR/onboarded/NAME; by default the name of the file, with -2, -3 … where that is taken.
        test: Fraction of labelled rows that is held out and scored; with 0 all are learned from, and none is scored.
        seed: Seed that chooses the rows held out.
        delta: The chance that the certificate fails.
        draws: Networks drawn for the certificate.
    """

    data: str | None = None
    predict: str | None = None
    target: str | None = None
    labels: bool = True
    name: str | None = None
    test: float = 0.2
    seed: int = 0
    delta: float = certificate.DELTA
    draws: int = certificate.DRAWS

    def check(self) -> None:
        """Raise on what can be seen before the run is read."""
        checks.fraction("test", self.test)
        checks.whole("seed", self.seed, 0)
        certificate.check_numbers(self.delta, self.draws)
        if self.data is None and self.predict is None:
            raise UsageError(
                "Neither --data nor --predict is given, and a client without data needs rows to predict; "
                "give --predict FILE, or --data FILE."
            )
        if self.name is not None and (not self.name or Path(self.name).name != self.name or self.name[0] == "."):
            raise UsageError(
                f"name={self.name!r} is no plain name of a directory; leave out slashes and dots in front."
            )


@dataclass(frozen=True)
class Outcome:
    """A client's model, and what was found on the way to it."""

    model: PersonalModel
    way: str
    scores: dict[str, Any] | None
    certificate: dict[str, Any] | None = None


def onboard(argv: Sequence[str]) -> int:
    """The exit code of `priory onboard`."""
    groups = run_groups("onboard") | {"onboard": flags.group("onboard", "", flags.flags_of(Options()))}
    values = flags.parse(groups, argv, prog="priory onboard", text=TEXT)
    chosen = Options(**values["onboard"])
    chosen.check()
    path, _ = opened(values)
    if RunDirectory(path).summary() is None:
        raise UsageError(
            f"{path} is not finished, and a client joins a finished run; end it with `priory resume {path}`."
        )
    check_no_links(path)
    run, console = load(path, trust_code=values["output"]["trust_code"]), report.console()
    form, likelihood = run.federation.form, run.task.likelihood
    data = None if chosen.data is None else read_rows(form, likelihood, chosen.data, chosen.target, with_labels=True)
    asked = None if chosen.predict is None else read_rows(form, likelihood, chosen.predict)
    if asked is None and data is not None and (data.y is None or not chosen.labels):
        asked = data
    outcome = _joined(run, data, chosen, asked is not None, console)
    found = {"scores.json": outcome.scores, "certificate.json": outcome.certificate}
    files = {name: sealed(table, indent=2) for name, table in found.items() if table is not None}
    if asked is not None:
        files["predictions.csv"] = _predictions(outcome, asked, console)
    place = _write(path / ONBOARDED / (chosen.name or Path(chosen.data or chosen.predict or "").stem), files)
    save_model(outcome.model.named(place.name), place / MODEL)
    command = f"priory predict {path} --client {place.name}{trusting(run.method, run.settings)}"
    console.print(f"it predicts with: {command}", markup=False, soft_wrap=True)
    console.print(f"{' and '.join(sorted(files))} in {place}", markup=False, soft_wrap=True)
    if outcome.scores is not None and outcome.scores["scores"][KEYS[outcome.way]]["nll"] is None:
        warnings.warn(
            f"Training diverged: the scores of the {NAMES[outcome.way]} are not finite; correct or drop rows of "
            f"{chosen.data} that are far from all others, or run with a smaller step size.",
            stacklevel=2,
        )
        return DIVERGED
    return 0


def _joined(run: Run, data: Rows | None, chosen: Options, has_task: bool, console: Console) -> Outcome:
    """The model that the client gets, after saying from what."""
    title = f"{run.name} on {run.federation.name}"
    if data is None:
        model = run.onboard()
        console.print(f"{title}: a client without data gets the model of the population", markup=False, soft_wrap=True)
        return Outcome(model, NO_DATA, None)
    if data.y is not None and chosen.labels:
        return _labelled(run, data, chosen, has_task, console)
    model = run.onboard(data.x, encoded=True)
    can = isinstance(run.method, Unlabelled)
    words = (
        "a model from the inputs alone"
        if can
        else (f"the model of the population, since {run.name} cannot use inputs without labels")
    )
    rows = f"{len(data.x)} rows {'without labels' if data.y is None else 'whose labels are left aside'}"
    console.print(f"{title}: {rows} give {words}", markup=False, soft_wrap=True)
    if run.federation.encoder is not None and "target" not in run.federation.spec and chosen.target is None:
        console.print("(if a column holds labels, name it with --target)", markup=False)
    way = INPUTS if can else NO_DATA
    if data.y is None:
        return Outcome(model, way, None)
    models = {NO_DATA: run.onboard()} if isinstance(run.method, SharedModel) else {}
    told = {"rows": len(data.x), "held_out": 0, "scores": _compared(models | {way: model}, data, console)}
    console.print("(scored by the labels of the same rows, which no model has seen)", markup=False)
    return Outcome(model, way, told)


def _labelled(run: Run, data: Rows, chosen: Options, has_task: bool, console: Console) -> Outcome:
    """The model from labels, scored beside those that need less."""
    assert data.y is not None
    assert chosen.data is not None
    form = run.federation.form
    is_test = data.held_out(form, chosen.data, chosen.test, chosen.seed)
    own, held, scored = data.where(~is_test), data.where(is_test), bool(is_test.any())
    if not scored and not has_task:
        raise UsageError(
            f"test={chosen.test:g} holds out none of {len(data.x)} rows{_values(form, data, ' with ')}, so that "
            "nothing is scored; raise it, or name rows to predict with --predict FILE."
        )
    model = run.onboard(own.x, own.y, own.scale, encoded=True, group=own.group)
    title = f"{run.name} on {run.federation.name}: {len(own.x)} rows with labels give a personal model"
    if scored:
        title += f", scored on {len(held.x)} held out{_values(form, held, ', all those of ')}"
    console.print(title, markup=False, soft_wrap=True)
    if not scored:
        return Outcome(model, LABELS, None, _certified(model, chosen, console))
    models = {NO_DATA: run.onboard()} if isinstance(run.method, SharedModel) else {}
    models |= {INPUTS: run.onboard(own.x, encoded=True)} if isinstance(run.method, Unlabelled) else {}
    models |= {LABELS: model}
    plain = _compared(models, held, console)
    told = {"rows": len(own.x), "held_out": len(held.x), "test": chosen.test, "seed": chosen.seed, "scores": plain}
    told["uncertainty"] = _uncertainty(model, held, console)
    proved = _certified(model, chosen, console)
    return Outcome(model.calibrated(held.x, held.y, held.scale, encoded=True), LABELS, told, proved)


def _values(form: Form, rows: Rows, before: str) -> str:
    """The number of groups that the rows have, where they have any."""
    if rows.group is None:
        return ""
    num = len(np.unique(rows.group))
    return f"{before}{num} value{'' if num == 1 else 's'} of {form.role('group')!r}"


def _compared(models: dict[str, PersonalModel], rows: Rows, console: Console) -> dict[str, Any]:
    """The scores of each way on labelled rows, after a table of them."""
    scores = {way: one.score(rows.x, rows.y, rows.scale, encoded=True).to_json() for way, one in models.items()}
    console.print()
    console.print(report.ways_table(scores))
    console.print()
    return {KEYS[way]: {k: v for k, v in found.items() if k != "clients"} for way, found in scores.items()}


def _uncertainty(model: PersonalModel, held: Rows, console: Console) -> dict[str, float]:
    """How unsure the personal model is of the held-out rows, after saying so."""
    whole, epistemic = (float(np.mean(part)) for part in model.doubts(held.x, held.scale, encoded=True))
    is_class = model.form.num_classes is not None
    name, unit = ("entropy", " nats") if is_class else ("standard deviation", "")
    console.print(
        f"its mean {name} on the held-out rows is {whole:.3g}{unit}, epistemic {epistemic:.3g}{unit}", markup=False
    )
    return {name.replace(" ", "_"): whole, "epistemic": epistemic}


def _certified(model: PersonalModel, chosen: Options, console: Console) -> dict[str, Any] | None:
    """The certificate of the personal model on the rows that it learned from, or None, after saying it or why not."""
    try:
        found = model.certificate(chosen.delta, chosen.draws)
    except UsageError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return None
    for line in found.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return found.to_json()


def _predictions(outcome: Outcome, asked: Rows, console: Console) -> str:
    """The text of predictions.csv, after telling how sure the model is."""
    written = io.StringIO()
    writer, total = csv.writer(written, lineterminator="\n"), 0.0
    classes = outcome.model.form.classes
    is_class = outcome.model.form.num_classes is not None
    writer.writerow(["label", *(f"p_{name}" for name in classes)] if is_class else ["mean", "sd"])
    for found in predictions(outcome.model, asked):
        if found.probabilities is not None and found.entropy is not None:
            rows = zip(found.name, found.probabilities, strict=True)
            writer.writerows([spreadsheet_cell(label), *(f"{p:.6g}" for p in row)] for label, row in rows)
            total += float(np.sum(found.entropy, dtype=float))
        elif found.mean is not None and found.sd is not None:
            writer.writerows([f"{m:.6g}", f"{s:.6g}"] for m, s in zip(found.mean, found.sd, strict=True))
            total += float(np.sum(found.sd, dtype=float))
    num = len(asked.x)
    unsure = f"mean entropy {total / num:.3f} nats" if is_class else f"mean standard deviation {total / num:.3g}"
    console.print(f"{num} rows predicted by the {NAMES[outcome.way]}, {unsure}", markup=False, soft_wrap=True)
    return written.getvalue()


def _write(wanted: Path, files: dict[str, str]) -> Path:
    """The directory that the files went to: a new one, so that nothing written before is touched."""
    try:
        place = free_path(wanted)
        place.mkdir(parents=True)
        for name, text in files.items():
            write_atomically(place / name, text)
    except OSError as error:
        raise UsageError(
            f"{wanted} cannot be written ({error.strerror}); make it writable, or free the disk."
        ) from None
    return place
