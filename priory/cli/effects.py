"""`priory effects`: the random effects of a run, as a table and as draws for ArviZ."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from priory import report
from priory.cli import flags
from priory.cli.effect_tables import num_effects, show
from priory.cli.run import opened, run_groups
from priory.core.errors import UsageError
from priory.effects import arviz, check_effects
from priory.engine import load
from priory.fed.capabilities import MOST_EFFECTS

TEXT = "Print the random effects of a run's clients, with the population that they come from and the fixed effects."


@dataclass(frozen=True)
class Options:
    """What is shown.

    Attributes:
        level: Probability of the central intervals.
        arviz: File for the draws, in netCDF as ArviZ reads it.
    """

    level: float = 0.9
    arviz: str | None = None


def effects(argv: Sequence[str]) -> int:
    """The exit code of `priory effects`."""
    groups = run_groups("effects") | {"effects": flags.group("effects", "", flags.flags_of(Options()))}
    values = flags.parse(groups, argv, prog="priory effects", text=TEXT)
    path, _ = opened(values)
    run, chosen = load(path, trust_code=values["output"]["trust_code"]), Options(**values["effects"])
    check_effects(run.method, run.name, chosen.level)
    num = num_effects(run)
    too_many = f"{num} random effects a client are too many for a table, which holds {MOST_EFFECTS}"
    if chosen.arviz is None and num > MOST_EFFECTS:
        raise UsageError(f"{too_many}; write their draws with --arviz FILE.nc.")
    if chosen.arviz is not None:  # before anything is computed
        arviz()
        if not Path(chosen.arviz).absolute().parent.is_dir():
            raise UsageError(f"arviz={chosen.arviz} lies in no directory that exists; make it, or choose another file.")
    found = run.effects(chosen.level, draws=chosen.arviz is not None)
    if chosen.arviz is not None:
        run.inference_data(found).to_netcdf(chosen.arviz)
        report.say(f"draws: {chosen.arviz}")
    if num > MOST_EFFECTS:
        report.say(f"{too_many}.")
        return 0
    report.say(f"{run.name} on {run.federation.name} after {run.completed} of {run.settings.rounds} rounds")
    show(report.console(), found)
    return 0
