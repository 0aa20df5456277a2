"""A Flower app that a user can read and change, written to a directory.

DIR/pyproject.toml              the app's components, and what `flwr run --run-config` may override
DIR/PACKAGE/server.py           two lines around the method
DIR/PACKAGE/client.py           the same for a node
DIR/PACKAGE/rows.py             where a node's rows come from: the function to change
DIR/PACKAGE/manifest.toml       method and settings
DIR/PACKAGE/problem.json        the form of the data
DIR/PACKAGE/method.py           the method, if it is from a file
"""

import importlib.util
import json
import keyword
import pprint
import re
from importlib import resources
from pathlib import Path
from typing import Any

from priory.core.errors import UsageError
from priory.core.files import write_atomically
from priory.deploy.charter import MANIFEST, Charter
from priory.engine.manifest import version_of

LONGEST = 32  # characters of an app's name; Flower bundles none with more
CODE = (".py", ".toml")  # Flower puts no other file that could run into an app's bundle
FILES = {
    "server.py": "{}/server.py",
    "client.py": "{}/client.py",
    "rows.py": "{}/rows.py",
    "pyproject.toml": "pyproject.toml",
}


def write_app(
    directory: Path, charter: Charter, spec: dict[str, Any], out: str | None = None, authenticated: bool = False
) -> Path:
    """The package directory of a new app.

    Args:
        spec: Of the federation whose data have the charter's form, for simulated nodes.
        out: The server's directory; by default a directory in the server's home.
        authenticated: Whether nodes will prove who they are.
    """
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UsageError(f"{directory} exists and is not empty, and no app is overwritten; choose another directory.")
    name = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-")[:LONGEST].strip("-") or "federation"
    if not name[0].isalpha() or _is_taken(name.replace("-", "_")):
        name = f"app-{name}"[:LONGEST].strip("-")
    package = name.replace("-", "_")
    words = {
        "NAME": name,
        "PACKAGE": package,
        "PUBLISHER": "local",
        "METHOD": charter.name,
        "VERSION": version_of("priory"),
        "ROUNDS": str(charter.settings.rounds),
        "SEED": str(charter.settings.seed),
        "OUT": json.dumps(out or f"~/priory-runs/{name}", ensure_ascii=False)[1:-1],  # a TOML string has JSON's escapes
        "AUTHENTICATED": str(authenticated).lower(),
        "SPEC": pprint.pformat(spec, width=110, sort_dicts=False),
    }
    try:
        (directory / package).mkdir(parents=True, exist_ok=True)
        for source, target in FILES.items():
            write_atomically(directory / target.format(package), _filled(f"{source}.in", words))
        write_atomically(directory / package / "__init__.py", f'"""{charter.name} on Flower."""\n')
        charter.save(directory / package)
    except OSError as error:
        raise UsageError(f"{directory} cannot be written ({error.strerror}); choose a directory that can.") from None
    return directory / package


def changed_files(directory: Path, fresh: Path) -> list[str]:
    """Return the files by which the code of an app differs from that of a fresh one."""
    found = {
        place: {path.relative_to(place) for path in place.rglob("*.*") if path.suffix in CODE}
        for place in (directory, fresh)
    }
    names = found[directory] | found[fresh]
    same = {
        name
        for name in found[directory] & found[fresh]
        if name.name == MANIFEST or (directory / name).read_bytes() == (fresh / name).read_bytes()
    }
    return sorted(map(str, names - same))


def package_of(directory: Path) -> Path:
    """The package directory of an app that `write_app` wrote."""
    found = sorted(path.parent for path in directory.glob("*/manifest.toml"))
    if not (directory / "pyproject.toml").is_file() or len(found) != 1:
        raise UsageError(f"{directory} does not contain a Priory app; make one with `priory flower init {directory}`.")
    return found[0]


def _is_taken(package: str) -> bool:
    """Whether a package of that name could not be imported, or would hide one that is installed."""
    found = None if keyword.iskeyword(package) else importlib.util.find_spec(package)
    return keyword.iskeyword(package) or (found is not None and found.origin is not None)  # else a mere directory


def _filled(name: str, words: dict[str, str]) -> str:
    """A template with the words in place."""
    text = (resources.files("priory.deploy") / "template" / name).read_text()
    return re.sub(r"@([A-Z]+)@", lambda match: words[match[1]], text)
