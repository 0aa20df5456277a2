"""The commands as a user types them, in this process unless a signal or a start is what is tested."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import priory
from priory import methods
from priory.cli import compare, flags, main, progress, run
from priory.cli.app import COMMANDS
from priory.cli.federation import DataFlags, data_flags
from priory.data import ReadOptions
from priory.engine import compilation, manifest
from tests.cli.conftest import TINY

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.usefixtures("somewhere_else"),
    pytest.mark.xdist_group("command line"),  # tests/cli trains the same methods on the same clients
]


def summary_of(path: str) -> dict:
    return json.loads(Path(path, "summary.json").read_text())


def scores_of(path: str) -> tuple:
    return json.loads(Path(path, "clients.json").read_text()), {
        name: summary_of(path)[name] for name in ("personal", "global", "newcomers", "rounds", "method")
    }


def priory_process(*argv: str, **kwargs) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(compilation.cache_directory()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    code = "import sys; from priory.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_a_run_leaves_its_directory_and_ends_with_a_table(capsys):
    assert main(["run", "fedavg", *TINY, "--out", "a"]) == 0
    shown = capsys.readouterr()
    assert {"manifest.toml", "metrics.jsonl", "summary.json", "clients.json"} <= set(os.listdir("a"))
    for words in ("personal", "global", "worst client", "per client and round"):
        assert words in shown.out
    assert shown.out.rstrip().endswith("run directory: a")


def test_a_run_without_a_terminal_prints_a_plain_line_for_each_evaluation(capsys):
    assert main(["run", "fedavg", *TINY, "--out", "a"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1] for line in lines] == ["round 1/3", "round 2/3", "round 3/3"]
    assert not any("\x1b" in line for line in lines)


def test_a_manifest_run_again_gives_the_same_numbers():
    assert main(["run", "fedavg", *TINY, "--step-size", "0.05", "--seed", "3", "--out", "a"]) == 0
    assert main(["run", "a/manifest.toml", "--out", "b"]) == 0
    assert scores_of("a") == scores_of("b")


@pytest.mark.filterwarnings("always::UserWarning:priory")  # a note on the error stream, not an error
def test_a_manifest_that_was_edited_is_run_with_a_note_and_resumed_only_as_it_was_written(capsys):
    assert main(["run", "fedavg", *TINY, "--out", "a"]) == 0
    path, capsys_before = Path("a/manifest.toml"), capsys.readouterr()
    assert "edited" not in capsys_before.err
    path.write_text(path.read_text().replace("rounds = 3", "rounds = 2"))
    assert main(["run", "a/manifest.toml", "--out", "b"]) == 0
    assert "a/manifest.toml was edited since Priory wrote it" in capsys.readouterr().err
    assert summary_of("b")["rounds"] == 2
    for command in ("resume", "clients"):
        assert main([command, "a"]) == 2
        assert "does not match the checksum in its last line" in capsys.readouterr().err


@pytest.fixture
def stopped_at_once(monkeypatch):
    """Interrupts every run before its first round, when all is prepared and the manifest is written."""
    monkeypatch.setattr(progress, "interruptible", lambda: contextlib.nullcontext(lambda: True))


def test_a_manifest_holds_every_flag(stopped_at_once):
    given = [
        "--step-size",
        "0.05",
        "--epochs",
        "2",
        "--schedule",
        "step-size=cosine",
        "--newcomers",
        "0.2",
        "--seed",
        "7",
    ]
    assert main(["run", "fedavg", *TINY, *given, "--data-seed", "3", "--out", "a"]) == 130
    table = tomllib.loads(Path("a/manifest.toml").read_text())
    assert table["method"]["optimiser"]["step_size"] == 0.05
    assert table["method"]["work"]["epochs"] == 2
    assert (table["run"]["seed"], table["run"]["schedule"]) == (7, ["step-size=cosine"])
    assert (table["data"]["seed"], table["data"]["newcomers"]) == (3, 0.2)


def test_without_out_a_run_takes_the_next_free_directory():
    paths = [run.free_path(Path("runs/fedavg-digits-s0"))]
    paths[0].mkdir(parents=True)
    paths.append(run.free_path(Path("runs/fedavg-digits-s0")))
    paths[1].mkdir()
    paths.append(run.free_path(Path("runs/fedavg-digits-s0")))
    assert [path.name for path in paths] == ["fedavg-digits-s0", "fedavg-digits-s0-2", "fedavg-digits-s0-3"]


def test_a_stopped_run_is_resumed_to_the_end_of_one_never_stopped(monkeypatch, capsys):
    assert main(["run", "fedavg", *TINY, "--out", "whole"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(progress.Lines, "evaluated", lambda self, line: os.kill(os.getpid(), signal.SIGINT))
        assert main(["run", "fedavg", *TINY, "--out", "part"]) == 130
    assert "priory resume part" in capsys.readouterr().out
    assert not Path("part/summary.json").exists()
    assert main(["resume", "part"]) == 0
    assert scores_of("part") == scores_of("whole")


def test_resuming_a_finished_run_changes_nothing(capsys):
    assert main(["run", "fedavg", *TINY, "--out", "a"]) == 0
    before = {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()}
    assert main(["resume", "a"]) == 0
    assert "finished already" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()} == before


def test_the_bound_of_a_run_is_printed_with_what_it_assumes(capsys):
    assert main(["run", "fedhb-niw", *TINY, "--out", "a"]) == 0
    run = priory.load("a")
    bound = run.elbo()
    capsys.readouterr()
    assert main(["elbo", "a"]) == 0
    shown = capsys.readouterr().out
    for value in (bound.divergence, bound.total, bound.total / run.task.num_examples):
        assert f" {value:,.1f} nats" in shown
    assert "A lower bound on log p(D) under the model's prior" in shown


def test_the_bound_of_a_method_that_has_none_ends_in_a_sentence(capsys):
    assert main(["run", "fedavg", *TINY, "--out", "a"]) == 0
    assert main(["elbo", "a"]) == 2
    assert "priory: fedavg has no bound on log p(D)" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")])
def test_memory_that_runs_out_ends_in_a_sentence(error, monkeypatch, capsys):
    def fail(argv):
        raise error

    monkeypatch.setitem(COMMANDS, "run", ("", fail))
    assert main(["run", "fedavg", *TINY]) == 2
    assert capsys.readouterr().err.startswith("priory: not enough memory; choose a smaller ")


def test_another_failure_at_run_time_is_not_taken_for_memory(monkeypatch):
    def fail(argv):
        raise RuntimeError("something else")

    monkeypatch.setitem(COMMANDS, "run", ("", fail))
    with pytest.raises(RuntimeError, match="something else"):
        main(["run", "fedavg", *TINY])


def test_a_second_interrupt_aborts():
    with progress.interruptible() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_a_process_with_a_checkpoint_and_says_how_to_resume(tmp_path):
    tiny = [word if word != "3" else "1000000" for word in TINY]
    process = priory_process("run", "fedavg", *tiny, "--eval-every", "50", "--out", "a", cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not Path("a/metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "priory resume a" in out
    assert "Traceback" not in err
    assert json.loads(Path("a/checkpoint/commit.json").read_text())["round"] >= 50


COMPARED = ["fedprox", "fedprox:mu=0.5,step-size=0.05"]  # one program for both


def test_a_comparison_has_each_method_and_seed_and_is_loaded_the_second_time(capsys):
    command = ["compare", *COMPARED, *TINY, "--seeds", "2", "--step-size", "0.2", "--out", "c"]
    assert main(command) == 0
    first = capsys.readouterr().out
    written = json.loads(Path("c/comparison.json").read_text())
    assert [record["label"] for record in written["methods"]] == COMPARED
    for record in written["methods"]:
        assert [one["seed"] for one in record["runs"]] == [0, 1]
        own = [summary_of(f"c/{one['path']}")["personal"]["accuracy"] for one in record["runs"]]
        assert record["scores"]["personal.accuracy"]["mean"] == pytest.approx(sum(own) / 2)
    for path, mu, step_size in (("fedprox-s1", 0.01, 0.2), ("fedprox-mu=0.5,step-size=0.05-s1", 0.5, 0.05)):
        settings = tomllib.loads(Path("c", path, "manifest.toml").read_text())["method"]
        assert (settings["mu"], settings["optimiser"]["step_size"]) == (mu, step_size)
    before = {path: path.stat().st_mtime_ns for path in Path("c").rglob("summary.json")}
    assert main(command) == 0
    second = capsys.readouterr().out
    assert "4 of them are finished already" in second
    assert {path: path.stat().st_mtime_ns for path in Path("c").rglob("summary.json")} == before
    assert first.splitlines()[1:] == second.splitlines()[2:]


def test_a_stopped_comparison_goes_on_where_it_was(monkeypatch):
    command = ["compare", "fedavg", *TINY, "--out", "c"]
    with monkeypatch.context() as patch:
        patch.setattr(progress.Lines, "evaluated", lambda self, line: os.kill(os.getpid(), signal.SIGINT))
        assert main(command) == 130
    assert not Path("c/comparison.json").exists()
    assert main(command) == 0
    assert main(["run", "fedavg", *TINY, "--out", "whole"]) == 0
    assert scores_of("c/fedavg-s0") == scores_of("whole")


def test_a_comparison_equals_its_runs_alone():
    assert main(["compare", "fedavg", *TINY, "--seeds", "2", "--out", "c"]) == 0
    assert main(["run", "fedavg", *TINY, "--seed", "1", "--out", "alone"]) == 0
    assert scores_of("c/fedavg-s1") == scores_of("alone")


def test_settings_of_a_method_override_the_shared_ones():
    named = compare.methods_from(["fedavg", "fedprox:mu=2,step-size=0.5"], {"step_size": 0.01})
    assert named["fedavg"].optimiser.step_size == 0.01
    assert (named["fedprox:mu=2,step-size=0.5"].optimiser.step_size, named["fedprox:mu=2,step-size=0.5"].mu) == (
        0.5,
        2.0,
    )


@pytest.mark.parametrize("name", methods.REGISTRY)
def test_every_flag_of_every_method_is_explained_and_unique(name):
    groups = [flags.flags_of(methods.get(name)()), data_flags(), run.run_flags(), flags.flags_of(run.Output())]
    names = [flag.name for some in groups for flag in some]
    assert len(names) == len(set(names))
    assert [flag.name for some in groups for flag in some if len(flag.help) < 10] == []


@pytest.mark.parametrize("name", methods.REGISTRY)
def test_the_help_of_a_method_names_every_flag(name, capsys):
    assert main(["run", name, "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in (*flags.flags_of(methods.get(name)()), *data_flags(), *run.run_flags()):
        assert any(f"--{flag.typed}{after}" in shown for after in (" ", "\n", ", --no-"))


@pytest.mark.parametrize(("typed", "value"), [("--stateful", True), ("--no-stateful", False)])
def test_a_switch_takes_no_value(typed, value):
    switches = [flag for flag in flags.flags_of(priory.FedHBNIW()) if flag.type is bool]
    values = flags.parse({"method": flags.group("method", "", switches)}, [typed], prog="priory", text="")
    assert values["method"]["stateful"] is value


@pytest.mark.parametrize(
    "command", ["run", "compare", "tune", "resume", "elbo", "effects", "onboard", "methods", "datasets"]
)
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"priory {command}" in capsys.readouterr().out


@pytest.mark.parametrize("name", methods.REGISTRY)
def test_flags_rebuild_the_method_they_were_made_from(name):
    method = methods.get(name)()
    assert flags.build(method, {flag.name: flag.default for flag in flags.flags_of(method)}) == method


@pytest.mark.parametrize("name", methods.REGISTRY)
def test_a_method_survives_its_manifest(name):
    method = methods.get(name)()
    assert manifest.from_table(type(method), manifest.to_table(method)) == method


@pytest.mark.parametrize(
    ("given", "column", "noise"),
    [(None, None, None), ("0.5", None, 0.5), ("learned", None, "learned"), ("se", "se", "column")],
)
def test_scale_is_a_number_learned_or_a_column(given, column, noise):
    chosen = DataFlags("d.csv", reading=ReadOptions(scale=given))
    assert (chosen.column(), chosen.noise()) == (column, noise)


def test_a_csv_with_known_standard_errors_is_run(capsys):
    rows = [f"{client},{x},{2 * x + client},0.5" for client in range(4) for x in range(10)]
    Path("d.csv").write_text("\n".join(["who,x,y,se", *rows]) + "\n")
    columns = ["--data", "d.csv", "--target", "y", "--client", "who", "--scale", "se", "--task", "regression"]
    assert main(["run", "fedavg", *columns, "--rounds", "2", "--step-size", "0.01", "--out", "a"]) == 0
    assert "RMSE" in capsys.readouterr().out
    table = tomllib.loads(Path("a/manifest.toml").read_text())
    assert (table["data"]["scale"], table["run"]["scale"]) == ("se", "column")


def test_columns_are_dropped_together_or_one_by_one():
    group = flags.group("data", "", data_flags())
    argv = ["--data", "d.csv", "--drop", "a", "b", "--drop", "c"]
    values = flags.parse({"data": group}, argv, prog="x", text="")["data"]
    assert flags.flatten(values["drop"]) == ("a", "b", "c")


def test_the_listings_name_everything(capsys):
    assert main(["methods"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in methods.REGISTRY)
    assert "arXiv:1602.05629" in shown
    assert main(["datasets"]) == 0
    shown = capsys.readouterr().out
    assert all(shown.count(f"\n{entry.name} ") >= 2 for entry in priory.data.describe()[1:])
    assert "10.24432/C52P4X" in shown
    assert "priory/data/shipped/README.md" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"priory {priory.__version__}\n"


def test_the_cache_lies_under_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilation.cache_directory() == tmp_path / "priory" / "xla"


def test_a_fresh_process_gets_the_devices_it_asks_for_and_a_cache():
    code = """
import os, jax
from priory.cli import start
start.start_jax(3)
print(len(jax.devices()), jax.config.values["jax_compilation_cache_dir"])
"""
    environment = {**os.environ, "XDG_CACHE_HOME": "somewhere", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", str(Path("somewhere") / "priory" / "xla")]


def test_a_model_is_found_in_the_current_directory(stopped_at_once, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    lines = ["import flax.linen as nn", "def make(n):", "    return nn.Sequential([flat, nn.Dense(n)])"]
    lines += ["def flat(x):", "    return x.reshape(x.shape[0], -1)"]
    Path("a_net_of_mine.py").write_text("\n".join(lines))
    argv = [*TINY[:-1], "a_net_of_mine:make", "--out", "a"]
    assert main(["run", "local", *argv]) == 130
    assert tomllib.loads(Path("a/manifest.toml").read_text())["run"]["model"] == "a_net_of_mine:make"
    assert sys.path[-1] == str(Path.cwd())


def test_no_method_is_a_mistake_but_asking_for_help_is_none(capsys):
    assert main(["run"]) == main(["tune"]) == main(["compare"]) == 2
    assert main(["run", "--help"]) == main(["tune", "--help"]) == main(["compare", "--help"]) == 0
    assert "METHOD" in capsys.readouterr().out
