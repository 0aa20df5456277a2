"""Files that carry their own checksum, so that a damaged one is refused instead of read.

JSON  the last key, `sha256`, is the SHA-256 of all other keys as canonical JSON: sorted, compact, ASCII, NaN as Python
      writes it
TOML  the last line is a comment with the SHA-256 of the bytes above it

Files of older versions carry none and are read as they are.
"""

import hashlib
import json
import re
from typing import Any

from priory.core.reading import JsonDict, parse_json

KEY = "sha256"
COMMENT = "# sha256 of the lines above: "
SEAL = re.compile(rb"^" + COMMENT.encode() + rb"([^\n]*)\n?", re.MULTILINE)


class SealError(ValueError):
    """A checksum does not match."""


def sealed(table: JsonDict, indent: int | None = None) -> str:
    """Return a table as JSON text with its checksum."""
    key = KEY
    while key in table:  # a client may have that name
        key += "_"
    # Numbers and keys as a reader will have them: a key that is a number becomes text, and sorts as text.
    return json.dumps({**table, key: _digest(json.loads(json.dumps(table)))}, indent=indent) + "\n"


def unsealed(text: str | bytes) -> Any:
    """Return what JSON text holds, without its checksum; raise ValueError if it is no JSON, SealError if it differs."""
    table = parse_json(text)
    if not isinstance(table, dict):
        return table
    seal = next((key for key in reversed(table) if key.rstrip("_") == KEY and isinstance(table[key], str)), None)
    if seal is not None:
        claimed = table.pop(seal)
        if claimed != _digest(table):
            raise SealError("does not match its checksum")
    elif table and _is_damaged_seal(table):
        raise SealError("has a damaged checksum")
    return table


def sealed_lines(text: str) -> str:
    """Return TOML text with a last line that holds its checksum."""
    return f"{text}{COMMENT}{hashlib.sha256(text.encode()).hexdigest()}\n"


def is_as_written(raw: bytes) -> bool:
    """Return whether TOML text matches the checksum in its last line; true where there is no such line."""
    seal = SEAL.search(raw)
    if seal is None:
        return True
    claimed = hashlib.sha256(raw[: seal.start()]).hexdigest().encode()
    return seal[1].strip() == claimed and not raw[seal.end() :].strip()


def _is_damaged_seal(table: JsonDict) -> bool:
    """Return whether the last key is a checksum by its value, so that only its name was damaged."""
    *others, last = table
    value = table[last]
    return isinstance(value, str) and len(value) == 64 and value == _digest({name: table[name] for name in others})


def _digest(table: JsonDict) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
