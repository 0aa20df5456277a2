"""The entry point: picks the command, and turns what a user can mend into one sentence and exit code 2."""

import difflib
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
        try:
            return _dispatch(arguments)
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


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else USAGE_ERROR
    if arguments[0] in ("-V", "--version"):
        import priory

        print(f"priory {priory.__version__}")
        return 0
    name, *rest = arguments
    return find(name, COMMANDS, "priory")[1](rest)


def find(name: str, commands: "Commands", owner: str) -> tuple[str, Callable[[Sequence[str]], int]]:
    """The command of that name, with a sentence for one that does not exist."""
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(commands)}."
        raise UsageError(f"{name!r} is not a command of {owner}; {hint}")
    return commands[name]


# Each command is imported when it is called, so that `priory --help` answers at once.
def _run(argv: Sequence[str]) -> int:
    from priory.cli import run

    return run.run(argv)


def _compare(argv: Sequence[str]) -> int:
    from priory.cli import compare

    return compare.compare(argv)


def _tune(argv: Sequence[str]) -> int:
    from priory.cli import tuning

    return tuning.tune(argv)


def _resume(argv: Sequence[str]) -> int:
    from priory.cli import run

    return run.resume_command(argv)


def _elbo(argv: Sequence[str]) -> int:
    from priory.cli import elbo

    return elbo.elbo(argv)


def _effects(argv: Sequence[str]) -> int:
    from priory.cli import effects

    return effects.effects(argv)


def _reproduce(argv: Sequence[str]) -> int:
    from priory.cli import reproduce

    return reproduce.reproduce_command(argv)


def _report(argv: Sequence[str]) -> int:
    from priory.cli import report

    return report.report_command(argv)


def _onboard(argv: Sequence[str]) -> int:
    from priory.cli import onboard

    return onboard.onboard(argv)


def _predict(argv: Sequence[str]) -> int:
    from priory.cli import predict

    return predict.predict(argv)


def _export(argv: Sequence[str]) -> int:
    from priory.cli import export

    return export.export(argv)


def _clients(argv: Sequence[str]) -> int:
    from priory.cli import clients

    return clients.clients(argv)


def _audit(argv: Sequence[str]) -> int:
    from priory.cli import audit

    return audit.audit(argv)


def _check(argv: Sequence[str]) -> int:
    from priory.cli import check

    return check.check(argv)


def _flower(argv: Sequence[str]) -> int:
    from priory.cli import flower

    return flower.flower(argv)


def _methods(argv: Sequence[str]) -> int:
    from priory.cli import listings

    return listings.methods(argv)


def _datasets(argv: Sequence[str]) -> int:
    from priory.cli import listings

    return listings.datasets(argv)


Commands = dict[str, tuple[str, Callable[[Sequence[str]], int]]]
COMMANDS: Commands = {
    "run": ("train a method on a federation, or run a manifest again", _run),
    "compare": ("train several methods on the same federation and print one table", _compare),
    "tune": ("choose hyper-parameters on validation splits", _tune),
    "resume": ("go on with a run from its last checkpoint", _resume),
    "report": ("write one HTML file on runs: scores, calibration, clients, uncertainty", _report),
    "reproduce": ("make published tables again, ours beside theirs", _reproduce),
    "elbo": ("bound the evidence of a run from below, where its method can", _elbo),
    "effects": ("print the random effects of a run's clients, where its method has any", _effects),
    "onboard": ("give a client that comes later a model: from its labels, its inputs alone, or nothing", _onboard),
    "predict": ("predict the rows of a file with a client's model, with its doubts", _predict),
    "export": ("write a client's model and draws of its posterior to files", _export),
    "clients": ("list the clients of a run", _clients),
    "audit": ("test a run's claim of differential privacy with canary clients", _audit),
    "check": ("test whether a method's posteriors mean what they say, where the truth is known", _check),
    "flower": ("run a federation on Flower: apps, keys, a whole federation on this machine", _flower),
    "methods": ("list the methods: paper, what stays on the client, what travels", _methods),
    "datasets": ("list the data sets", _datasets),
}


def _usage() -> str:
    lines = [f"  {name:10}{text}" for name, (text, _) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: priory COMMAND ...",
            "",
            "Bayesian personalised federated learning: the federation learns the prior, every client keeps its own",
            "posterior.",
            "",
            *lines,
            "",
            "  priory run fedprox --data digits --partition dirichlet:0.3 --clients 20 --mu 0.1",
            "",
            "`priory COMMAND --help` explains every flag; `priory run METHOD --help` those of a method; "
            "`priory --version` the version.",
            "",
            "Exit codes: 0 success, 1 a claim that was refuted, 2 an error that you can correct, 3 training that",
            "diverged, 130 after Ctrl-C.",
        ]
    )


def _complain(sentence: str) -> int:
    print(f"priory: {printable(' '.join(sentence.split()))}", file=sys.stderr)
    return USAGE_ERROR


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)
