"""`priory onboard`: what a client that comes later gets, is shown and finds on disk, whatever it brings."""

import csv
import errno
import json
import os
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import priory
from priory import methods
from priory.cli import main, onboard, rows
from priory.core.sealed import unsealed
from priory.core.struct import replace, struct
from priory.data.splits import Purpose, hold_out, hold_out_units, stream
from priory.fed.capabilities import Certifies, SharedModel, Unlabelled
from tests.cli.conftest import patients, visits

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "newcomers.md"

pytestmark = pytest.mark.xdist_group("command line")


@struct
class Shifted(priory.FedAvg, Unlabelled):
    """FedAvg whose posterior from inputs alone moves the last bias by their mean."""

    def infer(self, task, down, data, key):
        del task, key
        rows = data.padded()
        mean = jnp.sum(jnp.where(rows.mask[:, None, None, None] > 0, rows.x, 0.0)) / data.count
        bias = down.weights["Dense_0"]["bias"]
        moved = {**down.weights["Dense_0"], "bias": bias + 0.1 * mean * jnp.arange(bias.size)}
        return replace(down, weights={**down.weights, "Dense_0": moved})


@pytest.fixture(autouse=True)
def _data(somewhere_else, monkeypatch):
    monkeypatch.setitem(methods.REGISTRY, "shifted", Shifted)
    digits = priory.data.load("digits")
    # A model learns from 40 rows and is scored on 10, or predicts 10: every number of rows is a program of its own.
    np.savez("clinic.npz", x=digits.x[:50], y=digits.y[:50])
    np.savez("forty.npz", x=digits.x[:40], y=digits.y[:40])
    np.savez("ten.npz", x=digits.x[:10], y=digits.y[:10])
    np.savez("mirror.npz", x=digits.x[:50, :, ::-1], y=digits.y[:50])  # rows that nobody trained on
    np.savez("ward.npz", x=digits.x[50:60])


def complaint(argv, capsys) -> str:
    """The one sentence that the command ends in."""
    capsys.readouterr()
    assert main(argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert re.fullmatch(r"priory: .*[.]", lines[0])
    return lines[0]


def rows_of(path) -> list[dict[str, str]]:
    with Path(path).open() as file:
        return list(csv.DictReader(file))


def told(argv, capsys) -> str:
    capsys.readouterr()
    assert main(argv) == 0
    return capsys.readouterr().out


def test_labels_are_scored_beside_every_way_that_needs_less(made, capsys):
    out = told(["onboard", made("shifted"), "--data", "clinic.npz"], capsys)
    assert "40 rows with labels give a personal model, scored on 10 held out" in out
    table = [line for line in out.splitlines() if re.match(r"(no data|inputs)", line)]
    assert [re.split(r"  +", line.strip())[0] for line in table] == ["no data", "inputs alone", "inputs and labels"]
    assert out.rstrip().endswith("scores.json in shifted/onboarded/clinic")
    found = json.loads(Path("shifted/onboarded/clinic/scores.json").read_text())
    assert (found["rows"], found["held_out"], found["test"], found["seed"]) == (40, 10, 0.2, 0)
    for line, way in zip(table, ("global", "unlabelled", "labelled"), strict=True):
        assert f" {found['scores'][way]['nll']:.3f} " in line
    assert sorted(os.listdir("shifted/onboarded/clinic")) == ["model", "scores.json"]


def test_the_scores_are_those_of_models_that_never_saw_the_held_out_rows(made):
    assert main(["onboard", made("shifted"), "--data", "clinic.npz", "--test", "0.8", "--seed", "5"]) == 0
    found = json.loads(Path("shifted/onboarded/clinic/scores.json").read_text())["scores"]
    run, (x, y) = priory.load("shifted"), np.load("clinic.npz").values()
    held = hold_out(np.zeros(50, int), np.zeros(50, int), 0.8, stream(5, Purpose.TEST))
    for way, model in (
        ("global", run.onboard()),
        ("unlabelled", run.onboard(x[~held])),
        ("labelled", run.onboard(x[~held], y[~held])),
    ):
        assert found[way]["nll"] == pytest.approx(model.score(x[held], y[held]).nll, rel=1e-6)


def test_the_seed_chooses_the_rows_held_out(made):
    name = made("fedavg")
    for seed in ("0", "0", "1"):
        assert main(["onboard", name, "--data", "clinic.npz", "--seed", seed]) == 0
    first, again, other = (
        json.loads(Path(f"fedavg/onboarded/clinic{end}/scores.json").read_text()) for end in ("", "-2", "-3")
    )
    assert first == again
    assert first["scores"] != other["scores"]


def test_with_no_row_held_out_the_model_from_all_labels_predicts(made, capsys):
    out = told(["onboard", made("fedavg"), "--data", "forty.npz", "--test", "0", "--predict", "ward.npz"], capsys)
    assert "10 rows predicted by the personal model" in out
    assert sorted(os.listdir("fedavg/onboarded/forty")) == ["model", "predictions.csv"]
    run, (x, y) = priory.load("fedavg"), np.load("forty.npz").values()
    expected = run.onboard(x, y).predict(np.load("ward.npz")["x"])
    found = rows_of("fedavg/onboarded/forty/predictions.csv")
    assert [row["label"] for row in found] == expected.name.tolist()
    p = [[float(row[f"p_{name}"]) for name in run.federation.classes] for row in found]
    np.testing.assert_allclose(p, expected.probabilities, rtol=1e-4)


def test_labels_and_rows_to_predict_give_scores_and_predictions(made):
    assert main(["onboard", made("fedavg"), "--data", "clinic.npz", "--predict", "ward.npz"]) == 0
    assert sorted(os.listdir("fedavg/onboarded/clinic")) == ["model", "predictions.csv", "scores.json"]


def test_a_batch_boundary_does_not_show(made, monkeypatch):
    name = made("fedavg")
    for size in (1024, 7):
        monkeypatch.setattr(rows, "BATCH", size)
        assert main(["onboard", name, "--predict", "ward.npz"]) == 0
    first, second = (rows_of(f"fedavg/onboarded/{one}/predictions.csv") for one in ("ward", "ward-2"))
    assert len(first) == 10
    for one, other in zip(first, second, strict=True):
        assert [float(value) for value in one.values()] == pytest.approx([float(v) for v in other.values()], rel=1e-4)


def test_inputs_alone_give_what_the_method_infers(made, capsys):
    out = told(["onboard", made("shifted"), "--data", "ward.npz"], capsys)
    assert "10 rows without labels give a model from the inputs alone" in out
    x = np.load("ward.npz")["x"]
    p = priory.load("shifted").onboard(x).predict(x).probabilities
    assert f"mean entropy {-np.sum(p * np.log(p), axis=1).mean():.3f} nats" in out
    found = rows_of("shifted/onboarded/ward/predictions.csv")
    np.testing.assert_allclose([float(row["p_3"]) for row in found], p[:, 3], rtol=1e-4)
    assert not Path("shifted/onboarded/ward/scores.json").exists()


def test_a_method_that_cannot_use_inputs_alone_says_that_it_gives_the_population(made, capsys):
    out = told(["onboard", made("fedavg"), "--data", "ward.npz"], capsys)
    assert "give the model of the population, since fedavg cannot use inputs without labels" in out
    assert main(["onboard", "fedavg", "--predict", "ward.npz"]) == 0
    one, other = (Path(f"fedavg/onboarded/{name}/predictions.csv").read_bytes() for name in ("ward", "ward-2"))
    assert one == other


def test_a_client_without_data_gets_draws_from_the_population(made, capsys):
    out = told(["onboard", made("pfedbayes"), "--predict", "ward.npz"], capsys)
    assert "a client without data gets the model of the population" in out
    expected = priory.load("pfedbayes").onboard().predict(np.load("ward.npz")["x"])
    assert expected.predictive.outputs.shape[0] > 1
    found = rows_of("pfedbayes/onboarded/ward/predictions.csv")
    assert [row["label"] for row in found] == expected.name.tolist()


def test_labels_of_rows_to_predict_are_not_read(made):
    x = np.load("ward.npz")["x"]
    np.savez("ward.npz", x=x, y=np.full(10, "unknown"))
    assert main(["onboard", made("fedavg"), "--predict", "ward.npz"]) == 0


def test_nothing_written_before_is_touched(made):
    name = made("fedavg")
    assert main(["onboard", name, "--data", "ward.npz", "--name", "a"]) == 0
    before = {path: path.read_bytes() for path in Path(name).rglob("*") if path.is_file()}
    assert main(["onboard", name, "--data", "ward.npz", "--name", "a"]) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(os.listdir("fedavg/onboarded")) == ["a", "a-2"]


def test_a_table_is_read_by_its_columns_with_and_without_the_target(made, capsys):
    frame, name = patients()[["age", "sex", "ill", "site"]], made("point")
    frame[["sex", "age", "ill"]][:40].to_csv("new.csv", index=False)  # in another order, and without the client
    assert "32 rows with labels" in told(["onboard", name, "--data", "new.csv"], capsys)
    frame[["age", "sex"]][:8].to_csv("new.csv", index=False)
    assert "8 rows without labels" in told(["onboard", name, "--data", "new.csv"], capsys)
    expected = priory.load(name).onboard().predict(frame[["age", "sex"]][:8])
    assert [row["label"] for row in rows_of("point/onboarded/new-2/predictions.csv")] == expected.name.tolist()
    frame.rename(columns={"ill": "sick"})[:40].to_csv("new.csv", index=False)
    assert "32 rows with labels" in told(["onboard", name, "--data", "new.csv", "--target", "sick"], capsys)
    for text, named in (
        ("age\n3\n", "new.csv: column 'sex' is absent"),
        ("age,sex,ill\n3,f,maybe\n", "new.csv: y has the labels maybe"),
        ("age,sex\n", "new.csv: no rows"),
        ("", "new.csv is empty"),
        ("age,sex\n1,2,3\n", "new.csv cannot be read as CSV"),
    ):
        Path("new.csv").write_text(text)
        assert named in complaint(["onboard", name, "--data", "new.csv"], capsys)
    assert "give a .csv file with the columns age, sex" in complaint(["onboard", name, "--data", "ward.npz"], capsys)
    frame.to_csv("new.csv", index=False)
    assert "'illness' is not known" in complaint(["onboard", name, "--data", "new.csv", "--target", "illness"], capsys)


def test_rows_of_a_group_are_held_out_together(made, capsys):
    frame, name = visits()[["age", "sex", "ill", "patient"]], made("grouped")
    frame[:40].to_csv("new.csv", index=False)
    out = told(["onboard", name, "--data", "new.csv"], capsys)
    learned, held, num = map(
        int, re.search(r"(\d+) rows .* on (\d+) held out, all those of (\d+) values", out).groups()
    )
    assert learned + held == 40
    counts = frame[:40].patient.value_counts()
    # A subset of whole groups: 9 of them have 4 rows, and the rest less.
    assert num == round(0.2 * len(counts))
    assert held >= counts.nsmallest(num).sum()
    groups = np.unique(frame.patient[:40], return_inverse=True)[1]
    alike = np.zeros(40, np.int32)
    is_test = hold_out_units(alike, alike, groups, 0.2, stream(0, Purpose.TEST))
    assert not set(groups[is_test]) & set(groups[~is_test])
    run = priory.load(name)
    model = run.onboard(frame[:40][~is_test][["age", "sex"]], frame[:40][~is_test].ill)
    expected = model.score(frame[:40][is_test][["age", "sex"]], frame[:40][is_test].ill)
    scores = json.loads(Path("grouped/onboarded/new/scores.json").read_text())["scores"]
    assert scores["labelled"]["nll"] == pytest.approx(expected.nll, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"patient": None}, "column 'patient' is missing in 40 of 40 rows"),
        ({"patient": "P1"}, "test=0.2 holds out none of 40 rows with 1 value of 'patient', so that nothing is scored"),
        ({}, "new.csv: column 'patient' is absent, and rows with the same 'patient' stay on one side of every split"),
    ],
)
def test_a_file_without_groups_ends_in_one_sentence_where_the_run_has_them(made, capsys, change, named):
    patients()[["age", "sex", "ill"]][:40].assign(**change).to_csv("new.csv", index=False)
    assert named in complaint(["onboard", made("grouped"), "--data", "new.csv"], capsys)
    assert not Path("grouped/onboarded").exists()
    assert main(["onboard", "grouped", "--data", "new.csv", "--no-labels"]) == 0  # where no row is held out


@pytest.mark.slow  # a run of its own
def test_a_regression_predicts_mean_and_sd_with_the_clients_standard_errors(capsys):
    rows = [f"{client},{x},{2 * x + client},0.5" for client in range(4) for x in range(10)]
    Path("d.csv").write_text("\n".join(["who,x,y,se", *rows]) + "\n")
    columns = ["--data", "d.csv", "--target", "y", "--client", "who", "--scale", "se", "--task", "regression"]
    assert main(["run", "fedavg", *columns, "--rounds", "2", "--step-size", "0.01", "--out", "a"]) == 0
    Path("new.csv").write_text("\n".join(["x,y,se", *(f"{x},{2 * x},0.25" for x in range(10))]) + "\n")
    out = told(["onboard", "a", "--data", "new.csv"], capsys)
    assert "RMSE" in out
    Path("new.csv").write_text("\n".join(["x,se", *(f"{x},0.25" for x in range(10))]) + "\n")
    assert "mean standard deviation 0.25" in told(["onboard", "a", "--data", "new.csv", "--name", "b"], capsys)
    found = rows_of("a/onboarded/b/predictions.csv")
    assert list(found[0]) == ["mean", "sd"]
    expected = priory.load("a").onboard().predict(pd.read_csv("new.csv"), scale=np.full(10, 0.25))
    np.testing.assert_allclose([float(row["mean"]) for row in found], expected.mean, rtol=1e-4, atol=1e-6)
    Path("new.csv").write_text("x\n1\n2\n")
    assert "new.csv: no 'se', and the run knows" in complaint(["onboard", "a", "--data", "new.csv"], capsys)


@pytest.mark.parametrize(
    ("given", "lacking"),
    [(["--data", "ward.npz"], "labels"), (["--predict", "ward.npz"], "data")],
    ids=["inputs alone", "nothing"],
)
def test_a_method_without_a_global_model_says_what_it_needs(made, capsys, given, lacking):
    sentence = complaint(["onboard", made("local"), *given], capsys)
    assert f"local has nothing for a client without {lacking}, since it has no global model; give " in sentence
    assert not Path("local/onboarded").exists()


def test_a_method_without_a_global_model_onboards_with_labels(made, capsys):
    out = told(["onboard", made("local"), "--data", "clinic.npz"], capsys)
    assert [line[:17] for line in out.splitlines() if line.startswith(("no data", "inputs"))] == ["inputs and labels"]


@pytest.mark.parametrize(
    ("arrays", "more", "named"),
    [
        (None, ["--data", "absent.npz"], "absent.npz is no file"),
        (None, ["--data", "clinic.txt"], "clinic.txt is neither a .npz nor a .csv or .parquet file"),
        (None, ["--data", "clinic.csv"], "clinic.csv is no file"),
        (None, [], "give --predict FILE, or --data FILE"),
        (None, ["--data", "clinic.npz", "--test", "1"], "test=1.0 lies outside [0, 1)"),
        (None, ["--data", "clinic.npz", "--test", "-0.1"], "test=-0.1 lies outside [0, 1)"),
        (None, ["--data", "clinic.npz", "--test", "0"], "test=0 holds out none of 50 rows"),
        (None, ["--data", "clinic.npz", "--seed", "-1"], "seed=-1 is below 0"),
        (None, ["--data", "clinic.npz", "--name", "../a"], "name='../a' is no plain name"),
        (None, ["--data", "clinic.npz", "--name", ""], "name='' is no plain name"),
        ({"y": np.zeros(3, int)}, ["--data", "bad.npz"], "bad.npz has no array 'x', only y"),
        ({"x": np.zeros((3, 64))}, ["--data", "bad.npz"], "bad.npz: Examples of shape (64,) do not fit"),
        ({"x": np.zeros((0, 8, 8, 1))}, ["--data", "bad.npz"], "bad.npz: no rows"),
        ({"x": np.zeros((3, 8, 8, 1)), "y": np.zeros(2)}, ["--data", "bad.npz"], "y has shape (2,) and x 3 rows"),
        ({"x": np.zeros((3, 8, 8, 1)), "y": np.full(3, 11)}, ["--data", "bad.npz"], "bad.npz: y has the labels 11"),
        ({"x": np.full((3, 8, 8, 1), np.nan)}, ["--predict", "bad.npz"], "bad.npz: x is NaN or infinite in 3 of 3"),
    ],
)
def test_what_cannot_be_used_ends_in_one_sentence_and_writes_nothing(made, capsys, arrays, more, named):
    if arrays is not None:
        np.savez("bad.npz", **arrays)
    assert named in complaint(["onboard", made("fedavg"), *more], capsys)
    assert not Path("fedavg/onboarded").exists()


@pytest.mark.parametrize("text", ["", "no archive"])
def test_a_file_that_is_no_archive_ends_in_one_sentence(made, capsys, text):
    Path("bad.npz").write_text(text)
    assert "bad.npz cannot be read" in complaint(["onboard", made("fedavg"), "--data", "bad.npz"], capsys)
    with Path("bad.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    assert "bad.npz cannot be read" in complaint(["onboard", "fedavg", "--data", "bad.npz"], capsys)


def test_a_table_does_not_fit_a_run_on_arrays(made, capsys):
    Path("clinic.csv").write_text("a,b\n1,2\n")
    assert "give a .npz file with x" in complaint(["onboard", made("fedavg"), "--data", "clinic.csv"], capsys)


def test_a_run_that_is_not_finished_is_refused(made, capsys):
    Path(made("fedavg"), "summary.json").unlink()
    sentence = complaint(["onboard", "fedavg", "--data", "clinic.npz"], capsys)
    assert "fedavg is not finished" in sentence
    assert "priory resume fedavg" in sentence
    assert "cannot be read" in complaint(["onboard", "absent", "--data", "clinic.npz"], capsys)


def test_a_full_disk_ends_in_one_sentence(made, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(onboard, "write_atomically", full)
    sentence = complaint(["onboard", made("fedavg"), "--data", "ward.npz"], capsys)
    assert "onboarded/ward cannot be written (No space left on device)" in sentence


def test_the_help_explains_every_flag(capsys):
    assert main(["onboard", "--help"]) == 0
    out = capsys.readouterr().out
    for word in (
        "DIR",
        "--data",
        "--predict",
        "--target",
        "--name",
        "--test",
        "--seed",
        "--no-labels",
        "--delta",
        "--draws",
        "population",
    ):
        assert word in out


def test_the_page_tells_which_method_offers_which_way():
    rows = re.findall(r"^\| `([\w-]+)` \| (yes|–) \| (yes|–) \| (yes|–) \|$", PAGE.read_text(), re.MULTILINE)
    known = {name: cls for name, cls in methods.REGISTRY.items() if cls is not Shifted}
    assert {name: ways for name, *ways in rows} == {
        name: ["yes", *("yes" if isinstance(cls(), way) else "–" for way in (Unlabelled, SharedModel))]
        for name, cls in known.items()
    }


def test_the_page_tells_which_methods_certify():
    section = PAGE.read_text().split("### Which method certifies what")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)
    assert rows == [name for name, cls in methods.REGISTRY.items() if isinstance(cls(), Certifies)]


@pytest.mark.slow  # trains fedvi, whose programs no other command needs
@pytest.mark.filterwarnings(
    "ignore::priory.fed.capabilities.AdviceWarning"
)  # one round is too little, and is said to be
def test_the_commands_of_the_page_run(capsys):
    commands = re.findall(r"^\$ priory ([^#\n]*runs/digits[^#\n]*)", PAGE.read_text(), re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["run", *["onboard"] * 5]
    for command in commands:
        short = re.sub(r" --rounds \d+", "", command).split()
        assert main([*short, *(["--rounds", "1", "--model", "linear"] if short[0] == "run" else [])]) == 0
    assert sorted(os.listdir("runs/digits/onboarded")) == ["clinic", "clinic-2", "clinic-3", "nobody", "ward"]
    assert "newcomers, unlabelled" in capsys.readouterr().out


@pytest.mark.slow  # tests/engine/test_certificates.py has the certificate
def test_a_bayesian_model_comes_with_a_certificate_of_the_rows_it_learned_from(made, capsys):
    out = told(["onboard", made("pfedbayes"), "--data", "mirror.npz", "--delta", "0.1", "--draws", "1500"], capsys)
    found = unsealed(Path("pfedbayes/onboarded/mirror/certificate.json").read_text())
    assert (found["rows"], found["draws"], found["delta"]) == (40, 1500, 0.1)
    run, (x, y) = priory.load("pfedbayes"), np.load("mirror.npz").values()
    held = hold_out(np.zeros(50, int), np.zeros(50, int), 0.2, stream(0, Purpose.TEST))
    model = run.onboard(x[~held], y[~held])
    assert found == model.certificate(delta=0.1, draws=1500).to_json()
    assert "with probability 0.9 the error on new rows is at most: Gibbs" in out
    for sentence in found["assumptions"]:
        assert f"  if {sentence}" in out
    table = json.loads(Path("pfedbayes/onboarded/mirror/scores.json").read_text())
    doubts = table["uncertainty"]
    assert doubts["entropy"] == pytest.approx(table["scores"]["labelled"]["uncertainty"], rel=1e-5)
    assert 0 < doubts["epistemic"] < doubts["entropy"]
    assert "on the held-out rows is" in out


def test_a_bound_that_says_nothing_is_called_vacuous(made, capsys):
    x, y = np.load("mirror.npz").values()
    np.savez("wrong.npz", x=x, y=(y + 5) % 10)  # wrong labels, so that the error is above chance
    out = told(["onboard", made("pfedbayes"), "--data", "wrong.npz", "--draws", "1500"], capsys)
    assert out.count("(vacuous)") == 3
    assert json.loads(Path("pfedbayes/onboarded/wrong/certificate.json").read_text())["vacuous"] is True


def test_rows_that_participants_trained_on_are_refused_a_certificate(made, capsys):
    out = told(["onboard", made("pfedbayes"), "--data", "clinic.npz"], capsys)
    assert "rows are among those that participants trained on, so that the prior has seen them" in out
    assert not Path("pfedbayes/onboarded/clinic/certificate.json").exists()


def test_a_method_without_a_certificate_says_why_and_writes_none(made, capsys):
    out = told(["onboard", made("fedavg"), "--data", "clinic.npz"], capsys)
    assert "fedavg has no certificate: it has no distribution over networks" in out
    assert sorted(os.listdir("fedavg/onboarded/clinic")) == ["model", "scores.json"]


@pytest.mark.parametrize(
    ("more", "named"),
    [(["--delta", "0"], "delta=0 is no chance"), (["--draws", "10"], "draws=10 says little")],
)
def test_numbers_that_no_certificate_can_have_end_in_one_sentence(made, capsys, more, named):
    assert named in complaint(["onboard", made("fedavg"), "--data", "clinic.npz", *more], capsys)
    assert not Path("fedavg/onboarded").exists()


def test_labels_that_are_left_aside_score_what_inputs_alone_give(made, capsys):
    out = told(["onboard", made("shifted"), "--data", "ten.npz", "--no-labels"], capsys)
    assert "10 rows whose labels are left aside give a model from the inputs alone" in out
    assert sorted(os.listdir("shifted/onboarded/ten")) == ["model", "predictions.csv", "scores.json"]
    found = json.loads(Path("shifted/onboarded/ten/scores.json").read_text())["scores"]
    run, (x, y) = priory.load("shifted"), np.load("ten.npz").values()
    assert found["unlabelled"]["nll"] == pytest.approx(run.onboard(x).score(x, y).nll, rel=1e-6)
    assert found["global"]["nll"] == pytest.approx(run.onboard().score(x, y).nll, rel=1e-6)
    assert set(found) == {"global", "unlabelled"}
