"""`priory run --dp` and `priory audit`: what is printed, and the exit codes."""

import dataclasses
import json

import pytest

from priory.cli import main
from priory.cli.audit import verdict
from priory.engine.audit import Audit
from tests.cli.conftest import TINY

pytestmark = pytest.mark.xdist_group("command line")
RUN = ["run", "fedavg", *TINY]  # all clients in every round: noise for a part of them takes seconds to solve for


def test_a_private_run_tells_its_claim_and_survives_its_audit(unscored, capsys):
    options = ["--dp", "central", "--dp-epsilon", "4", "--dp-delta", "1e-3", "--out", "runs/private"]
    assert main([*RUN, *options]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "central differential privacy: epsilon 4 at delta 0.001, replace one client" in told
    assert "joint differential privacy" in told
    assert main(["audit", "runs/private", "--canaries", "100"]) == 0
    told = capsys.readouterr().out
    assert "claim   epsilon 4 (central, delta 0.001" in told
    assert "not refuted (cannot refute a claim above 2.481 with 100 canaries); no number of canaries up to 2000" in told
    assert "proves nothing" in told
    with open("runs/private/audit.json") as file:
        kept = json.load(file)
    assert (kept["refuted"], kept["holds"]) == (False, False)
    assert kept["reach"] == "cannot refute a claim above 2.481 with 100 canaries"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"bound": 4.2}, "THE CLAIM IS REFUTED: the bound lies above it"),
        (
            {"bound": 0.6},
            "not refuted: the bound stays below the claim (cannot refute a claim above 4.009 with 336 canaries)",
        ),
        (
            {"bound": 2.8, "limit": 3.487, "canaries": 200},
            "not refuted (cannot refute a claim above 3.487 with 200 canaries); give --canaries 336",
        ),
    ],
)
def test_a_verdict_says_which_claims_are_out_of_reach(changed, sentence):
    found = Audit(
        mode="local", relation="replace one client", delta=1e-5, claim=4.0, audited=4.0, bound=0.0, limit=4.0087,
        canaries=336, guesses=168, correct=100, assumption="2 x dp-clip 1",
    )  # fmt: skip
    assert verdict(dataclasses.replace(found, **changed)) == sentence


@pytest.mark.slow  # tests/engine/test_audit.py refutes claims
def test_a_refuted_claim_ends_with_code_1(unscored, capsys):
    options = ["--dp", "local", "--dp-epsilon", "0.5", "--dp-delta", "1e-3", "--dp-sensitivity", "0.001"]
    assert main([*RUN, *options, "--out", "runs/false"]) == 0
    assert "an assumption (dp-sensitivity)" in " ".join(capsys.readouterr().out.split())
    assert main(["audit", "runs/false", "--canaries", "100", "--seed", "5"]) == 1
    assert "THE CLAIM IS REFUTED" in capsys.readouterr().out
    with open("runs/false/audit.json") as file:
        kept = json.load(file)
    assert (kept["refuted"], kept["holds"]) == (True, False)


def test_a_run_without_privacy_cannot_be_audited(made, capsys):
    assert main(["audit", made("fedavg")]) == 2
    assert "claims no differential privacy" in capsys.readouterr().err


def test_privacy_without_a_form_is_a_sentence(capsys):
    assert main([*RUN, "--dp-epsilon", "4"]) == 2
    assert "add --dp central or local" in capsys.readouterr().err
