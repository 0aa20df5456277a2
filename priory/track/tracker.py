"""A listener that passes the metrics of a run to one tool."""

import importlib
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from priory.core.errors import UsageError
from priory.core.reading import JsonDict
from priory.store import TRACKED, RunDirectory
from priory.track.tools import FAILED, FINISHED, STOPPED, TOOLS, Numbers, Tool

PLAIN = re.compile(r"[^\w.\- :]")  # what MLflow refuses in a name


class Hears(Protocol):
    """A listener to the progress of a run, like `engine.Listener`."""

    def advanced(self, completed: int, rounds: int, info: dict[str, float]) -> None:
        """Note that a block of rounds ended."""

    def evaluated(self, line: JsonDict) -> None:
        """Note that a line was added to the metrics."""


def check(name: str | None) -> None:
    """Raise if the tool of that name does not exist or is not installed; None is no tool, and fine."""
    if name is None:
        return
    if name not in TOOLS:
        raise UsageError(f"track={name!r} is no tool that metrics can be sent to; choose from {', '.join(TOOLS)}.")
    with _opening(name, "run it again"):
        importlib.import_module(name)


class Tracker:
    """A listener for one tool; raises at once, before anything is run, if the tool is missing or out of reach.

    Args:
        name: tensorboard, mlflow or wandb.
        path: The run directory; without one there is nothing to resume, and TensorBoard has no place for its files.
    """

    def __init__(self, name: str, path: Path | str | None) -> None:
        check(name)
        self._name, self._directory = name, None if path is None else RunDirectory(path)
        with _opening(name, "run it again"):
            self._tool: Tool = TOOLS[name](self._directory)
        self._listener: Hears | None = None
        self._rounds: set[int] = set()
        self._last: set[str] = set()  # names of what the last line told
        self._outcome, self._is_lost = STOPPED, False

    @contextmanager
    def following(
        self, title: str, settings: JsonDict, history: Iterable[JsonDict], listener: Hears | None = None
    ) -> Iterator["Tracker"]:
        """Send the settings and the lines so far, and yield the tracker as a listener.

        Args:
            listener: Told first, of everything.
        """
        known = (self._directory.read(TRACKED) if self._directory else None) or {}
        with _opening(self._name, self._remedy(known)):
            name, self._rounds = self._tool.start(title, _named(settings), known.get(self._name))
        self._listener = listener
        try:
            if self._directory is not None and known.get(self._name) != name:
                self._safely(self._directory.write, TRACKED, {**known, self._name: name})
            for line in history:
                self._send(line)
            yield self
        except Exception:  # Ctrl-C is none
            self._outcome = FAILED
            raise
        finally:
            self._safely(self._tool.close, self._outcome)

    def advanced(self, completed: int, rounds: int, info: dict[str, float]) -> None:
        """Send nothing between evaluations: when blocks of rounds end depends on the machine."""
        if self._listener is not None:
            self._listener.advanced(completed, rounds, info)

    def evaluated(self, line: JsonDict) -> None:
        """Send a line of the metrics."""
        if self._listener is not None:
            self._listener.evaluated(line)
        self._send(line)

    def finished(self, summary: JsonDict) -> None:
        """Send what the summary has besides the last line."""
        extra = {name: value for name, value in summary["extra"].items() if name != "clusters"}  # a name, no amount
        values = numbers({**summary, "extra": _counted(extra)})
        rest = {name: value for name, value in values.items() if name not in self._last}
        self._safely(self._tool.end, int(summary["rounds"]), rest)
        self._outcome = FINISHED

    def _send(self, line: JsonDict) -> None:
        step = int(line["round"])
        values = numbers(_counted(line))
        self._last = set(values)
        if step not in self._rounds:
            self._safely(self._tool.send, step, values)
            self._rounds.add(step)

    def _remedy(self, known: dict[str, str]) -> str:
        if self._directory is None or self._name not in known:
            return "resume the run"
        file = self._directory.path / TRACKED
        return f"resume the run, delete {file} to have it sent as a new one"

    def _safely(self, tell: Any, *arguments: Any) -> None:
        """Call a tool that may fail without harm to the training: the files have everything, and can be sent later."""
        if self._is_lost:
            return
        try:
            tell(*arguments)
        except Exception as error:
            self._is_lost = True
            later = "the run goes on without it"
            if self._directory is not None:
                later = f"`priory resume {self._directory.path} --track {self._name}` sends what is missing"
            warnings.warn(f"{self._name} takes no more metrics ({_why(error)}); {later}.", stacklevel=2)


def numbers(table: JsonDict) -> Numbers:
    """Return the finite numbers of nested tables, named by their path, without curves, text and unknown values."""
    return {name: float(value) for name, value in _leaves(table) if _is_number(value) and name != "round"}


@contextmanager
def _opening(name: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except ImportError as error:
        raise UsageError(
            f"track={name!r} needs {error.name or name}, which is not installed; "
            f"`pip install 'priory[{name}]'`, or leave track out."
        ) from None
    except Exception as error:
        raise UsageError(
            f"track={name!r} cannot be opened ({_why(error)}); mend that and {remedy}, or leave track out."
        ) from None


def _named(settings: JsonDict) -> JsonDict:
    """Return settings by their path; other values than numbers, switches and text are written as text."""
    return {name: value if isinstance(value, bool | int | float) else str(value) for name, value in _leaves(settings)}


def _leaves(table: JsonDict, under: str = "") -> Iterator[tuple[str, Any]]:
    taken: set[str] = set()
    for key, value in table.items():
        name = under + (PLAIN.sub("_", key).strip(".") or "_")  # clients bear names of their own
        while name in taken:
            name += "_"
        taken.add(name)
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}/")
        else:
            yield name, value


def _counted(table: JsonDict) -> JsonDict:
    """Return the table with the number of updates that were left out in place of the names of clients."""
    return {**table, "rejected": sum(table.get("rejected", {}).values())}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _why(error: Exception) -> str:
    """Return the message of an error, in one line without a full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(". ")
