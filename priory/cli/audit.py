"""`priory audit`: what an attacker with canaries can show of a run's differential privacy."""

from collections.abc import Sequence
from dataclasses import dataclass

from priory import report
from priory.cli import flags, progress
from priory.cli.run import opened, run_groups
from priory.engine.audit import MOST, Audit, enough
from priory.engine.audit import audit as audit_run

TEXT = (
    "Bound the epsilon of a run with --dp from below: it is made again with canary clients, whose coins an attacker "
    "guesses from what is released (Steinke et al. 2023). The run itself stays as it is; audit.json is added to it."
)
REFUTED = 1
MEANING = (
    "A bound above the claim refutes it: noise, clipping, accounting or an assumed sensitivity is wrong; a true claim "
    "is refuted in one audit of twenty at most, so confirm with another --seed. A bound below it proves nothing: other "
    "attacks, or more canaries, may show more."
)


@dataclass(frozen=True)
class Options:
    """How the run is audited.

    Attributes:
        canaries: Clients that are added, at least 100; by default the least number that could refute the claim, at most
            2000.
        seed: Root of all randomness of the audit; that of the run by default.
    """

    canaries: int | None = None
    seed: int | None = None


def audit(argv: Sequence[str]) -> int:
    """The exit code of `priory audit`: 1 where the claim is refuted."""
    groups = run_groups("audit") | {"audit": flags.group("audit", "", flags.flags_of(Options()))}
    values = flags.parse(groups, argv, prog="priory audit", text=TEXT)
    path, _ = opened(values)
    chosen = Options(**values["audit"])
    with progress.counting("auditing") as told:
        trust = values["output"]["trust_code"]
        found = audit_run(path, canaries=chosen.canaries, seed=chosen.seed, told=told, trust_code=trust)
    told_of = f"delta {found.delta:g}, {found.relation}; sensitivity {found.assumption}"
    guessed = f"{found.correct} of {found.guesses} coins guessed right, {found.canaries} canaries"
    lines = [f"claim   epsilon {found.claim:.4g} ({found.mode}, {told_of})"]
    if abs(found.audited - found.claim) > 1e-3 * found.claim:
        lines.append(f"        epsilon {found.audited:.4g} by the same accounting with the canaries among the clients")
    lines += [f"bound   epsilon {found.bound:.4g} at least, with 95 % confidence ({guessed})", verdict(found), MEANING]
    for line in lines:
        report.say(line)
    return REFUTED if found.refuted else 0


def verdict(found: Audit) -> str:
    """Say whether the claim is refuted, and if not, which claims no result could have refuted."""
    if found.refuted:
        return "THE CLAIM IS REFUTED: the bound lies above it"
    if found.holds:
        return f"not refuted: the bound stays below the claim ({found.reach})"
    needed = enough(found.audited, found.delta)
    remedy = f"give --canaries {needed}" if needed else f"no number of canaries up to {MOST} can refute it"
    return f"not refuted ({found.reach}); {remedy}"
