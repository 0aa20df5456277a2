"""Bayesian personalised federated learning: the federation learns the prior, every client keeps its posterior."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from priory._names import *  # noqa: F403

__version__ = "0.1.0"

if not TYPE_CHECKING:  # a type checker knows the names, and is to complain of others

    def __getattr__(name: str) -> Any:
        """A module of the package, or a public name. They bring JAX, which `priory --help` need not wait for."""
        import importlib
        import importlib.util

        public = name == "__all__" or not name.startswith("_")
        if public and importlib.util.find_spec(f"priory.{name}"):
            return importlib.import_module(f"priory.{name}")
        names = vars(importlib.import_module("priory._names")) if public else {}
        if name == "__all__":
            return sorted(known for known in names if not known.startswith("_"))
        if name in names:
            return globals().setdefault(name, names[name])
        if public and name in (methods := importlib.import_module("priory.methods")).OLD_CLASSES:
            return methods.old_class(name)
        raise AttributeError(f"module 'priory' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
