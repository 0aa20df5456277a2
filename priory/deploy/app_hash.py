"""The SHA-256 of an app, on which an operator and a site can agree: it is printed here and logged on every node.

It is the SHA-256 of one line for each file, as `sha256sum` prints it, sorted by path:

    HASH  PATH

Flower gives a ClientApp no hash of its bundle, and unpacks a bundle only if no app is there whose hash begins with the
same eight digits. So a node hashes the files that are installed, which are those that run. An app that was written is
hashed as Flower bundles it: Flower writes pyproject.toml again and leaves files out.
"""

import hashlib
import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

from priory.core.errors import UsageError

LEFT_OUT = ("__pycache__", "uv.lock")  # what Python and Flower write into an installed app
MANIFEST = ".info/"  # in a bundle only: the list of its files


def hash_of_files(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of files by their paths."""
    lines = [f"{hashlib.sha256(files[path]).hexdigest()}  {path}\n" for path in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def installed_hash(app: Path) -> str:
    """Return the SHA-256 of an app that Flower installed; raise OSError if a file cannot be read."""
    files: dict[str, bytes] = {}
    for place, directories, names in os.walk(app, onerror=_raise):
        directories[:] = [name for name in directories if name not in LEFT_OUT]
        paths = [Path(place, name) for name in names if name not in LEFT_OUT]
        files |= {path.relative_to(app).as_posix(): path.read_bytes() for path in paths}
    return hash_of_files(files)


def written_hash(app: Path) -> str:
    """Return the SHA-256 that the app in a directory will have on every node, as `flwr run` bundles it now."""
    try:
        from flwr.cli.build import build_fab_from_disk
    except ImportError:
        raise UsageError(
            f"The SHA-256 of {app} needs Flower, which is not installed; pip install 'priory[flower]' brings it."
        ) from None
    try:
        bundle = build_fab_from_disk(app)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise UsageError(f"{app} cannot be bundled by Flower ({why}); correct the app.") from None
    with zipfile.ZipFile(io.BytesIO(bundle)) as files:
        return hash_of_files({name: files.read(name) for name in files.namelist() if not name.startswith(MANIFEST)})


def _raise(error: OSError) -> None:
    raise error
