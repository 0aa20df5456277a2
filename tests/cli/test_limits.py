"""Values that no machine can hold are refused with a sentence before anything is allocated."""

import pytest

from priory.cli import main
from priory.core import memory
from tests.cli.conftest import SITES, TINY
from tests.cli.test_any_flags import ended, no_more_memory_than, within

pytestmark = [
    pytest.mark.xdist_group("command line"),
    pytest.mark.filterwarnings("ignore::priory.fed.capabilities.AdviceWarning"),
]

HUGE = str(10**18)
RUN = ["run", "fedavg", *TINY]
TUNE = ["tune", "fedavg", *TINY]
MEMORY = 1 << 30  # of the machine that the sentences below speak of
REFUSED = {
    "steps of a round that takes too long": (
        [*RUN, "--steps", str(2**31 - 1)],
        "keeps each client busy for",
    ),
    "batch-size beyond 32 bits": ([*RUN, "--batch-size", str(1 << 40)], "exceeds the 32-bit limit of compiled code"),
    "batch-size beyond memory": (
        [*RUN, "--batch-size", str(2**31 - 1)],
        "needs at least 80 GiB of memory, and 1 GiB is available",
    ),
    "epochs": ([*RUN, "--epochs", str(1 << 40)], "epochs=1099511627776 exceeds"),
    "rounds": ([*RUN, "--rounds", "99999999999"], "rounds=99999999999 exceeds"),
    "step-size": ([*RUN, "--step-size", "1e39"], "step-size=1e+39 is beyond single precision"),
    "one wide layer": (
        [*RUN, "--model", "mlp:99999999999"],
        "with 7,499,999,999,935 parameters needs",
    ),
    "two wide layers": (
        [*RUN, "--model", "mlp:1000000,1000000"],
        "needs at least 3.64 TiB of memory, and 1 GiB is available",
    ),
    "a wide model of several": ([*RUN[:-2], "--models", "linear,cnn:99999999999"], "model=cnn:99999999999 with"),
    "clients": ([*RUN, "--clients", str(10**12)], "clients=1000000000000 exceeds"),
    "clients with so many of each class": ([*RUN, "--clients", str(10**12), "--per-class", "1/1"], "exceeds"),
    "min-examples": ([*RUN, "--min-examples", HUGE], "exceeds the 1797 examples of digits"),
    "sizes": ([*RUN, "--sizes", f"1={10**400}"], "sizes"),
    "devices": ([*RUN, "--devices", "1000000"], "devices=1000000 is too large, since each is a thread"),
    "samples": (["run", "pfedbayes", *TINY, "--samples-per-step", str(10**6)], "samples-per-step=1000000 needs"),
    "samples and warm-up": (["run", "fedpop", *TINY, "--samples", str(2**31 - 1)], "together with other numbers"),
    "seeds of a comparison": (["compare", "fedavg", *TINY, "--seeds", str(10**12)], "choose at most 1000000 in all"),
    "seeds above 32 bits": (["compare", "fedavg", *TINY, "--seed", str(2**32 - 1), "--seeds", "2"], "end above 2^32"),
    "values of an axis": ([*TUNE, "--over", f"step-size=linear:0.1..1:{10**9}"], "spaces 1000000000 values"),
    "ends of an axis": ([*TUNE, "--over", "step-size=linear:0.1..inf:5"], "is not understood"),
    "seeds of a tuning": ([*TUNE, "--over", "step-size=0.1,0.2", "--seeds", HUGE], "choose at most 1000000 in all"),
    "seeds of a table": (["reproduce", "fedvi-table-1", "--seeds", HUGE, "--estimate"], "choose at most 1000000"),
    "clients of a check": (["check", "pfedbayes", "--clients", str(10**15)], "clients=1000000000000000 needs at least"),
    "visits of a check": (["check", "pfedbayes", "--visits", HUGE], "exceeds the 32-bit limit"),
    "a number of a checked method": (["check", "fedpop", "--prior-draws", HUGE], "exceeds the 32-bit limit"),
    "no run": (["report"], "There is no run to report on; name one or more run directories."),
    "days of new keys": (["flower", "keys", "keys", "--days", str(10**9)], "choose 1 to 3650"),
    "nodes": (["flower", "keys", "keys", "--nodes", str(10**12)], "nodes=1000000000000 needs 7.28 PiB of disk"),
}


@pytest.fixture(autouse=True)
def _machine(monkeypatch) -> None:
    monkeypatch.setattr(memory, "total", lambda: MEMORY)


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_without_bounds_ends_in_one_sentence(name, tmp_path):
    argv, said = REFUSED[name]
    assert said in sentence(argv)
    assert list(tmp_path.iterdir()) == []


def test_more_draws_than_fit_are_refused(made):
    made("bayes")
    argv = ["export", "bayes", "--client", SITES[0], "--draws"]
    assert f"draws={HUGE} exceeds the 32-bit limit" in sentence([*argv, HUGE])
    assert "draws=2000000000 needs at least" in sentence([*argv, "2000000000"])


def test_more_canaries_than_fit_are_refused(made):
    made("fedavg")
    assert "canaries=1000000000 needs at least" in sentence(["audit", "fedavg", "--canaries", "1000000000"])


def test_a_certificate_beyond_the_calendar_is_refused():
    assert main(["flower", "keys", "keys"]) == 0
    assert "before a server certificate of 1000000000" in sentence(
        ["flower", "keys", "renew", "keys", "--days", "1000000000"]
    )


def sentence(argv: list[str]) -> str:
    """Return the only line that a command writes to standard error before it ends with a user error."""
    with within(30), no_more_memory_than(12 << 30):
        code, _, errors = ended(argv)
    assert code == 2
    (line,) = errors.strip().splitlines()
    assert line.startswith("priory: ")
    return line
