"""The lines of the metrics of a run, parsed when they are asked for."""

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, overload

from priory.store import RunDirectory

Line = dict[str, Any]


class History(Sequence[Line]):
    """One line per evaluation, as in metrics.jsonl; it compares like a list.

    A parsed line takes 5 kB. While a run with a directory goes on, the file alone has its lines, and memory does not
    grow with their number. Without a directory, and once `keep` was called, each line is kept as compressed text, about
    a tenth of that. Lines are parsed when they are asked for, and stay parsed until another is added.

    Args:
        lines: The lines so far, kept in memory.
        directory: Where the lines are, instead.
        length: Bytes of the metrics there that belong to this run; all of them by default.
    """

    def __init__(
        self, lines: Iterable[Line] = (), directory: RunDirectory | None = None, length: int | None = None
    ) -> None:
        self._directory, self._length = directory, length
        self._packed = list(map(_packed, lines))
        self._parsed: list[Line] | None = None

    def append(self, line: Line, length: int) -> None:
        """Add a line; `length` are the bytes of the metrics with it, where a directory has it already."""
        self._parsed = None
        if self._directory is None:
            self._packed.append(_packed(line))
        else:
            self._length = length

    def keep(self) -> None:
        """Keep the lines in memory, so that they can be read when their directory is gone."""
        if self._directory is not None:
            self._packed = list(map(_packed, self._lines()))
            self._directory = self._parsed = None

    @overload
    def __getitem__(self, index: int) -> Line: ...

    @overload
    def __getitem__(self, index: slice) -> list[Line]: ...

    def __getitem__(self, index: int | slice) -> Line | list[Line]:
        return self._lines()[index]

    def __len__(self) -> int:
        return len(self._lines())

    def __eq__(self, other: object) -> bool:
        return self._lines() == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._lines())

    def _lines(self) -> list[Line]:
        if self._parsed is None and self._directory is not None:
            self._parsed = self._directory.metrics(self._length)
        elif self._parsed is None:
            self._parsed = [json.loads(zlib.decompress(packed)) for packed in self._packed]
        return self._parsed


def _packed(line: Line) -> bytes:
    return zlib.compress(json.dumps(line).encode())
