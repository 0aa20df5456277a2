"""`priory flower budget`: what a client's answers have cost, and the total that its owner allows."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from priory import report
from priory.cli.flags import Flag
from priory.cli.flower import common
from priory.cli.flower.common import CLIENT, JSON, STATE
from priory.core.errors import UsageError
from priory.deploy.budget import Book, Budget

TEXT = (
    "Show what a client's answers under differential privacy have cost over all runs, and set the total that its owner "
    "allows. A run that would exceed the total is refused before its first answer. Until a total is set, it is the "
    "claim of the first run. Once it is set, apps without differential privacy get no answer."
)
EPSILON = Flag("budget_epsilon", (), float | None, None, "Set the total ε of all runs; 0 answers nothing.")
DELTA = Flag("budget_delta", (), float | None, None, "δ at which the total is meant; that of the first run by default.")
REQUIRE = Flag(
    "require",
    (),
    Literal["local", "any"] | None,
    None,
    "Answer only where noise is added on this node (local), or also where the server adds it (any, from the start).",
)


def budget(argv: Sequence[str]) -> int:
    """Return the exit code of `priory flower budget`."""
    values = common.parse("budget", argv, [STATE, CLIENT, EPSILON, DELTA, REQUIRE, JSON], TEXT)
    client, place = values["client"], common.place_of(values["directory"], values["client"])
    if not place.parent.is_dir():
        raise UsageError(f"{place.parent} does not exist; name the state directory of the node, or make it first.")
    found = Budget(place, client)
    _set(found, values["budget_epsilon"], values["budget_delta"])
    if values["require"] is not None:
        found.require(values["require"] == "local")
    book = found.read()
    if values["json"]:
        print(json.dumps({**asdict(book), "spent": book.spent() if book.runs else 0.0}))
        return 0
    report.say(*lines_of(book, client))
    return 0


def _set(found: Budget, epsilon: float | None, delta: float | None) -> None:
    """Set the total if one was given."""
    if epsilon is None:
        if delta is not None:
            raise UsageError(f"budget-delta={delta:g} is the δ of a total; give --budget-epsilon as well.")
        return
    known = found.read().delta
    if delta is None and not known:
        raise UsageError(f"budget-epsilon={epsilon:g} needs a δ before the first run; give --budget-delta 1e-5, say.")
    found.allow(epsilon, known if delta is None else delta)


def lines_of(book: Book, client: int) -> list[str]:
    """Return the budget in words."""
    required = ["  its owner requires local differential privacy (--require local)"] if book.local else []
    if book.epsilon is None:
        return [f"client {client} has answered nothing under differential privacy, and has no total", *required]
    whose = "set by its owner" if book.owned else "the claim of its first run, since its owner has set none"
    lines = [
        f"client {client}: ε {book.spent():.4g} of {book.epsilon:.4g} spent at δ = {book.delta:g}; {whose}",
        *required,
    ]
    for name, run in book.runs.items():
        cost = f"ρ = {run.rho:.4g} (local)" if run.rho else f"ε = {run.epsilon:.4g}, δ = {run.delta:g} (central)"
        lines.append(f"  {name}: {run.answers} answers, the last in round {run.round}; {cost}")
    return lines
