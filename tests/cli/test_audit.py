"""`priory run --dp` and `priory audit`: what is printed, and the exit codes."""

import json

import pytest

from priory.cli import main
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
    assert "the bound stays below the claim" in told
    assert "proves nothing" in told


@pytest.mark.slow  # tests/engine/test_audit.py refutes claims
def test_a_refuted_claim_ends_with_code_1(unscored, capsys):
    options = ["--dp", "local", "--dp-epsilon", "0.5", "--dp-delta", "1e-3", "--dp-sensitivity", "0.001"]
    assert main([*RUN, *options, "--out", "runs/false"]) == 0
    assert "an assumption (dp-sensitivity)" in " ".join(capsys.readouterr().out.split())
    assert main(["audit", "runs/false", "--canaries", "100", "--seed", "5"]) == 1
    assert "THE CLAIM IS REFUTED" in capsys.readouterr().out
    with open("runs/false/audit.json") as file:
        assert json.load(file)["holds"] is False


def test_a_run_without_privacy_cannot_be_audited(made, capsys):
    assert main(["audit", made("fedavg")]) == 2
    assert "claims no differential privacy" in capsys.readouterr().err


def test_privacy_without_a_form_is_a_sentence(capsys):
    assert main([*RUN, "--dp-epsilon", "4"]) == 2
    assert "add --dp central or local" in capsys.readouterr().err
