"""Files as older versions wrote them, without checksums: what a test changes by hand is not refused for that alone."""

import json
from pathlib import Path
from typing import Any

from priory.core.sealed import KEY, SEAL
from priory.store import METRICS_BYTES, METRICS_SHA256


def without_checksums(directory: Path) -> Path:
    """Take the checksums out of the manifest and of all JSON files of a directory; return it."""
    for path in directory.rglob("*.json"):
        table = json.loads(path.read_text())
        table.pop(KEY, None)
        table.pop(METRICS_SHA256, None)
        if path.name == "summary.json":
            table.pop(METRICS_BYTES, None)
        path.write_text(json.dumps(table))
    for path in directory.rglob("manifest.toml"):
        path.write_bytes(SEAL.sub(b"", path.read_bytes()))
    return directory


def edit_json(path: Path, **changed: Any) -> None:
    """Change values of a table."""
    table = json.loads(path.read_text()) | changed
    table.pop(KEY, None)
    path.write_text(json.dumps(table))


def edit_manifest(path: Path, old: str, new: str) -> None:
    """Change the text of a manifest."""
    text = SEAL.sub(b"", path.read_bytes()).decode()
    assert old in text
    path.write_text(text.replace(old, new))
