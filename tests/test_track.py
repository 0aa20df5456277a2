"""What a tool was told is what the run directory holds: every line once, however often the run was stopped."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import priory
from priory.cli import main
from priory.store import TRACKED, Checkpoint, RunDirectory
from priory.track.tracker import numbers

# SQLAlchemy 2.1 says this of MLflow's own tables.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning")

SETTINGS = {"rounds": 4, "eval_every": 1, "model": "linear", "seed": 3}
FIRST_FILE = 1000
DIGITS = ["--data", "digits", "--partition", "iid", "--clients", "3", "--model", "linear"]
DIGITS += ["--rounds", "4", "--eval-every", "1"]


@pytest.fixture(scope="module")
def federation():
    return priory.data.load("digits").partition("iid", clients=3, seed=0)


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture(autouse=True)
def _settings_of_the_tools(tmp_path, monkeypatch, database):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)
    # Files of one second are told apart by a counter, and TensorBoard reads 10 before 9.
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(FIRST_FILE))


def told_to_tensorboard(path: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    """Series and settings, as TensorBoard itself reads the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    read = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    series = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    (content,) = read.PluginTagToContent("hparams").values()
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    text = {name: value.string_value or str(value.number_value) for name, value in hparams.items()}
    return series, text


def told_to_mlflow(path: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    """Series and settings, as MLflow's client reads the one run of the experiment."""
    client, run = mlflow_run(path)
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    series = {name: [(metric.step, metric.value) for metric in history] for name, history in histories.items()}
    del series["round"]
    return series, run.data.params


def mlflow_run(path: Path):
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(path.resolve().parent.name)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == path.name
    return client, run


READERS = {"tensorboard": told_to_tensorboard, "mlflow": told_to_mlflow}
local_tools = pytest.mark.parametrize("tool", READERS)


def check_told(tool: str, path: Path, same_clock: bool = True) -> None:
    """The tool has every number of every line once, and of the summary what no line has."""
    series, settings = READERS[tool](path)
    directory = RunDirectory(path)
    lines, summary = directory.metrics(), directory.summary()
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    wanted: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in numbers({**line, "rejected": sum(line["rejected"].values())}).items():
            wanted.setdefault(name, []).append((line["round"], value))
    once = {"rounds": 4, "peak_rss_bytes": summary["peak_rss_bytes"], "extra/rejected": 0}
    once |= {f"communication/{name}": value for name, value in summary["communication"].items()}
    wanted |= {name: [(4, value)] for name, value in once.items()}
    assert {"personal/accuracy", "personal/clients/worst", "global/nll", "info/loss", "uncertainty/0"} <= wanted.keys()
    assert series.keys() == wanted.keys()
    for name, pairs in wanted.items():
        assert [step for step, _ in series[name]] == [step for step, _ in pairs], name
        if not same_clock and name.startswith(("seconds/", "peak_rss")):
            continue  # a round that was made twice took two times, and the tool keeps the first
        assert [value for _, value in series[name]] == pytest.approx([value for _, value in pairs], rel=1e-6), name
    assert settings["method/name"] == "fedavg"
    assert float(settings["run/rounds"]) == 4
    assert float(settings["method/optimiser/step_size"]) == priory.FedAvg().optimiser.step_size


@local_tools
def test_a_tool_has_what_the_run_directory_holds(tool, federation):
    priory.simulate(priory.FedAvg(), federation, out="a", track=tool, **SETTINGS)
    check_told(tool, Path("a"))


@local_tools
def test_a_stopped_run_goes_on_where_it_was_sent(tool, federation, capsys):
    calls = []
    stop = lambda: len(calls) > 2 or calls.append(0)  # noqa: E731
    assert priory.simulate(priory.FedAvg(), federation, out="a", track=tool, stop=stop, **SETTINGS).completed == 3
    before = RunDirectory("a").read(TRACKED)
    if tool == "mlflow":
        assert mlflow_run(Path("a"))[1].info.status == "KILLED"
    priory.resume("a", federation=federation, track=tool)
    check_told(tool, Path("a"))
    assert RunDirectory("a").read(TRACKED) == before
    if tool == "mlflow":
        assert mlflow_run(Path("a"))[1].info.status == "FINISHED"


@local_tools
@pytest.mark.parametrize(
    ("cls", "verb", "call"),
    [(Checkpoint, "commit", 1), (Checkpoint, "commit", 2), (RunDirectory, "write_summary", 1)],
    ids=["first commit", "second commit", "summary"],
)
def test_a_run_that_died_between_sending_and_committing_has_no_round_twice(
    tool, cls, verb, call, federation, monkeypatch
):
    real, calls = getattr(cls, verb), []

    def dying(self, *arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise RuntimeError("killed")
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cls, verb, dying)
        with pytest.raises(RuntimeError, match="killed"):
            priory.simulate(priory.FedAvg(), federation, out="a", track=tool, **SETTINGS)
    if tool == "mlflow":
        assert mlflow_run(Path("a"))[1].info.status == "FAILED"
    priory.resume("a", federation=federation, track=tool)
    check_told(tool, Path("a"), same_clock=tool == "tensorboard")


@local_tools
def test_a_finished_run_can_be_sent_later_and_again(tool, federation):
    priory.simulate(priory.FedAvg(), federation, out="a", **SETTINGS)
    files = {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()}
    for _ in range(2):
        priory.resume("a", federation=federation, track=tool)
        check_told(tool, Path("a"))
    assert {path: path.read_bytes() for path in files} == files


def test_a_run_without_a_directory_goes_to_mlflow(federation, tmp_path):
    import mlflow

    run = priory.simulate(priory.FedAvg(), federation, track="mlflow", **SETTINGS)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(tmp_path.name)
    (there,) = client.search_runs([experiment.experiment_id])
    assert there.info.run_name == "fedavg-digits-s3"
    assert there.data.metrics["personal/accuracy"] == pytest.approx(run.personal.accuracy)


def test_a_tool_that_fails_on_the_way_costs_no_training_and_nothing_is_lost(federation, monkeypatch):
    import mlflow

    real, calls = mlflow.MlflowClient.log_batch, []

    def log_batch(self, *arguments, **named):
        calls.append(named)
        if len(calls) > 2:
            raise ConnectionError("no answer.\nA page of details.")
        real(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
        with pytest.warns(UserWarning, match=r"no more metrics \(no answer\); `priory resume a --track mlflow` sends"):
            run = priory.simulate(priory.FedAvg(), federation, out="a", track="mlflow", **SETTINGS)
    assert run.completed == 4
    assert len(calls) == 3  # settings, one line, and the failure: it is not asked again
    priory.resume("a", federation=federation, track="mlflow")
    check_told("mlflow", Path("a"))


class FakeWandB:
    """The calls that W&B documents: `init`, and of a run `log`, `summary`, `finish`, `id` and `step`."""

    def __init__(self):
        self.runs: dict[str, SimpleNamespace] = {}
        self.asked: list[dict] = []

    def init(self, *, project, name, id, config, resume):
        self.asked.append({"project": project, "name": name, "id": id, "resume": resume})
        run = self.runs.setdefault(
            id or "made", SimpleNamespace(id=id or "made", step=0, lines=[], ends=[], summary={})
        )
        run.config = config
        run.finish = lambda exit_code: run.ends.append(exit_code)

        def log(values, step):
            run.lines.append((step, values))
            run.step = step + 1

        run.log = log
        return run


@pytest.fixture
def wandb(monkeypatch) -> FakeWandB:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_hears_every_line_once_over_two_sessions(wandb, federation):
    calls = []
    stop = lambda: len(calls) > 2 or calls.append(0)  # noqa: E731
    priory.simulate(priory.FedAvg(), federation, out="a", track="wandb", stop=stop, **SETTINGS)
    priory.resume("a", federation=federation, track="wandb")
    first = {"project": "priory", "name": "a", "id": None, "resume": "allow"}
    assert wandb.asked == [first, first | {"id": "made"}]
    (run,) = wandb.runs.values()
    lines = RunDirectory("a").metrics()
    assert [(step, values["round"]) for step, values in run.lines] == [(t, t) for t in (1, 2, 3, 4)]
    assert [v["personal/accuracy"] for _, v in run.lines] == [line["personal"]["accuracy"] for line in lines]
    assert run.config["method/name"] == "fedavg"
    assert run.summary["communication/up_bytes"] == RunDirectory("a").summary()["communication"]["up_bytes"]
    assert run.ends == [1, 0]  # stopped, finished


@pytest.mark.parametrize("command", ["run", "compare", "resume"])
@pytest.mark.parametrize("tool", ["tensorboard", "mlflow", "wandb"])
def test_a_tool_that_is_not_installed_ends_in_one_sentence_before_anything_is_made(tool, command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, tool, None)
    argv = ["resume", "nowhere"] if command == "resume" else [command, "fedavg", *DIGITS]
    assert main([*argv, "--track", tool]) == 2
    sentence = (
        f"track='{tool}' needs {tool}, which is not installed; `pip install 'priory[{tool}]'`, or leave track out."
    )
    assert capsys.readouterr().err == f"priory: {sentence}\n"
    assert list(Path().iterdir()) == []


def test_a_server_out_of_reach_ends_in_one_sentence_before_anything_is_made(monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nothing://there")
    assert main(["run", "fedavg", *DIGITS, "--track", "mlflow"]) == 2
    assert "track='mlflow' cannot be opened (" in capsys.readouterr().err.splitlines()[-1]
    assert list(Path().iterdir()) == []


def test_a_run_that_the_tool_has_forgotten_is_told_with_a_remedy(federation, capsys):
    priory.simulate(priory.FedAvg(), federation, out="a", track="mlflow", **SETTINGS)
    before = Path("a/track.json").write_text(json.dumps({"mlflow": "0" * 32}))
    with pytest.raises(priory.UsageError, match=r"0000.* not found\); mend that and .* delete a/track.json"):
        priory.resume("a", federation=federation, track="mlflow")
    assert len(Path("a/track.json").read_text()) == before


def test_tensorboard_needs_a_directory(federation):
    with pytest.raises(priory.UsageError, match="give out="):
        priory.simulate(priory.FedAvg(), federation, track="tensorboard", **SETTINGS)


def test_an_unknown_tool_is_told_the_known_ones(federation):
    with pytest.raises(priory.UsageError, match="choose from tensorboard, mlflow, wandb"):
        priory.simulate(priory.FedAvg(), federation, out="a", track="excel", **SETTINGS)
    assert not Path("a").exists()


def test_the_command_line_sends_a_run_and_a_comparison(capsys):
    assert main(["run", "fedavg", *DIGITS, "--out", "a", "--track", "tensorboard"]) == 0
    check_told("tensorboard", Path("a"))
    assert main(["compare", "fedavg", "local", *DIGITS, "--out", "c", "--track", "tensorboard"]) == 0
    check_told("tensorboard", Path("c/fedavg-s0"))
    assert list(Path("c/local-s0/tensorboard").iterdir())


def test_a_stopped_run_says_how_it_goes_on_being_sent(monkeypatch, capsys):
    from priory.cli import progress

    with monkeypatch.context() as patch:
        patch.setattr(progress.Lines, "evaluated", lambda self, line: os.kill(os.getpid(), 2))
        assert main(["run", "fedavg", *DIGITS, "--out", "a", "--track", "tensorboard"]) == 130
    assert "priory resume a --track tensorboard" in capsys.readouterr().out
    assert main(["resume", "a", "--track", "tensorboard"]) == 0
    check_told("tensorboard", Path("a"))


def test_names_hold_only_what_every_tool_takes_and_no_two_are_one():
    table = {"round": 3, "a/b": {"ü (1)": 1, "ü [1]": 2, "..": 3, "": 4}, "x": [1, 2], "y": None, "z": True, "n": 1e999}
    assert numbers(table) == {"a_b/ü _1_": 1.0, "a_b/ü _1__": 2.0, "a_b/_": 3.0, "a_b/__": 4.0}
