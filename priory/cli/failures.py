"""Several runs of which one fails: the others go on, and the failure is reported at the end."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from priory.core.errors import UsageError
from priory.core.text import one_line
from priory.engine.grid import named


class Failures:
    """The runs that failed.

    Attributes:
        sentences: What went wrong, by the name of the run.
    """

    def __init__(self) -> None:
        self.sentences: dict[str, str] = {}

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Note an exception of the block under a name and swallow it; a traceback is printed unless it is a user error.

        Ctrl-C passes.
        """
        try:
            yield
        except Exception as error:
            self.sentences[name] = _sentence(error)
            if not isinstance(error, UsageError | OSError):
                traceback.print_exception(error)
            sentence = one_line(named(name, self.sentences[name]).rstrip("."))
            print(f"{sentence}; the others go on", file=sys.stderr)

    def conclude(self, whole: str) -> None:
        """Raise one error with all of them, if there are any; `whole` is of what, such as "of 3 methods"."""
        if self.sentences:
            told = "; ".join(named(name, sentence).rstrip(".") for name, sentence in self.sentences.items())
            raise UsageError(f"{len(self.sentences)} {whole} failed: {told}.")


def _sentence(error: Exception) -> str:
    if isinstance(error, UsageError):
        return str(error)
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__
