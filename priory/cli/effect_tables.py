"""The tables of a mixed-effects run: the population, the fixed effects, and each client's random effects."""

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from priory import report
from priory.core import trees
from priory.core.text import one_line
from priory.effects import Effects, names_of, num_coordinates
from priory.engine import Run

POINT = (
    "Empirical Bayes: the intervals take the population's mean and standard deviation, and the fixed effects, as "
    "known, so they are too narrow where clients are few."
)
FULL = (
    "Full Bayes over the population: the intervals are wider for what is not known of its mean and standard deviation; "
    "the fixed effects are taken as known."
)
ADVISED = "The run has warnings about these estimates; follow them before you rely on the table."
MOST_UNASKED = 4  # random effects of a client that are shown at the end of a run
MOST_CLIENTS = 100  # and for so many clients
MOST_FIXED = 20


def num_effects(run: Run) -> int:
    """The number of random effects of a client, 0 for a method without any."""
    return num_coordinates(run.method, run.task, run.method.broadcast(run.server))


def conclude(console: Console, run: Run) -> None:
    """Show the effects of a run that has just ended, where it has any and they are few."""
    if not 0 < num_effects(run) <= MOST_UNASKED:
        return
    if run.task.num_clients <= MOST_CLIENTS:
        show(console, run.effects())
    else:
        console.print()
        report.say(f"for the random effects of {run.task.num_clients} clients: priory effects {run.path}")


def show(console: Console, found: Effects) -> None:
    """Print the population, the fixed effects if they are few, the clients, and what the intervals assume."""
    for table in [population_table(found), *fixed_tables(found), clients_table(found)]:
        console.print()
        console.print(table)
    console.print()
    console.print(POINT if found.population.is_point else FULL)
    if found.advice:
        console.print(ADVISED)


def population_table(found: Effects) -> Table:
    """Mean and standard deviation between clients of each random effect, with intervals under full Bayes."""
    table = report.plain_table("random effect", "population mean", "population sd")
    means, sds = found.population.intervals(found.level)
    centres = found.population.mean.mean(axis=0), found.population.sd.mean(axis=0)
    for i, name in enumerate(found.names):
        cells = [_number(centre[i]) for centre in centres]
        if not found.population.is_point:
            cells = [f"{cell} {_interval(*ends[:, i])}" for cell, ends in zip(cells, (means, sds), strict=True)]
        table.add_row(name, *cells)
    return table


def fixed_tables(found: Effects) -> list[Table]:
    """The fixed effects, if there are any and few enough to read."""
    if not 0 < trees.size(found.fixed) <= MOST_FIXED:
        return []
    table = report.plain_table("fixed effect", "estimate")
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found.fixed)])
    for name, value in zip(names_of(found.fixed, num_axes=0), values, strict=True):
        table.add_row(name, _number(value))
    return [table]


def clients_table(found: Effects) -> Table:
    """Estimate, interval and diagnostics of each random effect of each client."""
    several = len(found.names) > 1
    level = f"{100 * found.level:g} % interval"
    words = ["random effect"] if several else []
    table = report.plain_table("client", "examples", *words, "estimate", level, "R-hat", "ESS", left=words)
    for k, client in enumerate(found.clients):
        for i, name in enumerate(found.names):
            who = (one_line(client), str(found.examples[k])) if i == 0 else ("", "")
            interval = _interval(found.low[k, i], found.high[k, i])
            mixed = (_number(found.rhat[k, i]), f"{found.ess[k, i]:.0f}")
            table.add_row(*who, *([name] if several else []), _number(found.mean[k, i]), interval, *mixed)
    return table


def _interval(low: float, high: float) -> str:
    return f"({_number(low)}, {_number(high)})"


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"
