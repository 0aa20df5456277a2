"""`priory flower schema`: the draft of a schema, which states what an app tells of the data."""

from collections.abc import Sequence
from pathlib import Path

from priory import data, report
from priory.cli import flags
from priory.cli.federation import DataFlags
from priory.cli.flags import Flag
from priory.cli.flower import common
from priory.core.errors import UsageError
from priory.data import draft
from priory.data.datasets import OWN_FILES

TEXT = (
    "Draft a schema: a TOML file with the columns, bounds, categories and classes of a file, which `priory flower init "
    "--schema` puts into the app. The draft has values that were read from the rows, each marked. Replace them by what "
    "is known without the rows, and set reviewed = true; an app with differential privacy needs that."
)
DATA = Flag("data", (), str, flags.REQUIRED, "A .csv or .npz file.", placed="FILE")
OUT = Flag("out", (), str, "schema.toml", "The new file.")
OPTIONS = ("target", "client", "drop", "group", "task", "scale", "scaling", "clients")


def schema(argv: Sequence[str]) -> int:
    """Return the exit code of `priory flower schema`."""
    options = [flags.find(DataFlags(), name, "priory flower schema") for name in OPTIONS]
    options = [flags.several(flag) if isinstance(flag.default, tuple) else flag for flag in options]
    values = common.parse("schema", argv, [DATA, *options, OUT], TEXT)
    path, out, clients = values.pop("data"), Path(values.pop("out")), values.pop("clients")
    if Path(path).suffix not in OWN_FILES:
        raise UsageError(f"{path!r} must be a .csv or .npz file; a public data set needs no schema.")
    loaded = data.load(path, **values | {"drop": flags.flatten(values["drop"])})
    text = draft.draft(loaded, clients, values["scaling"])
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{out} exists, and no schema is overwritten; choose another --out.") from None
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); choose another --out.") from None
    report.say(
        *loaded.describe().splitlines(),
        f"{out}: a draft, which is not reviewed; it has values that were read from the rows, each marked",
        "  replace them by what is known without the rows, set reviewed = true, and make an app with",
        f"  priory flower init DIR --schema {out}",
    )
    return 0
