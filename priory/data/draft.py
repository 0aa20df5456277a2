"""The draft of a schema: what the rows of a file suggest, each value marked, for a person to replace and to review."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from priory.core.errors import UsageError
from priory.data import checks
from priory.data.dataset import Dataset
from priory.data.encoder import Feature
from priory.data.options import ROLES

__all__ = ["draft"]

HELD_OUT = 0.2  # of the rows of a node, which score its model
MARK = "# FROM THE DATA"
HEAD = """\
# Schema of {file}, drafted by `priory flower schema`. What it says goes to every node and to the server.
# A value marked FROM THE DATA was read from the rows. Replace it by what is known without these rows, such as the range
# of an instrument or a published list of codes. When no value depends on the rows any more, set reviewed = true.
reviewed = false
"""
COLUMNS = """
# The inputs. A number outside low to high is clipped; a value that is none of the categories counts as missing;
# missing = true adds an input that marks gaps.
[columns]
"""


def draft(data: Dataset, clients: int | None = None, scaling: str | None = None) -> str:
    """Return the text of a schema for a table or arrays that `load` read from a file.

    Args:
        clients: How many take part; by default those that the rows name.
        scaling: Of arrays, as `load` was given it.
    """
    path = str(data.source["data"])
    if clients is None and data.client is None:
        raise UsageError(
            f"{path} does not say which client a row is of; give --clients N, how many take part, or --client, the "
            "column that names them."
        )
    number, mark = (len(data.clients), f"  {MARK}") if clients is None else (clients, "")
    lines = [
        HEAD.format(file=_value(Path(path).name)),
        f"name = {_value(data.name)}",
        f"clients = {checks.whole('clients', number, 1)}{mark}",
        f"examples = {_examples(len(data.y))}  {MARK}, rounded up: training rows of all clients together",
        *_target(data),
    ]
    if data.features is None:
        lines += [
            "",
            "[inputs]",
            f"shape = {_value(list(data.x.shape[1:]))}",
            f"scaling = {_value(_scaling(data, scaling))}",
        ]
    else:
        lines += [COLUMNS + "\n".join(_column(one, data.x[:, place]) for place, one in enumerate(data.features))]
    return "\n".join(lines) + "\n"


def _target(data: Dataset) -> list[str]:
    """Return the target, its classes, and the other roles."""
    roles = {role: data.source[role] for role in ROLES if data.source.get(role)}
    if data.features is None:
        found = {"client": data.client, "group": data.group, "scale": data.scale}
        roles = {"target": "y", **{role: role for role, values in found.items() if values is not None}}
    lines = [f"{role} = {_value(names)}" for role, names in roles.items()]
    if data.num_classes is not None:
        lines.insert(1, f"classes = {_value(list(data.classes))}  {MARK}")
    return lines


def _column(feature: Feature, values: np.ndarray) -> str:
    name = feature.name if re.fullmatch(r"[A-Za-z0-9_-]+", feature.name) else _value(feature.name)
    if feature.categories is None:
        low, high = rounded_outwards(float(np.nanmin(values)), float(np.nanmax(values)))
        kind, marked = f'kind = "number", low = {_value(low)}, high = {_value(high)}', "low, high, missing"
    else:
        kind, marked = f'kind = "category", categories = {_value(list(feature.categories))}', "categories, missing"
    return f"{name} = {{ {kind}, missing = {_value(feature.missing)} }}  {MARK}: {marked}"


def rounded_outwards(low: float, high: float) -> tuple[float, float]:
    """Return bounds around the values with as many digits as their range needs: one.

    >>> rounded_outwards(17.3, 90.2), rounded_outwards(0.0, 1.0), rounded_outwards(5.0, 5.0)
    ((10.0, 100.0), (0.0, 1.0), (5.0, 6.0))
    """
    span = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span))
    digits = max(0, -round(math.log10(step)))
    below, above = math.floor(low / step), math.ceil(high / step)
    above += above == below
    within = checks.LARGEST
    return max(round(below * step, digits), -within), min(round(above * step, digits), within)


def _examples(rows: int) -> int:
    """Return the rows that are not held out, with two digits, rounded up."""
    training = max(1, math.ceil((1 - HELD_OUT) * rows))
    unit = 10 ** max(0, len(str(training)) - 2)
    return -(-training // unit) * unit


def _scaling(data: Dataset, given: str | None) -> str:
    if given == "standard":
        raise UsageError(
            "scaling='standard' takes mean and deviation from the rows, and a schema states none; choose unit, "
            "symmetric or none."
        )
    return given or ("unit" if data.x.dtype == np.uint8 else "none")


def _value(value: Any) -> str:
    """Return the value as TOML, whose strings, lists and truth values are JSON's, except for one character."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
