"""`priory run --certify`: one line on the newcomers' certificates, their file, and what is refused before the run."""

import math
import re
from pathlib import Path

import pytest

import priory
from priory.cli import main
from priory.store import CERTIFICATES, RunDirectory
from tests.cli.conftest import BAYES, TINY

pytestmark = pytest.mark.xdist_group("command line")
OUT = [*TINY, "--out", "a"]


def test_a_run_ends_with_a_line_on_its_certificates_and_resume_gives_the_same(capsys):
    assert main(["run", "pfedbayes", *BAYES, "--out", "a", "--certify"]) == 0
    found = RunDirectory("a").read(CERTIFICATES)
    assert list(found) == list(priory.load("a").federation.clients[4:])
    useful = sum(not one["vacuous"] for one in found.values())
    median = math.ceil(1000 * sum(one["kl_bound"] for one in found.values()) / 2) / 1000  # a bound is rounded up
    line = re.search(r"certificates at .*\n(?:.*\n)??(?=run directory)", capsys.readouterr().out)
    assert line is not None
    assert f"each of 2 newcomers: {useful} below chance (0.900)" in line[0]
    assert f"median bound on the Gibbs error {median:.3f}" in line[0]
    Path("a/certificates.json").unlink()
    assert main(["resume", "a", "--certify"]) == 0
    assert RunDirectory("a").read(CERTIFICATES) == found


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["fedavg", *OUT, "--newcomers", "0.4"], "fedavg has no certificate"),
        (["pfedbayes", *OUT], "No client with training rows was held out"),
    ],
)
def test_what_cannot_be_certified_is_refused_before_anything_is_written(argv, reason, capsys):
    assert main(["run", *argv, "--certify"]) == 2
    assert reason in capsys.readouterr().err
    assert not Path("a").exists()
