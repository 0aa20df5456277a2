"""`priory flower`: a federation on a real network, its app, its keys, its state."""

from collections.abc import Sequence

from priory.cli.app import Commands, find


def flower(argv: Sequence[str]) -> int:
    """The exit code of `priory flower`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    name, *rest = argv
    return find(name, COMMANDS, "priory flower")[1](rest)


def _schema(argv: Sequence[str]) -> int:
    from priory.cli.flower import schema

    return schema.schema(argv)


def _init(argv: Sequence[str]) -> int:
    from priory.cli.flower import init

    return init.init(argv)


def _hash(argv: Sequence[str]) -> int:
    from priory.cli.flower import hash

    return hash.hash_app(argv)


def _up(argv: Sequence[str]) -> int:
    from priory.cli.flower import up

    return up.up(argv)


def _keys(argv: Sequence[str]) -> int:
    from priory.cli.flower import keys

    return keys.keys(argv)


def _gateway(argv: Sequence[str]) -> int:
    from priory.cli.flower import gateway

    return gateway.gateway(argv)


def _status(argv: Sequence[str]) -> int:
    from priory.cli.flower import status

    return status.status(argv)


def _log(argv: Sequence[str]) -> int:
    from priory.cli.flower import log

    return log.log(argv)


def _forget(argv: Sequence[str]) -> int:
    from priory.cli.flower import forget

    return forget.forget(argv)


def _budget(argv: Sequence[str]) -> int:
    from priory.cli.flower import budget

    return budget.budget(argv)


COMMANDS: Commands = {
    "schema": ("draft a file that lists what an app reveals about the data, for you to review", _schema),
    "init": ("write a Flower app that trains a method, to read, change and run with `flwr run`", _init),
    "hash": ("print the SHA-256 of an app, which every node logs", _hash),
    "up": ("start a whole federation on this machine, with TLS and keys, run it and take it down", _up),
    "keys": ("make, list, renew and revoke the keys of a server and its nodes", _keys),
    "gateway": ("write a configuration for nginx that admits requests of nodes alone", _gateway),
    "status": ("show the status of a run's server", _status),
    "log": ("check the log of what a client was asked and sent, and show its last entries", _log),
    "budget": ("show what a client's answers under differential privacy cost, and set the total it allows", _budget),
    "forget": ("delete what a client keeps of its runs", _forget),
}


def _usage() -> str:
    lines = [f"  {name:10}{text}" for name, (text, _) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: priory flower COMMAND ...",
            "",
            "Run a federation on Flower: on this machine, or over a network with TLS.",
            "",
            *lines,
            "",
            "  priory flower up --nodes 4 --data heart_disease --rounds 5",
            "",
            "`priory flower COMMAND --help` explains every flag; docs/deploy.md leads from nothing to two machines.",
        ]
    )
