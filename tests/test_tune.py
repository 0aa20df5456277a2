"""Tuning: one compiled run for all traced values and seeds, on validation rows only."""

import dataclasses
import json
import os
import signal
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

import priory
from priory import tune as tuner
from priory.cli import main, progress, tuning
from priory.engine import Settings
from priory.stats import Estimate
from priory.tune import Axis, Setting, trials

SETTINGS = Settings(rounds=3, model="linear", cohort=4, eval_every=0)
STEP_SIZE = Axis("step-size", ("optimiser", "step_size"), (0.05, 0.2, 0.4), is_static=False)
MU = Axis("mu", ("mu",), (0.0, 1.0), is_static=False)
EPOCHS = Axis("epochs", ("work", "epochs"), (1, 2), is_static=True)


@pytest.fixture(scope="module")
def federation():
    return priory.data.load("digits").partition("dirichlet:1", clients=6, seed=0, validation=0.25)


def tuned(federation):
    return tuner.tune(priory.FedProx(), federation, [STEP_SIZE, MU], seeds=2, settings=SETTINGS)


@pytest.fixture(scope="module")
def grid(federation):
    """A grid with its number of compilations of the rounds."""
    before = trials._run_trials._cache_size()
    found = tuned(federation)
    return found, trials._run_trials._cache_size() - before


def test_one_compilation_serves_all_traced_values_and_seeds(grid):
    found, compilations = grid
    assert len(found) == 6
    assert compilations == 1


@pytest.mark.parametrize("place", [0, 3])
def test_a_cell_of_the_grid_equals_the_same_setting_simulated(grid, federation, place):
    setting = grid[0][place]
    options = {field.name: getattr(SETTINGS, field.name) for field in dataclasses.fields(SETTINGS)}
    for seed, scores in enumerate(setting.scores):
        run = priory.simulate(setting.method, tuner.without_test(federation), **{**options, "seed": seed})
        for part, alone in (("personal", run.personal), ("global", run.population)):
            for name in ("accuracy", "nll", "brier"):
                assert scores[part][name] == pytest.approx(getattr(alone, name), abs=1e-5)


def test_different_settings_and_seeds_score_differently(grid):
    nll = [scores["personal"]["nll"] for setting in grid[0] for scores in setting.scores]
    assert len(set(nll)) == len(nll)


def test_the_grid_comes_in_the_order_in_which_it_was_asked_for(grid):
    assert [tuple(setting.values.values()) for setting in grid[0]] == [
        (step, mu) for step in STEP_SIZE.values for mu in MU.values
    ]


@pytest.mark.slow  # three grids
def test_pieces_of_the_grid_score_as_the_whole(federation, monkeypatch):
    def grid(*places, settings=SETTINGS):
        axis = dataclasses.replace(STEP_SIZE, values=tuple(STEP_SIZE.values[place] for place in places))
        return tuner.tune(priory.Local(), federation, [axis], seeds=1, settings=settings)

    whole = [*grid(0, 1), *grid(1, 2)]  # two at a time, so that pieces of two share their program
    scores_of, pieces = trials.scores_of, []
    monkeypatch.setattr(trials, "scores_of", lambda *given: pieces.append(given) or scores_of(*given))
    two_cells = 2 * 6 * (65 * 10 * 4 + 1)  # bytes of two times six clients' weights and whether they have joined
    found = grid(0, 1, 2, settings=dataclasses.replace(SETTINGS, resident_bytes=two_cells))
    assert len(pieces) == 2
    for one, other in zip(found, [whole[0], whole[1], whole[3]], strict=True):
        assert one.scores[0]["personal"]["nll"] == pytest.approx(other.scores[0]["personal"]["nll"], abs=1e-5)


def test_static_fields_are_swept_too(federation):
    two = dataclasses.replace(STEP_SIZE, values=STEP_SIZE.values[:2])
    found = tuner.tune(priory.Local(), federation, [two, EPOCHS], seeds=1, settings=SETTINGS)
    assert [setting.method.work.epochs for setting in found] == [1, 2, 1, 2]
    assert all(setting.scores[0]["global"] is None for setting in found)


def test_test_rows_are_not_in_the_pool_and_validation_rows_take_their_place(federation):
    held = tuner.without_test(federation)
    assert held.num_examples == federation.train.total + federation.validation.total
    for client in range(len(federation.clients)):
        for here, there in (("train", "train"), ("test", "validation")):
            np.testing.assert_array_equal(held.x[held.rows(client, here)], federation.x[federation.rows(client, there)])
            np.testing.assert_array_equal(held.y[held.rows(client, here)], federation.y[federation.rows(client, there)])
    assert held.validation.total == 0


def test_tuning_never_reads_a_test_row(grid, federation):
    spoilt = federation.y.copy()
    for client in range(len(federation.clients)):
        spoilt[federation.rows(client, "test")] = 0
    assert (spoilt != federation.y).any()
    other = tuned(dataclasses.replace(federation, y=spoilt))
    assert [setting.scores for setting in grid[0]] == [setting.scores for setting in other]


def a_setting(*accuracies: float | None) -> Setting:
    return Setting({}, None, [{"personal": {"accuracy": value, "nll": value}, "global": None} for value in accuracies])


def test_the_best_is_the_highest_accuracy_or_the_lowest_loss():
    low, high, broken = a_setting(0.5), a_setting(0.9), a_setting(None)
    assert tuner.ranked([broken, low, high], "personal.accuracy") == [high, low, broken]
    assert tuner.ranked([broken, low, high], "personal.nll") == [low, high, broken]


def test_mean_and_error_are_those_over_seeds():
    assert dataclasses.astuple(a_setting(0.5, 0.7).score("personal.accuracy")) == pytest.approx((0.6, 0.1))
    assert a_setting(0.5, None).score("personal.accuracy") == Estimate(None)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("step-size=0.1,0.2", (0.1, 0.2)),
        ("step-size=log:1e-3..1e-1:3", (0.001, 0.01, 0.1)),
        ("step-size=linear:0.1..0.5:3", (0.1, 0.3, 0.5)),
        ("batch-size=16,32", (16, 32)),
        ("optimiser=sgd,adam", ("sgd", "adam")),
        ("clip=None,1", (None, 1.0)),
    ],
)
def test_over_lists_or_spaces_values(text, values):
    (axis,) = tuning.axes_from(priory.FedAvg(), [text])
    assert axis.values == pytest.approx(values) if isinstance(values[0], float) else axis.values == values


def test_the_command_writes_all_cells_and_a_manifest_that_runs(tmp_path, monkeypatch, capsys):
    jax.devices()
    monkeypatch.chdir(tmp_path)
    # The federation and the size of the grid above, so that its program serves here too.
    federation = ["--data", "digits", "--partition", "dirichlet:1", "--clients", "6", "--validation", "0.25"]
    grid = ["--over", "step-size=0.001,0.002,0.2", "--over", "mu=0,1", "--seeds", "2", "--out", "t"]
    assert main(["tune", "fedprox", *grid, *federation, "--model", "linear", "--rounds", "3", "--cohort", "4"]) == 0
    assert "the test rows were not read" in " ".join(capsys.readouterr().out.split())
    written = json.loads(Path("t/tuning.json").read_text())
    assert len(written["settings"]) == 6
    means = [setting["scores"]["personal.accuracy"]["mean"] for setting in written["settings"]]
    assert means == sorted(means, reverse=True)
    best = tomllib.loads(Path("t/manifest.toml").read_text())
    assert best["method"]["optimiser"]["step_size"] == written["settings"][0]["values"]["step-size"] == 0.2
    assert best["data"]["validation"] == 0.0
    assert main(["run", "t/manifest.toml", "--out", "best"]) == 0
    assert main(["tune", "fedprox", *grid, *federation]) == 2  # never overwritten


def test_the_rows_that_tuning_scores_on_cannot_judge_clients_too(capsys):
    jax.devices()
    assert main(["tune", "fedprox", "--over", "mu=0,1", "--data", "digits", "--exclude-uncertain", "0.2"]) == 2
    assert "exclude-uncertain=0.2 needs the rows that tuning scores on; leave it out" in capsys.readouterr().err


# Two programs of two trials each, those of the test of static fields above.
GRID = ["tune", "local", "--over", "epochs=1,2", "--over", "step-size=0.05,0.2"]
GRID += ["--data", "digits", "--partition", "dirichlet:1", "--clients", "6", "--validation", "0.25"]
GRID += ["--model", "linear", "--rounds", "3", "--cohort", "4"]


@pytest.fixture
def somewhere(somewhere_else, monkeypatch):
    """An empty directory, and blocks of one round."""
    monkeypatch.setattr(trials, "next_block", lambda pace: 1)


@pytest.fixture
def trained(monkeypatch):
    """The trials that are trained, part by part."""
    scores_of, seen = trials.scores_of, []
    monkeypatch.setattr(trials, "scores_of", lambda *given: seen.append(given[1]) or scores_of(*given))
    return seen


def at_round(number, act):
    """Progress that is told of, and acts after so many rounds of the whole grid."""
    return lambda self, done, total: act() if done == number else None


def table(printed: str) -> list[str]:
    """The table of the settings, and what follows it."""
    lines = printed.replace("whole/", "t/").splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("epochs")) :]


def settings_in(place: str) -> list:
    return json.loads(Path(place, "tuning.json").read_text())["settings"]


def kill() -> None:
    raise KeyboardInterrupt


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "act", "scored", "kept"),
    [(4, kill, 2, 0), (4, press_ctrl_c, 2, 1), (1, press_ctrl_c, 0, 1)],
    ids=["killed in the second part", "stopped in the second part", "stopped in the first part"],
)
def test_the_same_command_goes_on_where_it_was_left_and_ends_with_the_same_table(
    number, act, scored, kept, somewhere, trained, monkeypatch, capsys
):
    assert main([*GRID, "--out", "whole"]) == 0
    whole = capsys.readouterr().out
    command = [*GRID, "--out", "t"]
    with monkeypatch.context() as patch:
        patch.setattr(progress.Tenths, "__call__", at_round(number, act))
        assert main(command) == 130
    shown = capsys.readouterr().out
    assert ("personal.accuracy" in shown) == (act is press_ctrl_c and scored > 0)
    stopped = f"Stopped with {scored} of 4 settings scored; the same command goes on from t."
    assert (stopped in shown) == (act is press_ctrl_c)
    assert not Path("t/tuning.json").exists()
    trained.clear()
    rounds = []
    monkeypatch.setattr(progress.Tenths, "__call__", lambda self, done, total: rounds.append(done))
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert ("2 of 4 trials are scored already and are loaded from t." in shown) == (scored == 2)
    assert [len(cells) for cells in trained] == [2] * (2 - scored // 2)
    assert rounds[0] == kept  # the round that was done
    assert table(shown) == table(whole)
    assert settings_in("t") == settings_in("whole")
    assert sorted(os.listdir("t/trials")) == ["manifest.toml", "scores.json"]


def test_a_finished_tuning_is_loaded_and_a_changed_command_reuses_nothing(somewhere, trained, capsys):
    command = [*GRID, "--out", "t"]
    assert main(command) == 0
    first = capsys.readouterr().out
    trained.clear()
    assert main(command) == 0
    again = capsys.readouterr().out
    assert "4 of 4 trials are scored already and are loaded from t." in again
    assert table(again) == table(first)
    for changed, says in (
        (["--rounds", "4"], "t holds a tuning with rounds=3 where this one has rounds=4; choose another --out."),
        (["--data-seed", "1"], "t holds a tuning with seed=0 where this one has seed=1"),
        (["--clip", "1"], "t holds a tuning with optimiser.clip=None where this one has optimiser.clip=1.0"),
        (["--over", "clip=1,2"], "t holds a tuning with over.clip=None where this one has over.clip=['1.0', '2.0']"),
        (["--seeds", "2"], "t holds a tuning with seeds=1 where this one has seeds=2"),
    ):
        assert main([*command, *changed]) == 2
        assert says in capsys.readouterr().err
    assert trained == []


def test_the_usual_directory_is_that_of_the_same_command(somewhere_else, monkeypatch, capsys):
    monkeypatch.setattr(tuner, "tune", lambda *_, kept, **__: kept.begin() or [])
    for rounds in ("3", "4", "3"):
        assert main([*GRID, "--rounds", rounds]) == 0
    assert sorted(os.listdir("runs")) == ["tune-local-digits", "tune-local-digits-2"]
    for place, rounds in (("tune-local-digits", 3), ("tune-local-digits-2", 4)):
        assert tomllib.loads(Path("runs", place, "trials/manifest.toml").read_text())["run"]["rounds"] == rounds


def test_when_a_part_fails_the_others_are_kept_and_the_same_command_makes_the_rest(
    somewhere, trained, monkeypatch, capsys
):
    real = trials.scores_of

    def diverging(ready, cells, *rest):
        if cells[0].values["epochs"] == 1:
            raise priory.UsageError("its training diverged; lower step-size.")
        return real(ready, cells, *rest)

    command = [*GRID, "--out", "t"]
    with monkeypatch.context() as patch:
        patch.setattr(trials, "scores_of", diverging)
        assert main(command) == 2
    shown = capsys.readouterr()
    part = "epochs=1, step-size=0.05, seed=0 to epochs=1, step-size=0.2, seed=0"
    assert shown.err.splitlines()[-1] == (
        f"priory: 1 of the parts of the grid failed: {part}: its training diverged; lower step-size."
    )
    assert [one["values"]["epochs"] for one in settings_in("t")] == [2, 2]
    assert "priory run t/manifest.toml" in shown.out
    trained.clear()
    assert main(command) == 0
    assert [len(cells) for cells in trained] == [2]
    assert sorted(one["values"]["epochs"] for one in settings_in("t")) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["fedhb-mixture", "--over", "num-prototypes=1,9"], "num-prototypes=9 exceeds the 6 clients"),
        (["fedbnn", "--over", "step-size=0.1,0.2"], "fedbnn needs inputs that are known to all clients"),
        (["fedavg", "--over", "step-size=0.1", "--models", "linear,mlp:8"], "fedavg exchanges what depends"),
        (["local", "--over", "step-size=0.1", "--models", "linear,mlp:8"], "models=linear,mlp:8 are several"),
        (["local", "--over", "step-size=0.1", "--by", "global.nll"], "by=global.nll scores a global model, and local"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_what_any_setting_is_refused_for_is_raised_before_the_first_round(
    argv, says, somewhere_else, trained, tmp_path, capsys
):
    model = [] if "--models" in argv else ["--model", "linear"]
    assert main(["tune", *argv, *GRID[6:14], *model, "--rounds", "3"]) == 2
    assert says in capsys.readouterr().err
    assert trained == []
    assert list(tmp_path.iterdir()) == []
