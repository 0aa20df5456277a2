"""Methods by name.

    fedavg                 a method of Priory (`_builtin.py`), or of an installed package that declares it as an entry
                           point of the group `priory.methods`
    package.module:Class   a class of an installed package
    path/file.py:Class     a class of a file

A name of the first form is safe to take from a file, since it can only choose among installed methods. The other two
run code, so only `make`, for what a user types, and `load`, which asks for trust, import them.
"""

import dataclasses
import difflib
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

from priory.core.errors import UsageError
from priory.core.reading import JsonDict
from priory.fed.method import Method
from priory.methods import _builtin
from priory.methods._plugins import GROUP, load_entry_point, owner_of
from priory.methods._plugins import is_code as is_code
from priory.methods._plugins import load as load
from priory.methods._plugins import origin_of as origin_of

REGISTRY: dict[str, type[Method]] = {
    cls.__module__.rpartition(".")[2].replace("_", "-"): cls for cls in vars(_builtin).values() if isinstance(cls, type)
}


# Names of the last release: the present name, and the settings that the old one stands for.
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedadam": ("fedopt", {"server_optimiser": "adam"}),
    "fedyogi": ("fedopt", {"server_optimiser": "yogi"}),
    "preset": ("random-groups", {"predict_with": "group"}),
    "ensemble": ("random-groups", {"predict_with": "all"}),
}
OLD_CLASSES = {"FedAdam": "fedadam", "FedYogi": "fedyogi", "Preset": "preset", "Ensemble": "ensemble"}


def names() -> list[str]:
    """Return the names of all installed methods, those of Priory first; nothing is imported."""
    return list(dict.fromkeys([*REGISTRY, *sorted(entry_points(group=GROUP).names)]))


def installed() -> Iterator[tuple[str, type[Method] | UsageError]]:
    """Yield all installed methods by name; the error in place of a class that cannot be used."""
    for name in names():
        try:
            yield name, get(name)
        except UsageError as error:
            yield name, error


def get(name: str) -> type[Method]:
    """Return the installed method class of a name."""
    declared = list(entry_points(group=GROUP, name=name))
    owners = ["Priory"] * (name in REGISTRY) + [owner_of(found) for found in declared]
    if len(owners) > 1:
        own = [f"{REGISTRY[name].__module__}:{REGISTRY[name].__name__}"] if name in REGISTRY else []
        classes = own + [found.value for found in declared]
        raise UsageError(
            f"method={name!r} is registered by {' and '.join(owners)}; give the class that you mean, "
            f"{' or '.join(classes)}, or uninstall {owners[-1]}."
        )
    if declared:
        return load_entry_point(declared[0])
    if name in REGISTRY:
        return REGISTRY[name]
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(names())}."
    if name.endswith(".py"):
        hint = f"name its class too, as in {name}:MyMethod."
    elif set(name) & set("/:"):
        hint = "write path/file.py:Class or package.module:Class for a class of your own."
    raise UsageError(f"method={name!r} is not registered; {hint}")


def make(name: str) -> Method:
    """Return the method that a user names, with its default settings; code that the name leads to is imported.

    A name of the last release works, with a warning.
    """
    if name in ALIASES and not entry_points(group=GROUP, name=name):
        return _from_old_name(name, name, stacklevel=3)()
    return load(name)() if is_code(name) else get(name)()


def old_class(name: str) -> Callable[..., Method]:
    """Return what stands for a class of the last release, with a warning."""
    return _from_old_name(name, OLD_CLASSES[name], stacklevel=4)


def canonical(table: JsonDict) -> JsonDict:
    """Return the tables of a file, with the present name of its method in place of one of the last release.

    Files of that release name no code. A method from outside the package keeps its name, whatever it is.
    """
    own = table.get("method")
    if not isinstance(own, dict) or table.get("code") or "method" in table.get("given", {}):
        return table
    now, settings = ALIASES.get(str(own.get("name", "")), (None, {}))
    return {**table, "method": {**own, "name": now, **settings}} if now else table


def first_table(method: JsonDict) -> JsonDict:
    """Return the name and settings by which digests of deployed federations know a built-in method."""
    for old, (now, settings) in ALIASES.items():
        if method["name"] == now and settings.items() <= method.items():
            return {"name": old} | {name: method[name] for name in method if name not in ("name", *settings)}
    return method


def is_registered(method: Method) -> bool:
    """Return whether a file can name the class of a method, so that it is found again."""
    return type(method) in REGISTRY.values() or origin_of(type(method)) is not None


def name_of(method: Method) -> str:
    """Return the registered name of a method, or its class name in small letters for one without."""
    cls = type(method)
    for name, known in REGISTRY.items():
        if known is cls:
            return name
    origin = origin_of(cls)
    return cls.__name__.lower() if origin is None else origin.name


def _from_old_name(typed: str, alias: str, stacklevel: int) -> Callable[..., Method]:
    """Return what makes the method of an old name, after a warning to the caller so many frames above."""
    now, settings = ALIASES[alias]
    cls = get(now)
    others = [field.name for field in dataclasses.fields(cls) if field.name not in settings]
    text = ", ".join(f"{field}={value!r}" for field, value in settings.items())
    sentence = f"{typed} is now {now}, in Python {cls.__name__}({text}); the old name will go in the next release."
    warnings.warn(sentence, DeprecationWarning, stacklevel=stacklevel)
    return lambda *values, **fields: cls(**settings, **dict(zip(others, values, strict=False)), **fields)
