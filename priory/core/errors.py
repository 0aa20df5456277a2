"""The one exception for what a user can correct."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UsageError(ValueError):
    """A value the user chose breaks a rule; the message names the value, the rule and the remedy.

    The command line prints the message as one sentence and exits with code 2.
    """


@contextmanager
def explain_os_errors(problem: str, remedy: str) -> Iterator[None]:
    """Turn an `OSError` of the block into a `UsageError`, whose sentence is "problem (reason)remedy."."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{problem} ({error.strerror}){remedy}.") from None


def untrusted(kind: str, code: str, file: Path | None) -> UsageError:
    """Return the error for a file that names Python code, a `kind` such as model, which the user did not trust."""
    return UsageError(
        f"{file} names the {kind} {code!r}, and reading it would import and run that Python code; if you trust whoever "
        "wrote the file, add --trust-code (trust_code=True in Python)."
    )
