"""`priory export`: a client's model as files that need no run, and draws of its posterior for ArviZ."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from priory import report
from priory.cli import flags
from priory.cli.models import named_model
from priory.cli.run import free_path, run_groups
from priory.core.errors import UsageError
from priory.core.files import check_no_links
from priory.data import checks
from priory.effects import arviz
from priory.engine import save_model
from priory.fed.capabilities import Draws, MixedEffects

TEXT = (
    "Write the model of one client to a directory of its own: weights.safetensors, model.json, which describes them, "
    "and draws.nc, draws of the posterior as ArviZ reads them. `priory predict` and `priory.load_model` read it."
)


@dataclass(frozen=True)
class Options:
    """Whose model is written, and where.

    Attributes:
        client: Name of the client (see `priory clients DIR`).
        out: New directory; by default DIR/exported/CLIENT, with -2, -3 … where that is taken.
        draws: Draws of the network's weights in draws.nc, 0 for no such file; random effects come with all of theirs.
    """

    client: str | None = None
    out: str | None = None
    draws: int = 500


def export(argv: Sequence[str]) -> int:
    """The exit code of `priory export`."""
    groups = run_groups("export") | {"export": flags.group("export", "", flags.flags_of(Options()))}
    values = flags.parse(groups, argv, prog="priory export", text=TEXT)
    chosen = Options(**values["export"])
    checks.whole("draws", chosen.draws, 0)
    if chosen.out is not None and Path(chosen.out).exists():
        raise UsageError(f"out={chosen.out} exists already and is never overwritten; choose another directory.")
    root = Path(values["run"]["directory"])
    root = root.parent if root.name == "manifest.toml" else root
    if chosen.out is None:
        check_no_links(root)
    if chosen.draws:
        arviz()  # before anything is computed
    model = named_model(values, chosen.client).make()
    has_draws = isinstance(model.method, MixedEffects | Draws)
    name = re.sub(r"[^\w.-]+", "_", model.source.client or "newcomer").lstrip(".") or "client"
    wanted = Path(chosen.out) if chosen.out else free_path(root / "exported" / name)
    place = save_model(model, wanted, draws=chosen.draws if has_draws else 0)
    console = report.console()
    if chosen.draws and not has_draws:
        console.print(
            f"{model.source.method} is a point estimate and has no posterior to draw from, so there is no draws.nc.",
            markup=False,
            soft_wrap=True,
        )
    files = ", ".join(sorted(path.name for path in place.iterdir()))
    console.print(f"{files} in {place}", markup=False, soft_wrap=True)
    return 0
