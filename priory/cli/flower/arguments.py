"""The arguments that `init` and `up` share: a method, its data, and how it is run."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from priory.cli import federation, flags, start
from priory.cli.federation import DataFlags
from priory.cli.flags import Flag
from priory.cli.run import DATA_GROUP, METHOD_GROUP, RUN_GROUP, run_flags, settings_from, title_of
from priory.core.errors import UsageError
from priory.core.reading import JsonDict
from priory.data import Federation
from priory.data import schema as schemas
from priory.data.schema import Schema
from priory.deploy import charter as charters
from priory.deploy import shared
from priory.deploy.app_hash import written_hash
from priory.deploy.charter import Charter
from priory.engine import accounting
from priory.fed import schedule

# Simulation's own business, or what a node would need more rows for.
LEFT_OUT = ("exclude_uncertain", "client_batch", "resident_bytes", "onboard_visits", "eval_newcomers", "eval_clients")
DEFAULT = "pfedbayes"


@dataclass(frozen=True)
class Asked:
    """A federation to deploy, and the other values of the command.

    Attributes:
        federation: The rows to deal; None where a schema is given without data.
        spec: What makes the federation again.
        shared: What everybody receives with the app, in two lines.
    """

    charter: Charter
    federation: Federation | None
    rest: JsonDict
    spec: JsonDict
    shared: list[str]


def parse(command: str, argv: Sequence[str], rest: Sequence[Flag], text: str, without: Sequence[str] = ()) -> Asked:
    """Return the federation that the flags of a command describe.

    Args:
        rest: Flags of the command itself.
        without: Flags of the data that the command sets itself.
    """
    name, argv = _method_of(argv)
    method = start.typed_method(name)
    data = [flag for flag in flags_of_data() if flag.name not in (*without, "newcomers", "validation")]
    run = [flag for flag in run_flags() if flag.name not in LEFT_OUT]
    groups = {
        "rest": flags.group("rest", "", rest),
        "method": flags.group("method", METHOD_GROUP, flags.flags_of(method)),
        "data": flags.group("data", DATA_GROUP, data),
        "run": flags.group("run", RUN_GROUP, run),
    }
    about = f"{text} The method is --method NAME, {DEFAULT} by default. {title_of(method)}"
    values = flags.parse(groups, argv, prog=f"priory flower {command}", text=about)
    start.import_typed(values["run"])
    start.start_jax(None)
    given = values["data"] | ({"clients": values["rest"]["nodes"]} if "clients" in without else {})
    chosen = federation.from_values(given)
    settings = settings_from(values["run"], chosen)
    if settings.eval_every is None:  # an evaluation costs a message to every node
        settings = dataclasses.replace(settings, eval_every=0)
    built = flags.build(method, values["method"])
    schema = None if chosen.reading.schema is None else schemas.read(chosen.reading.schema)
    mode = accounting.mode_of(settings, built, name)
    shared.check(mode, chosen.data, chosen.partition.transform, chosen.partition.align, schema)
    dealt = _dealt(chosen, schema)
    if schema is not None:
        charter = charters.from_schema(built, schema, settings, None if dealt is None else dealt.public)
    else:
        assert dealt is not None
        charter = charters.make(built, dealt, settings)
    spec = {"schema": str(Path(chosen.reading.schema or "").resolve())} if dealt is None else dealt.spec
    told = shared.summary(charter, chosen.data, chosen.reading.scaling, schema)
    return Asked(charter, dealt, values["rest"], spec, told)


def _dealt(chosen: DataFlags, schema: Schema | None) -> Federation | None:
    """Return the data, dealt to as many clients as a schema states; None if there is a schema and no data."""
    if not chosen.data and schema is None:
        raise UsageError("Give --data NAME or FILE, or --schema FILE for an app without rows.")
    if schema is None:
        return chosen.federation()
    if not chosen.data:
        for flag in flags.flags_of(DataFlags()):
            value = reduce(getattr, flag.path, chosen)
            is_noise = flag.name == "scale" and chosen.column() is None
            if flag.name != "schema" and not is_noise and value != flag.default:
                raise UsageError(
                    f"{flag.typed}={value!r} describes rows, and --schema stands alone; leave it out, or give --data "
                    "as well."
                )
        return None
    if chosen.partition.clients is None and schema.role("client") is None:
        chosen = schedule.put(chosen, ("partition", "clients"), schema.clients)
    dealt = chosen.federation()
    if dealt.num_clients != schema.clients:
        raise UsageError(
            f"{chosen.data} has {dealt.num_clients} clients, and {schema.path} states clients = {schema.clients}; "
            "correct one of the two."
        )
    return dealt


def flags_of_data() -> list[Flag]:
    """Return the flags of the data, which need not be named where there is a schema."""
    return [dataclasses.replace(flag, default="") if flag.name == "data" else flag for flag in federation.data_flags()]


def privacy_of(charter: Charter) -> list[str]:
    """Return what the charter's differential privacy costs and assumes, and advice on it; nothing without it."""
    ledger = charter.ledger
    if ledger is None:
        return []
    epsilon, known = ledger.spent(ledger.rounds), ledger.spent_if_cohorts_are_known(ledger.rounds)
    lines = [
        f"{ledger.mode} differential privacy, {ledger.relation}: {ledger.rounds} rounds cost ε = {epsilon:.4g} at "
        f"δ = {ledger.delta:g}, {epsilon - ledger.spent_if_continuous:.2g} more than with noise of infinite precision",
        f"noise {ledger.noise:.4g} x sensitivity {ledger.sensitivity:.4g} ({ledger.origin})",
    ]
    if known is not None:
        lines.append(f"for anyone who learns which clients take part in each round, ε = {known:.4g} (docs/security.md)")
    return lines + list(accounting.advice(ledger, charter.question.num_clients).values())


def hash_line(app: Path) -> str:
    """Return the app's SHA-256 in a sentence, or why it is not known."""
    try:
        return f"SHA-256 of the app, which every node logs: {written_hash(app)}"
    except UsageError as error:  # without Flower an app can still be written
        return str(error)


def _method_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the method that is named among the flags, and the other flags."""
    rest = list(argv)
    for place, word in enumerate(rest):
        if word.startswith("--method="):
            return word.partition("=")[2], rest[:place] + rest[place + 1 :]
        if word == "--method":
            if place + 1 == len(rest):
                raise UsageError("--method names no method; write --method pfedbayes, say.")
            return rest[place + 1], rest[:place] + rest[place + 2 :]
    return DEFAULT, rest
