"""What an app carries to the server and to every node, and whether differential privacy allows it.

Noise protects what is sent in a run. The app is not covered by ε, so under differential privacy its form of the data
comes from a schema that a person reviewed, or from a data set that is public.
"""

from collections.abc import Sequence
from pathlib import Path

from priory.core.errors import UsageError
from priory.data import alignment
from priory.data.datasets import OWN_FILES
from priory.data.schema import Schema
from priory.deploy.charter import Charter


def check(dp: str | None, data: str, transforms: Sequence[str], align: str | None, schema: Schema | None) -> None:
    """Raise where an app under differential privacy would carry values that were read from the rows of a file.

    Args:
        data: Name of a data set or path of a file; empty without either.
        transforms: Of the data; `mix:FILE` adds the rows of a file.
        align: The alignment set, as the user wrote it.
    """
    if dp is None:
        return
    sources = [data, *(step.removeprefix("mix:") for step in transforms)]
    own = next((name for name in sources if _is_own(name)), None)
    if own is not None and schema is None:
        raise UsageError(
            f"dp={dp!r} covers messages and not the app, which would carry statistics, names and counts of {own} to "
            f"every node; draft a schema with `priory flower schema {own}`, review it, and give it with --schema."
        )
    if schema is not None and not schema.reviewed:
        raise UsageError(
            f"{schema.path} states reviewed = false, and dp={dp!r} needs a reviewed schema; replace the values that "
            "were read from the data, then set reviewed = true."
        )
    if own is not None and align is not None and alignment.parse(align).own:
        raise UsageError(
            f"align={align!r} would put rows of {own} into the app, which dp={dp!r} does not cover; give public rows "
            "(DATASET:N or FILE.npz), or leave out --align and choose a method without an alignment set."
        )


def summary(charter: Charter, data: str, scaling: str | None, schema: Schema | None) -> list[str]:
    """Return in two lines what everybody receives with the app, and where it comes from.

    Args:
        scaling: Of arrays, as the user wrote it.
    """
    form, question = charter.form, charter.question
    if form.encoder is None:
        is_fitted = scaling == "standard" and _is_own(data)
        shape = "x".join(map(str, form.input_shape))
        parts = [f"shape ({shape}) and {'mean and deviation' if is_fitted else 'scaling'} of the inputs"]
    else:
        features = form.encoder.features
        listed = [feature.categories for feature in features if feature.categories is not None]
        numbers = len(features) - len(listed)
        parts = [f"names of {len(features) + sum(map(len, form.roles.values()))} columns"]
        parts += [f"{'mean and deviation' if schema is None else 'bounds'} of {numbers}"] if numbers else []
        parts += [f"categories of {len(listed)} ({sum(map(len, listed))} names)"] if listed else []
        parts += ["which of them have gaps"]
    parts += [f"names of {len(form.classes)} classes"] if form.classes else []
    parts += [f"number of clients ({question.num_clients})", f"number of examples ({question.num_examples})"]
    parts += [] if charter.public is None else [f"all of the {len(charter.public)} public rows"]
    parts += [f"path of {Path(data).name}"] if _is_own(data) else []
    return [f"shared with the server and every node: {', '.join(parts)}", f"  {_origin(charter, data, schema)}"]


def _origin(charter: Charter, data: str, schema: Schema | None) -> str:
    if schema is not None:
        reviewed = "reviewed" if schema.reviewed else "not reviewed"
        rows = "" if charter.public is None else " except the public rows"
        return f"all as stated in {schema.path} ({reviewed}){rows}"
    if _is_own(data):
        return f"read from the rows of {data}; --schema shares values that you state (`priory flower schema {data}`)"
    return f"{data} is a public data set"


def _is_own(name: str) -> bool:
    """Return whether a name is the path of a file of the user."""
    return Path(name).suffix in OWN_FILES
