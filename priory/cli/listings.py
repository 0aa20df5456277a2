"""`priory methods` and `priory datasets`."""

from collections.abc import Sequence

from priory import data, report
from priory.cli import flags


def methods(argv: Sequence[str]) -> int:
    """The exit code of `priory methods`."""
    flags.parse({}, argv, prog="priory methods", text="List the methods: paper, what a client keeps and what it sends.")
    console = report.console()
    console.print(report.methods_table())
    console.print(
        "\n`priory run METHOD --help` lists the hyper-parameters of a method. METHOD may also be path/file.py:Class or "
        "package.module:Class."
    )
    return 0


def datasets(argv: Sequence[str]) -> int:
    """The exit code of `priory datasets`."""
    text = (
        "List the data sets. Those that are not here are read from the directory in PRIORY_DATA, or fetched by name. "
        "digits, heart_disease, radon, eight_schools and synthetic problems need no file."
    )
    flags.parse({}, argv, prog="priory datasets", text=text)
    console = report.console()
    console.print(report.datasets_table(data.describe()))
    console.print()
    console.print(report.sources_table(data.describe()))
    console.print(
        "\nheart_disease and radon are part of Priory and are always read from it, never from PRIORY_DATA. "
        "Their sources, licences, citations and changes are in priory/data/shipped/README.md of the package."
    )
    console.print(
        "\nYour own data: --data file.csv --target COL --client COL, or --data file.npz with x, y and client."
    )
    return 0
