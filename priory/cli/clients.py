"""`priory clients`: who is in a run, to name one of them."""

from collections.abc import Sequence

from priory import report
from priory.cli.models import onboarded
from priory.cli.run import named_run
from priory.core.text import one_line
from priory.data.federation import PARTS
from priory.engine import manifest

TEXT = "List the clients of a run with their numbers of rows; `--client NAME` of `predict` and `export` takes a name."


def clients(argv: Sequence[str]) -> int:
    """The exit code of `priory clients`."""
    path, table = named_run(argv, "clients", TEXT)
    federation = manifest.read_data(table)  # no model is built, so no code is imported
    rows = []
    for place, name in enumerate(federation.clients):
        counts = [str(int(getattr(federation, part).count[place])) for part in PARTS]
        rows.append([name, "took part" if place < federation.num_clients else "held out", *counts])
    rows += [[name, "came later", "–", "–", "–"] for name in onboarded(path)]
    shown = report.plain_table("client", "", *PARTS, left=[""])
    shown.columns[0].no_wrap = False  # a name is there to be copied
    for name, *row in rows:
        shown.add_row(one_line(name), *row)
    report.console().print(shown)
    return 0
