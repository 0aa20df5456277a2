"""The personal model that a command names: a run and a client of it, an onboarded client, or an exported directory."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from priory.cli import start
from priory.cli.run import opened
from priory.core.errors import UsageError
from priory.data import checks
from priory.data.form import Form
from priory.engine import PersonalModel, Run, load, load_model
from priory.engine.export import is_model
from priory.models.likelihood import Likelihood
from priory.store import RunDirectory

ONBOARDED, MODEL = "onboarded", "model"  # DIR/onboarded/NAME/model


@dataclass(frozen=True)
class Named:
    """A model before it is made, which may take a while: what can be wrong with rows is seen without it."""

    form: Form
    likelihood: Likelihood
    make: Callable[[], PersonalModel]


def named_model(values: dict[str, dict[str, Any]], client: str | None) -> Named:
    """The model that the values of `run_groups` and a client's name stand for."""
    path, trust = Path(values["run"]["directory"]), values["output"]["trust_code"]
    if is_model(path):
        if client is not None:
            raise UsageError(f"{path} is the model of one client, so that client={client} says nothing; leave it out.")
        if trust:
            start.import_from_here()
        start.start_jax(values["output"]["devices"])
        return _loaded(path, trust)
    if client is None:
        raise UsageError(
            f"No client is named, and {path} is not the model of a single one; see `priory clients {path}`."
        )
    path, _ = opened(values)
    later = onboarded(path)
    run = load_finished(path, trust)
    if client in run.federation.clients and client in later:
        raise UsageError(
            f"client={client} took part in {path}, and one that came later has the same name; name the later one by "
            f"its directory, {later[client]}."
        )
    if client in later:
        return _loaded(later[client], trust)
    if client not in run.federation.clients:
        raise checks.unknown("client", client, [*run.federation.clients, *later])
    run.federation.participant(client)
    return Named(run.federation.form, run.task.likelihood, lambda: run.client(client))


def _loaded(path: Path, trust: bool) -> Named:
    model = load_model(path, trust_code=trust)
    return Named(model.form, model.task.likelihood, lambda: model)


def load_finished(path: Path, trust: bool) -> Run:
    """The run in a directory, which must have ended: a model that changes at the next commit is nobody's."""
    if RunDirectory(path).checkpoint.is_dir() and RunDirectory(path).summary() is None:
        raise UsageError(f"{path} is not finished; end it with `priory resume {path}`.")
    return load(path, trust_code=trust)


def onboarded(path: Path) -> dict[str, Path]:
    """The models of clients that came later, by name."""
    found = sorted((path / ONBOARDED).glob(f"*/{MODEL}"))
    return {place.parent.name: place for place in found if is_model(place)}
