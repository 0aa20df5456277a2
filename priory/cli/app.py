"""The entry point: picks the command, and turns what a user can mend into one sentence and exit code 2."""

import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from priory.core.errors import UsageError
from priory.core.text import printable

USAGE_ERROR = 2
DIVERGED = 3
INTERRUPTED = 130
NO_MEMORY = "not enough memory; choose a smaller model, batch, cohort or --client-batch. What was committed is intact."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code, as `priory --help` lists them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        warnings.filterwarnings("default", ".* the old name will go in the next release", DeprecationWarning)
        try:
            if arguments[:1] in (["-V"], ["--version"]):
                import priory

                print(f"priory {priory.__version__}")
                return 0
            return dispatch(arguments, COMMANDS, "priory", ABOUT, NOTES)
        except UsageError as error:
            return _complain(str(error))
        except BrokenPipeError:  # `priory methods | head`: nobody reads on, which is no fault
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except OSError as error:
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
            return _complain(f"{what}; nothing written before is damaged, so mend this and go on with `priory resume`.")
        except MemoryError:
            return _complain(NO_MEMORY)
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):  # as XLA calls it
                raise
            return _complain(NO_MEMORY)
        except SystemExit as leaving:  # tyro has shown its panel, or its help
            return leaving.code if isinstance(leaving.code, int) else USAGE_ERROR
        except KeyboardInterrupt:
            print("aborted; what was committed is intact", file=sys.stderr)
            return INTERRUPTED


Command = Callable[[Sequence[str]], int]
Commands = dict[str, tuple[str, Command]]


def dispatch(argv: Sequence[str], commands: Commands, owner: str, about: str, notes: str) -> int:
    """Call the command that the first word names, and return its exit code.

    Args:
        owner: What is typed before the command.
        about: Text of the help above the commands.
        notes: Text of the help below them.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        lines = [f"  {name:10}{text}" for name, (text, _) in commands.items()]
        print(f"usage: {owner} COMMAND ...", "", about, "", *lines, "", notes, sep="\n")
        return 0 if argv else USAGE_ERROR
    name, *rest = argv
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(commands)}."
        raise UsageError(f"{name!r} is not a command of {owner}; {hint}")
    return commands[name][1](rest)


def imported(place: str) -> Command:
    """Return the command "module:function", imported when it is called, so that `priory --help` answers at once."""

    def call(argv: Sequence[str]) -> int:
        module, _, function = place.partition(":")
        return int(getattr(importlib.import_module(f"priory.cli.{module}"), function)(argv))

    return call


COMMANDS: Commands = {
    "run": ("train a method on a federation, or run a manifest again", imported("run:run")),
    "compare": ("train several methods on the same federation and print one table", imported("compare:compare")),
    "tune": ("choose hyper-parameters on validation splits", imported("tuning:tune")),
    "resume": ("go on with a run from its last checkpoint", imported("run:resume_command")),
    "report": (
        "write one HTML file on runs: scores, calibration, clients, uncertainty",
        imported("report:report_command"),
    ),
    "reproduce": ("make published tables again, ours beside theirs", imported("reproduce:reproduce_command")),
    "elbo": ("bound the evidence of a run from below, where its method can", imported("elbo:elbo")),
    "effects": ("print the random effects of a run's clients, where its method has any", imported("effects:effects")),
    "onboard": (
        "give a client that comes later a model: from its labels, its inputs alone, or nothing",
        imported("onboard:onboard"),
    ),
    "predict": ("predict the rows of a file with a client's model, with its doubts", imported("predict:predict")),
    "export": ("write a client's model and draws of its posterior to files", imported("export:export")),
    "clients": ("list the clients of a run", imported("clients:clients")),
    "audit": ("test a run's claim of differential privacy with canary clients", imported("audit:audit")),
    "check": (
        "test whether a method's posteriors mean what they say, where the truth is known",
        imported("check:check"),
    ),
    "flower": ("run a federation on Flower: apps, keys, a whole federation on this machine", imported("flower:flower")),
    "methods": ("list the methods: paper, what stays on the client, what travels", imported("listings:methods")),
    "datasets": ("list the data sets", imported("listings:datasets")),
}
ABOUT = """\
Bayesian personalised federated learning: the federation learns the prior, every client keeps its own
posterior."""
NOTES = """\
  priory run fedprox --data digits --partition dirichlet:0.3 --clients 20 --mu 0.1

`priory COMMAND --help` explains every flag; `priory run METHOD --help` those of a method; \
`priory --version` the version.

Exit codes: 0 success, 1 a claim that was refuted, 2 an error that you can correct, 3 training that
diverged, 130 after Ctrl-C."""


def _complain(sentence: str) -> int:
    print(f"priory: {printable(' '.join(sentence.split()))}", file=sys.stderr)
    return USAGE_ERROR


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)
