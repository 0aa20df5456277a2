"""Methods from outside the package: entry points of the group `priory.methods`, `module:Class` and `file.py:Class`.

A file becomes a module named after the hash of its contents. So the same contents give the same class, wherever the
file is, and a copy of a file that has been run already runs nothing new.
"""

import dataclasses
import hashlib
import importlib
import re
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from priory.core.errors import UsageError, untrusted
from priory.core.reading import read_bytes
from priory.fed.method import Method
from priory.methods import _builtin

GROUP = "priory.methods"
CODE = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")


@dataclass(frozen=True)
class Origin:
    """Where the class of a method was found.

    Attributes:
        name: Name of the entry point, or of the class in small letters.
        code: `module:Class` or `/path/file.py:Class`; None for an entry point.
        source: Contents of the file that was named, or that defines the class.
    """

    name: str
    code: str | None
    source: bytes

    @property
    def is_file(self) -> bool:
        """Whether the method was named by a file, and not by an installed module."""
        return self.code is not None and self.code.rpartition(":")[0].endswith(".py")

    def table(self, copy: str | None = None) -> dict[str, str]:
        """Return what finds the class again, and the hash of its source.

        Args:
            copy: The name of a copy to give instead of the path of a file.
        """
        code = self.code
        if copy is not None and self.is_file:
            code = f"{copy}:{str(code).rpartition(':')[2]}"
        return ({} if code is None else {"method": code}) | {"sha256": hashlib.sha256(self.source).hexdigest()}


_ORIGINS: dict[type[Method], Origin] = {}


def origin_of(cls: type[Method]) -> Origin | None:
    """Return where a class was found; None if it is built in, or no name leads to it."""
    if cls in vars(_builtin).values():
        return None
    if cls not in _ORIGINS:
        value = f"{cls.__module__}:{cls.__qualname__}"
        for found in entry_points(group=GROUP):
            if found.value == value:
                _ORIGINS[cls] = Origin(found.name, None, _source(cls))
    return _ORIGINS.get(cls)


def is_code(name: str) -> bool:
    """Whether a name is `package.module:Class` or `path/file.py:Class`.

    >>> is_code("fedavg"), is_code("mine:FedAvgM"), is_code("./mine.py:FedAvgM"), is_code("fedprox:mu=1")
    (False, True, True, False)
    """
    return CODE.fullmatch(name) is not None


def load(code: str, file: Path | None = None, trust_code: bool = False) -> type[Method]:
    """Import a class that is named by its code.

    Args:
        code: `package.module:Class` or `path/file.py:Class`.
        file: The file that names it, to which a path is relative; None if the user named it, who needs no trust.
        trust_code: Whether the user trusts the file.
    """
    place, _, attribute = code.rpartition(":")
    if not is_code(code):
        raise UsageError(f"method={code!r} names no class; write path/file.py:Class or package.module:Class.")
    is_trusted = file is None or trust_code
    try:
        if place.endswith(".py"):
            path = ((file or Path("file")).parent / place).absolute()
            if not path.is_file():
                raise UsageError(f"method={code!r} names a file that does not exist, {path}; check the path.")
            source = read_bytes(path)
            known = f"priory_method_{hashlib.sha256(source).hexdigest()[:16]}"
            if known not in sys.modules and not is_trusted:
                raise untrusted("method", code, file)
            cls = _class_in(_executed(known, path, source), attribute, place)
            code = f"{path}:{attribute}"
        elif is_trusted:
            cls = _class_in(importlib.import_module(place), attribute, place)
            source = _source(cls)
        else:
            raise untrusted("method", code, file)
    except UsageError:
        raise
    except SyntaxError as error:
        raise UsageError(
            f"method={code!r} has a syntax error in line {error.lineno} of {error.filename}: {error.msg}; correct it."
        ) from error
    except (Exception, SystemExit) as error:  # whatever foreign code raises
        raise UsageError(
            f"method={code!r} cannot be imported ({type(error).__name__}: {error}); name a class of an installed "
            "package, or of a file that imports installed packages only."
        ) from error
    made = _checked(cls, f"method={code!r}")
    if file is None or made not in _ORIGINS:  # a name that the user typed is the one to write down
        _ORIGINS[made] = Origin(made.__name__.lower(), code, source)
    return made


def load_entry_point(found: EntryPoint) -> type[Method]:
    """Import the class of an entry point."""
    named = f"method={found.name!r} of the package {owner_of(found)}"
    try:
        cls = found.load()
    except Exception as error:  # whatever the code of somebody else raises
        raise UsageError(
            f"{named} cannot be imported from {found.value} ({type(error).__name__}: {error}); install a version that "
            "fits, or uninstall it."
        ) from error
    made = _checked(cls, named)
    _ORIGINS[made] = Origin(found.name, None, _source(made))
    return made


def owner_of(found: EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return "unknown" if found.dist is None else found.dist.name


def _executed(name: str, path: Path, source: bytes) -> ModuleType:
    """Return the module of that name, which is made from the source if it does not exist yet."""
    if name not in sys.modules:
        module = ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module  # dataclasses and type hints look it up
        try:
            exec(compile(source, str(path), "exec"), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _class_in(module: ModuleType, name: str, place: str) -> Any:
    """Return what has the name in a module."""
    if not hasattr(module, name):
        own = [
            known
            for known, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__
        ]
        hint = f"choose from {', '.join(own)}" if own else "it has no methods"
        raise UsageError(f"method='{place}:{name}' is not in {place}; {hint}.")
    return getattr(module, name)


def _source(cls: Any) -> bytes:
    """Return the contents of the file that defines a class, b"" where there is none."""
    file = getattr(sys.modules.get(getattr(cls, "__module__", "")), "__file__", None)
    return Path(file).read_bytes() if file and Path(file).is_file() else b""


def _checked(cls: Any, named: str) -> type[Method]:
    """Return the class if it is a method that Priory can run with its defaults."""
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise UsageError(f"{named} is {cls!r}; name a class that derives from priory.fed.method.Method.")
    try:
        made = cls()
    except Exception as error:  # whatever the code of somebody else raises
        raise UsageError(
            f"{named} cannot be made with its defaults ({error}); write all abstract verbs, and give every setting a "
            "default."
        ) from error
    if hasattr(made, "name"):
        raise UsageError(f"{named} has a setting called name, which in files is the name of the method; rename it.")
    if jax.tree_util.all_leaves([made]):
        raise UsageError(f"{named} is not known to JAX; decorate the class with @struct of priory.core.struct.")
    for field in dataclasses.fields(cls):
        value = getattr(made, field.name)
        if callable(getattr(Method, field.name, None)):
            raise UsageError(f"{named} has a setting called {field.name}, which is the name of a verb; rename it.")
        if not field.metadata.get("static") and isinstance(value, str | bool):
            raise UsageError(
                f"{named} has the setting {field.name}={value!r}, which is not a number; declare it "
                f"as static(default={value!r})."
            )
    return cls
