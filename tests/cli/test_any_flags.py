"""Any flags with any values: every command ends soon, with a documented exit code, and without a traceback.

Commands are stopped before they train, since whatever a run can be refused for is raised before that; only those in
processes of their own train, with limits on time and memory. `PRIORY_TEST_EXAMPLES` sets how many lines are tried.
"""

import io
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import priory
from priory import methods
from priory.calibration import trial
from priory.cli import app, main
from priory.cli.flower import COMMANDS as FLOWER
from priory.cli.flower.keys import COMMANDS as KEYS
from priory.cli.flower.log import COMMANDS as LOG
from priory.core.errors import UsageError
from priory.deploy.exchange import Reply, Request
from priory.deploy.node_keys import SuperLink
from priory.deploy.node_log import NodeLog
from priory.deploy.processes import Fleet
from priory.engine import audit, simulate
from priory.engine.runner import Runner
from priory.reproduce.cells import Cell
from priory.tune.search import Part
from tests.cli import any_flags
from tests.cli.conftest import SITES, TINY, patients

pytestmark = [
    pytest.mark.xdist_group("command line"),  # one worker makes the runs, of methods that other commands train too
    pytest.mark.filterwarnings(
        "ignore::priory.fed.capabilities.AdviceWarning"
    ),  # of runs that are shorter than they should
]

TABLE = ["--data", "table.csv", "--target", "ill", "--drop", "cost", "--client", "site", "--model", "linear"]
# What a command needs before random flags make a difference, by its words; a run's name is made by `made`.
COMMANDS = {
    "run fedavg": TINY,
    "run": ["fedavg", *TABLE],
    "compare": ["local", "fedavg", *TINY],
    "tune fedavg": [*TINY, "--over", "step-size=0.1,0.2"],
    "resume": ["fedavg"],
    "report": ["fedavg"],
    "reproduce": ["--estimate"],
    "elbo": ["fedavg"],
    "effects": ["fedavg"],
    "onboard": ["bayes", "--data", "table.csv"],
    "predict": ["bayes", "--client", SITES[0], "--data", "rows.csv", "--out", "predictions.csv"],
    "export": ["bayes", "--client", SITES[0]],
    "clients": ["fedavg"],
    "audit": ["fedavg"],
    "check pfedbayes": [],
    "methods": [],
    "datasets": [],
    "flower schema": ["table.csv"],
    "flower init": ["app", *TABLE],
    "flower up": TABLE,
    "flower keys": ["keys"],
    "flower keys list": ["old-keys"],
    "flower keys renew": ["old-keys"],
    "flower keys revoke": ["old-keys", "--node", "client-0"],
    "flower gateway": ["gateway", "--app", "absent", "--keys", "old-keys"],
    "flower hash": ["absent"],
    "flower status": ["fedavg"],
    "flower log verify": ["state"],
    "flower log show": ["state"],
    "flower budget": ["state", "--client", "0"],
    "flower forget": ["state", "--client", "0", "--yes"],
}
# Commands whose exit code 1 is documented: a claim refuted, a certificate that expires, a federation that failed.
VERDICTS = ("check", "audit", "reproduce", "flower keys list", "flower log verify", "flower status", "flower up")
MOST_SECONDS = 60
MOST_BYTES = 12 << 30  # of address space, of which JAX takes several gigabytes for nothing
EXAMPLES = int(os.environ.get("PRIORY_TEST_EXAMPLES", "12"))  # of each command


def fuzzed(num: int):
    """So many examples, the same every time."""
    health = list(HealthCheck)
    phases = [Phase.explicit, Phase.generate]  # a failure shows its command line, so that none need be shrunk
    how = {"derandomize": True, "deadline": None, "database": None, "phases": phases}
    return settings(max_examples=num, suppress_health_check=health, **how)


def test_every_command_is_tried():
    named = {*app.COMMANDS, *(f"flower {name}" for name in FLOWER), *(f"flower keys {name}" for name in KEYS)}
    named |= {f"flower log {name}" for name in LOG}
    tried = {*COMMANDS, *(name.removesuffix(" fedavg").removesuffix(" pfedbayes") for name in COMMANDS)}
    assert named - {"flower", "flower log"} <= tried


def stop_before_training(patch: pytest.MonkeyPatch) -> None:
    """End a command as Ctrl-C would where it begins to train, to start processes, or to ask a SuperLink."""
    begin = Runner.begin.__func__

    def opened(cls, ready, out, resume=False):
        return begin(cls, ready, out, resume) if resume else _interrupted()

    patch.setattr(Runner, "begin", classmethod(opened))
    patch.setattr(sys.modules[simulate.__module__], "_tracker", lambda *_: None)
    for owner, name in ((Part, "run"), (Cell, "run"), (Fleet, "__init__"), (audit, "_observe")):
        patch.setattr(owner, name, _interrupted)
    for name in ("problem_for", "under_truth", "after_training"):
        patch.setattr(trial, name, _interrupted)
    patch.setattr(SuperLink, "nodes", _refused)


def _interrupted(*_, **__):
    raise KeyboardInterrupt


def _refused(*_):
    raise UsageError("superlink='x' is not known; give another.")


@pytest.fixture
def files(made) -> Callable[[str], None]:
    """Make what the base of a command names."""

    def make(base: list[str]) -> None:
        patients().to_csv("table.csv", index=False)
        patients().drop(columns=["ill", "cost", "site"]).to_csv("rows.csv", index=False)
        if base[:1] in (["fedavg"], ["bayes"]) and base[1:] != TINY and base[1:] != TABLE:
            made(base[0])
        if base[:1] == ["state"]:
            Path("state").mkdir()
            NodeLog(Path("state/client-0"), 0).admit(Request("hello", {}), Reply({}), "answered", "a", "b")
        if "old-keys" in base:
            assert main(["flower", "keys", "old-keys", "--nodes", "1"]) == 0

    return make


@pytest.mark.parametrize("name", COMMANDS)
def test_any_flags_end_in_a_documented_way(name, files, monkeypatch):
    files(COMMANDS[name])
    stop_before_training(monkeypatch)
    before = set(Path().iterdir())
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    words = name.split()

    @fuzzed(EXAMPLES)
    @given(any_flags.random_flags(any_flags.declared(words)), st.sampled_from([True, True, True, False]))
    def each(flags: list[str], is_complete: bool) -> None:
        argv = [*words, *(COMMANDS[name] if is_complete else []), *flags]
        with within(MOST_SECONDS), no_more_memory_than(MOST_BYTES):
            code, out, errors = ended(argv)
        check_end(argv, code, out, errors)
        for path in set(Path().iterdir()) - before:  # so that the next one meets the same files
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    each()


@pytest.mark.slow  # every method is traced with several settings
@pytest.mark.parametrize("command", ["run", "tune", "check"])
@pytest.mark.parametrize("method", methods.REGISTRY)
def test_any_flags_of_any_method_end_in_a_documented_way(method, command, monkeypatch):
    base = {"run": TINY, "tune": COMMANDS["tune fedavg"], "check": []}[command]
    stop_before_training(monkeypatch)

    @fuzzed(EXAMPLES)
    @given(any_flags.random_flags(any_flags.declared([command, method])))
    def each(flags: list[str]) -> None:
        argv = [command, method, *base, *flags]
        with within(MOST_SECONDS), no_more_memory_than(MOST_BYTES):
            check_end(argv, *ended(argv))

    each()


@pytest.mark.slow  # processes of their own, which train
@pytest.mark.parametrize("name", ["run fedavg", "compare", "tune fedavg", "check pfedbayes", "audit", "export"])
def test_a_process_ends_within_its_time_and_memory(name, files):
    files(COMMANDS[name])

    @fuzzed(4)
    @given(any_flags.random_flags(any_flags.declared(name.split())))
    def each(flags: list[str]) -> None:
        # So much work can be done, and a round of it cannot be interrupted. No argument of a process has a null byte.
        assume(not any("2147483647" in word or "\0" in word for word in flags))
        argv = [*name.split(), *COMMANDS[name], *flags]
        check_end(argv, *ended_process(argv))

    each()


def ended_process(argv: list[str]) -> tuple[int, str, str]:
    """Return how a process ended: by itself, or after it was interrupted when most of its time was over."""
    process = subprocess.Popen(
        ["sh", "-c", f'ulimit -v {MOST_BYTES >> 10}; exec "$@"', "sh", sys.executable, "-m", "priory", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(Path(priory.__file__).parents[1]), "PYTHONUTF8": "1"},
    )
    with process:
        try:
            out, errors = process.communicate(timeout=MOST_SECONDS * 2 / 3)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                out, errors = process.communicate(timeout=MOST_SECONDS / 3)
            finally:
                process.kill()
        return process.returncode, out, errors


def check_end(argv: list[str], code: int, out: str, errors: str) -> None:
    """Assert that a command ended as the documentation says."""
    has_verdict = any(argv[: len(name.split())] == name.split() for name in VERDICTS)
    assert code in (0, 2, 3, 130) or (code == 1 and has_verdict), argv
    assert "Traceback" not in errors, argv
    if code == 2:
        told = [line for line in errors.strip().splitlines() if not line.startswith("warning: ")]
        is_panel = any(line.startswith("╭") for line in told)
        is_sentence = len(told) == 1 and told[0].startswith("priory: ") and told[0].endswith((".", "?"))
        assert is_panel or is_sentence or "usage: priory" in out, (argv, errors)


def ended(argv: list[str]) -> tuple[int, str, str]:
    """Return the exit code of a command and what it wrote to streams that take the same characters as real ones."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    errors = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    with redirect_stdout(out), redirect_stderr(errors):
        code = main(argv)
        out.flush()
        errors.flush()
    return code, *(stream.buffer.getvalue().decode() for stream in (out, errors))


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise where a block takes longer."""

    def too_long(*_):
        raise AssertionError(f"{seconds} seconds are over")  # no OSError, which commands handle

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def no_more_memory_than(num_bytes: int) -> Iterator[None]:
    """Let an allocation fail in a block before it takes the memory of the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
