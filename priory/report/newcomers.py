"""The section of a report on newcomers: what can be promised of clients that took no part."""

from collections.abc import Sequence

from priory.certificate import Certificate, rounded_up
from priory.report.markup import Html, join, note, table
from priory.report.numbers import Group
from priory.report.sections import Section

MOST = 100  # rows of the table
HEADER = (
    "client",
    "run",
    "rows",
    "KL, nats",
    "error of the draws",
    "bound, Gibbs",
    "bound, majority",
    "chance",
    "verdict",
)


def certificates(groups: Sequence[Group]) -> Section:
    """Bounds on the error of newcomers, the tightest first; empty where none were asked for."""
    found = [(name, group.label, one) for group in groups for name, one in group.first.certificates.items()]
    return Section("certificates", "Certificates of newcomers", _body(found) if found else Html(""))


def _body(found: Sequence[tuple[str, str, Certificate]]) -> Html:
    ordered = sorted(found, key=lambda row: row[2].kl_bound)
    rows = [
        [
            name,
            label,
            one.rows,
            one.divergence,
            one.sampled_error,
            rounded_up(one.kl_bound),
            rounded_up(one.majority_bound),
            one.chance,
            "VACUOUS: a guess is bounded as well" if one.vacuous else f"holds with probability {1 - one.delta:g}",
        ]
        for name, label, one in ordered[:MOST]
    ]
    pieces = [table(HEADER, rows, "PAC-Bayes bounds on the error on new rows of the client")]
    if len(found) > MOST:
        pieces.append(note(f"The {MOST} tightest of {len(found)} are shown.", "missing"))
    useless = sum(one.vacuous for _, _, one in found)
    pieces.append(note(f"{useless} of {len(found)} are vacuous. Each bound holds by itself, not all of them at once."))
    certified = dict.fromkeys(f"{label}: a network drawn from {one.certifies}." for _, label, one in found)
    assumed = dict.fromkeys(f"Assumed: {sentence}." for _, _, one in found for sentence in one.assumptions)
    return join([*pieces, *map(note, certified), *map(note, assumed)])
