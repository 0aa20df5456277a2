"""The manifest: every setting of a run as TOML, enough to run it again and get the same numbers."""

import dataclasses
import platform
import tomllib
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tomli_w

from priory import data, methods
from priory.core.errors import UsageError
from priory.core.reading import JsonDict
from priory.data import Federation
from priory.engine import settings
from priory.engine.rounds import Plan
from priory.engine.settings import Settings
from priory.fed.method import Channel, Method
from priory.models.model import check_trusted, default_spec

PACKAGES = ("priory", "jax", "flax", "optax", "numpy")


def write(
    method: Method, federation: Federation, chosen: Settings, model: Any, channel: Channel | None, plan: Plan
) -> JsonDict:
    """Return the manifest of a run; what only Python can express is named, and must be given again."""
    own = None if methods.is_registered(method) else method
    given = {"method": own, "model": model, "channel": channel}
    return {
        **describe(method, federation, chosen, has_model=model is not None),
        "given": {name: repr(value) for name, value in given.items() if value is not None},
        "environment": {
            "python": platform.python_version(),
            **{name: version_of(name) for name in PACKAGES},
            "backend": jax.default_backend(),
            "devices": plan.hands,
            "client_batch": plan.chunk,
            "data_checksum": federation.checksum,
        },
    }


def describe(method: Method, federation: Federation, chosen: Settings, has_model: bool = False) -> JsonDict:
    """Return the tables of a manifest that decide what is run; a default model is named, since defaults change."""
    if chosen.model is None and chosen.models is None and not has_model:
        chosen = dataclasses.replace(chosen, model=default_spec(federation.input_shape, federation.num_classes or 1))
    return {
        **name_method(method),
        "run": _without_none(dataclasses.asdict(chosen) | {"schedule": list(chosen.schedule)}),
        "data": federation.spec,
    }


def check_method(method: object) -> None:
    """Raise on an object that is not a method."""
    if isinstance(method, type):
        raise UsageError(f"{method.__name__} is a class; give a method with its hyper-parameters, {method.__name__}().")
    if not isinstance(method, Method):
        raise UsageError(f"{method!r} is not a method; give one with its hyper-parameters, such as priory.FedAvg().")


def identity(method: Method, federation: Federation, chosen: Settings) -> JsonDict:
    """Return the tables of a manifest that tell one run from another: `describe` and the checksum of the data."""
    return {**describe(method, federation, chosen), "environment": {"data_checksum": federation.checksum}}


def check_same(asked: JsonDict, there: JsonDict, path: Path, kind: str) -> None:
    """Raise if a directory with the manifest `there` holds another run, or whatever `kind`, than is asked for.

    Args:
        asked: As `describe` gives it, with the checksum of the data under `environment`.
    """
    asked = tomllib.loads(tomli_w.dumps(asked))
    checksum = asked.pop("environment")["data_checksum"]
    if code_of(there, path).get("sha256") != asked.pop("code", {}).get("sha256"):
        raise UsageError(f"{path} holds a {kind} with other code of its method; choose another --out.")
    there = methods.canonical(there)
    for part, table in asked.items():
        one, other = _flat(there.get(part, {})), _flat(table)
        for name in one | other:
            old, new = one.get(name), other.get(name)
            if old != new:
                raise UsageError(
                    f"{path} holds a {kind} with {name}={old} where this one has {name}={new}; choose another --out."
                )
    if there.get("environment", {}).get("data_checksum") != checksum:
        raise UsageError(f"{path} holds a {kind} on other data of the same name; choose another --out.")


def name_method(method: Method) -> JsonDict:
    """Return the table of a method, and that of its code where it is not built in."""
    origin = methods.origin_of(type(method))
    tables = {"method": {"name": methods.name_of(method), **to_table(method)}}
    return tables if origin is None else tables | {"code": origin.table()}


def read_method(table: JsonDict, file: Path, trust_code: bool) -> Method:
    """Return the method that a file names.

    Args:
        table: With the tables of `name_method`.
        file: Where it was read; a path to a method's file is relative to it.
        trust_code: Whether the file may name code that is imported.
    """
    code, own = code_of(table, file), methods.canonical(table).get("method")
    if not isinstance(own, dict):
        raise UsageError(f"{file} has method={own!r} where a table with its name should be; correct it.")
    hyper = dict(own)
    name = str(hyper.pop("name", ""))
    if "method" in code:
        cls = methods.load(code["method"], file, trust_code)
    elif code and name not in methods.names():
        raise UsageError(f"{file} names the method {name!r}, which is not installed here; install its package.")
    else:
        cls = methods.get(name)
    made: Method = from_table(cls, hyper)
    return made


def code_of(table: JsonDict, file: Path) -> JsonDict:
    """Return the table on the code of a method that is not built in; empty for one that is."""
    code = table.get("code", {})
    if not isinstance(code, dict) or not isinstance(code.get("method", ""), str):
        raise UsageError(f"{file} has code={code!r}, which is no table with the name of a method; correct it.")
    return code


def has_changed(method: Method, code: JsonDict) -> bool:
    """Whether a method has another source than a file records in its table `code`."""
    origin = methods.origin_of(type(method))
    return code.get("sha256") != (None if origin is None else origin.table()["sha256"])


def warn_if_changed(method: Method, table: JsonDict, file: Path) -> None:
    """Warn if a method has another source than when a file was written."""
    if has_changed(method, table.get("code", {})):
        name = methods.name_of(method)
        warnings.warn(f"The code of {name} was changed since {file} was written; numbers may differ.", stacklevel=3)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a manifest describes."""

    method: Method
    federation: Federation
    settings: Settings
    given: dict[str, str]
    environment: JsonDict


def read(
    table: JsonDict,
    federation: Federation | None = None,
    method: Method | None = None,
    *,
    file: Path = Path("manifest.toml"),
    has_model: bool = False,
    trust_code: bool = False,
) -> Recipe:
    """Return the method, data and settings of a manifest; a method or data that no name describes are passed in.

    Args:
        file: Where the table was read.
        has_model: Whether a network is passed in, so that the one that is named is not built.
        trust_code: Whether the manifest may name a model or method that is Python code.
    """
    _check_tables(table, "method", "run", "data")
    check_trusted({name: table["run"].get(name) for name in ("model", "models")}, file, trust_code or has_model)
    if method is None:
        if "method" in table.get("given", {}):
            raise UsageError(
                f"The run's method was {table['given']['method']}, which is not registered; pass method= again."
            )
        method = read_method(table, file, trust_code)
        warn_if_changed(method, table, file)
    check_method(method)
    federation = read_data(table, federation)
    return Recipe(method, federation, settings.make(table["run"]), table.get("given", {}), table.get("environment", {}))


def read_data(table: JsonDict, federation: Federation | None = None) -> Federation:
    """Return the data of a manifest, or those that are passed in; their checksum must be the manifest's."""
    _check_tables(table, "data")
    if federation is None:
        federation = data.from_spec(table["data"])
    expected = table.get("environment", {}).get("data_checksum", federation.checksum)
    if federation.checksum != expected:
        raise UsageError(
            f"The data have checksum {federation.checksum[:12]} where the manifest says {str(expected)[:12]}; "
            "give the files that the run was made with."
        )
    return federation


def to_table(struct: Any) -> JsonDict:
    """Return the fields of a (nested) dataclass as TOML values; None is left out."""
    table = {}
    for field in dataclasses.fields(struct):
        value = getattr(struct, field.name)
        table[field.name] = to_table(value) if dataclasses.is_dataclass(value) else _plain(value)
    return _without_none(table)


def from_table(cls: type[Any], table: JsonDict) -> Any:
    """Return the (nested) dataclass of a table; fields that the table leaves out keep their defaults.

    A method may name other values in `legacy_settings`: those that runs had before a setting existed.
    """
    default = cls()
    known = {field.name: getattr(default, field.name) for field in dataclasses.fields(cls)}
    values = dict(getattr(cls, "legacy_settings", {}))
    for name, value in table.items():
        if name not in known:
            raise UsageError(f"{name} is not a field of {cls.__name__}; choose from {', '.join(known)}.")
        nested = dataclasses.is_dataclass(known[name]) and isinstance(value, dict)
        values[name] = from_table(type(known[name]), value) if nested else like(known[name], value, name)
    return cls(**values)


def _check_tables(table: JsonDict, *parts: str) -> None:
    for part in parts:
        if not isinstance(table.get(part), dict):
            raise UsageError(f"The manifest has no [{part}] table; name the manifest.toml that a run wrote.")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value.item() if isinstance(value, (np.generic, np.ndarray, jax.Array)) else value


def like(default: Any, value: Any, name: str) -> Any:
    """Return a TOML value with the type of the default: whole numbers may stand for floats, lists for tuples."""
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if default is not None and not isinstance(value, type(default)):
        raise UsageError(f"{name}={value!r} should be a {type(default).__name__}; correct the manifest.")
    return value


def _flat(table: JsonDict) -> JsonDict:
    """Return the values of nested tables by dotted name."""
    flat: JsonDict = {}
    for name, value in table.items():
        inner = _flat(value) if isinstance(value, dict) else None
        flat |= {name: value} if inner is None else {f"{name}.{key}": one for key, one in inner.items()}
    return flat


def _without_none(table: JsonDict) -> JsonDict:
    return {name: value for name, value in table.items() if value is not None}


@cache  # a deployed federation asks with every message
def version_of(name: str) -> str:
    """Return the version of an installed package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
