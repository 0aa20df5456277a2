"""`priory predict`, `priory export` and `priory clients`: a client's model at work, and what cannot be used."""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import priory
from priory.cli import main
from priory.data import tables
from tests.cli.conftest import SITES, patients

pytestmark = pytest.mark.xdist_group("command line")


@pytest.fixture
def rows():
    """Five patients in x.csv, with a number of their own."""
    frame = patients()[:5].assign(id=np.arange(5) + 100)
    frame[["sex", "id", "age"]].to_csv("x.csv", index=False)  # in another order
    return frame


def told(argv, capsys) -> str:
    capsys.readouterr()
    assert main(argv) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def complaint(argv, capsys) -> str:
    """The one sentence that the command ends in; no file is made or changed."""
    before = {path: path.stat().st_mtime_ns for path in sorted(Path().rglob("*")) if path.is_file()}
    capsys.readouterr()
    assert main(argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert re.fullmatch(r"priory: .*[.?]", lines[0])
    assert before == {path: path.stat().st_mtime_ns for path in sorted(Path().rglob("*")) if path.is_file()}
    return lines[0]


def read(path) -> list[dict[str, str]]:
    with Path(path).open() as file:
        return list(csv.DictReader(file))


def test_each_row_gets_probabilities_doubts_and_a_set(made, rows, capsys):
    ask = ["predict", made("bayes"), "--client", "north", "--data", "x.csv", "--keep", "id", "--abstain", "0.6"]
    out = told([*ask, "--out", "p.csv"], capsys)
    assert "5 rows predicted by the model of north" in out
    run = priory.load("bayes")
    held = run.federation.validation.count[run.federation.index("north")]
    assert f"calibrated on {held} held-out rows; they hold if: the held-out rows and the rows that are" in out
    found, expected = read("p.csv"), run.client("north").predict(rows)
    names = ["id", "label", "p_no", "p_yes", "entropy", "epistemic_share", "set", "abstain"]
    assert list(found[0]) == names
    assert [row["id"] for row in found] == ["100", "101", "102", "103", "104"]
    assert [row["label"] for row in found] == expected.name.tolist()
    for name, values in expected.columns(0.9, 0.6).items():
        if name not in ("label", "set", "abstain"):
            np.testing.assert_allclose([float(row[name]) for row in found], values, rtol=1e-4, atol=1e-6)
    assert [row["abstain"] for row in found] == [str(top < 0.6) for top in expected.probabilities.max(axis=1)]
    assert [row["set"].split("|") for row in found] == expected.columns()["set"].tolist()
    told([*ask, "--out", "p.parquet"], capsys)
    told([*ask, "--out", "p.npz"], capsys)
    frame, arrays = pd.read_parquet("p.parquet"), np.load("p.npz")
    assert list(frame) == names
    np.testing.assert_array_equal(frame["p_yes"], expected.probabilities[:, 1])
    assert [list(row) for row in frame["set"]] == expected.columns()["set"].tolist()
    np.testing.assert_array_equal(arrays["probabilities"], expected.probabilities)
    np.testing.assert_array_equal(arrays["set"], expected.sets(0.9))
    assert (arrays["id"].tolist(), arrays["classes"].tolist()) == ([100, 101, 102, 103, 104], ["no", "yes"])


def test_an_exported_model_predicts_what_the_run_does_and_has_its_draws(made, rows, capsys):
    rows[["age", "sex"]].to_csv("x.csv", index=False)
    files = "draws.nc, model.json, weights.safetensors in bayes/exported/west"
    assert files in told(["export", made("bayes"), "--client", "west", "--draws", "20"], capsys)
    told(["export", "bayes", "--client", "west", "--draws", "0", "--out", "plain"], capsys)
    assert sorted(os.listdir("plain")) == ["model.json", "weights.safetensors"]
    told(["predict", "bayes", "--client", "west", "--data", "x.csv", "--out", "a.csv"], capsys)
    shutil.move("bayes/exported/west", "elsewhere")
    shutil.rmtree("bayes")
    told(["predict", "elsewhere", "--data", "x.csv", "--out", "b.csv"], capsys)
    assert Path("a.csv").read_text() == Path("b.csv").read_text()
    model = priory.load_model("elsewhere")
    draws = priory.effects.arviz().from_netcdf("elsewhere/draws.nc").posterior
    assert draws["Dense_0.kernel"].sizes == {
        "chain": 1, "draw": 20, "client": 1, "Dense_0.kernel_dim_0": 3, "Dense_0.kernel_dim_1": 2,
    }  # fmt: skip
    assert (draws.attrs["method"], draws.client.values.tolist()) == ("pfedbayes", ["west"])
    assert "client=west says nothing" in complaint(
        ["predict", "elsewhere", "--client", "west", "--data", "x.csv", "--out", "c.csv"], capsys
    )
    assert model.source.client == "west"


def test_a_point_estimate_has_no_draws_and_without_validation_rows_no_sets(made, rows, capsys):
    out = told(["export", made("point"), "--client", "east"], capsys)
    assert "fedavg is a point estimate and has no posterior to draw from, so there is no draws.nc." in out
    assert "model.json, weights.safetensors in point/exported/east" in out
    out = told(["predict", "point/exported/east", "--data", "x.csv", "--out", "p.csv", "--keep", "id"], capsys)
    assert "no prediction sets: the client has no held-out rows to calibrate on" in out
    assert list(read("p.csv")[0]) == ["id", "label", "p_no", "p_yes", "entropy", "epistemic_share"]
    assert {row["epistemic_share"] for row in read("p.csv")} == {"0"}


def test_a_newcomers_model_is_kept_with_its_run(made, rows, capsys):
    patients()[["age", "sex", "ill"]][:40].to_csv("south.csv", index=False)
    told(["onboard", made("point"), "--data", "south.csv"], capsys)
    assert re.search(r"^south +came later", told(["clients", "point"], capsys), re.MULTILINE)
    told(["predict", "point", "--client", "south", "--data", "x.csv", "--out", "p.csv", "--keep", "id"], capsys)
    model = priory.load_model("point/onboarded/south/model")
    assert (model.source.client, len(model.calibration)) == ("south", 8)
    assert [row["label"] for row in read("p.csv")] == model.predict(rows).name.tolist()
    patients()[["age", "sex", "ill"]][:40].to_csv("east.csv", index=False)
    told(["onboard", "point", "--data", "east.csv"], capsys)
    ask = ["predict", "point", "--client", "east", "--data", "x.csv", "--out", "q.csv", "--keep", "id"]
    assert "client=east took part in point, and one that came later has the same name" in complaint(ask, capsys)
    told(["predict", "point/onboarded/east/model", *ask[4:]], capsys)


def test_a_regression_gets_intervals_and_does_not_abstain(made, rows, capsys):
    rows[["age", "sex"]].to_csv("x.csv", index=False)
    ask = ["predict", made("regression"), "--client", "east", "--data", "x.csv", "--level", "0.8"]
    assert "conformal intervals at level 0.8" in told([*ask, "--out", "p.csv"], capsys)
    found, expected = read("p.csv"), priory.load("regression").client("east").predict(rows)
    assert list(found[0]) == ["mean", "sd", "epistemic_share", "low", "high", "conformal_low", "conformal_high"]
    for name, values in zip(("low", "high"), expected.interval(0.8), strict=True):
        np.testing.assert_allclose([float(row[name]) for row in found], values, rtol=1e-5)
    assert "abstain=0.9 is for classes" in complaint([*ask, "--out", "q.csv", "--abstain", "0.9"], capsys)
    told(["export", "regression", "--client", "east", "--out", "model"], capsys)
    told(["predict", "model", *ask[4:], "--out", "again.csv"], capsys)  # the scale of the noise was learned
    assert Path("again.csv").read_text() == Path("p.csv").read_text()


def test_the_clients_of_a_run_are_listed_with_their_rows(made, capsys):
    lines = told(["clients", made("point")], capsys).splitlines()
    assert lines[0].split() == ["client", "train", "validation", "test"]
    assert sorted(line.split()[0] for line in lines[1:]) == list(SITES)
    assert [line.split()[1] for line in lines[1:]] == ["took", "took", "held"]
    assert {tuple(line.split()[-3:]) for line in lines[1:]} == {("32", "0", "8")}


@pytest.mark.parametrize(
    ("text", "more", "named"),
    [
        ("sex,Age\nf,3\n", [], "x.csv: column 'age' is absent, and column 'Age' is unknown; name the columns as"),
        ("a,b\nf,3\n", [], "columns 'age', 'sex' are absent, and columns 'a', 'b' are unknown"),
        ("sex,age,id,w\nf,3,1,2\n", ["--keep", "id"], "columns that the training data had not: 'w'; leave them out"),
        ("sex,age\nf,3\n", ["--keep", "id"], "column 'id' is not known; choose one of sex, age"),
        ("sex,age,label\nf,3,1\n", ["--keep", "label"], "keep=label is a name that"),
        ("sex,age\nf,old\n", [], "x.csv: column 'age' is not numeric"),
        ("sex,age\n", [], "x.csv: no rows"),
        ("", [], "x.csv is empty"),
        ("sex;age\nf;3\n", [], "x.csv seems to be separated by semicolons"),
        ("sex,age\nf,3\n", ["--client", "south"], "client 'south' is not known; did you mean 'north'? The choice is"),
        ("sex,age\nf,3\n", ["--level", "1"], "level=1.0 is no probability"),
        ("sex,age\nf,3\n", ["--abstain", "90"], "abstain=90 is no probability"),
        ("sex,age\nf,3\n", ["--out", "p.txt"], "out=p.txt ends in none of .csv, .parquet, .npz"),
        ("sex,age\nf,3\n", ["--out", "nowhere/p.csv"], "out=nowhere/p.csv lies in no directory that exists"),
        ("sex,age\nf,3\n", ["--out", "x.csv"], "out=x.csv exists already and is never overwritten"),
        ("sex,age\nf,3\n", ["--data", "y.csv"], "y.csv is no file"),
        ("sex,age\nf,3\n", ["--data", "y.npz"], "y.npz is no file"),
        ("sex,age\nf,3\n", ["--data", "x.txt"], "x.txt is neither a .npz nor a .csv or .parquet file"),
    ],
)
def test_what_cannot_be_predicted_ends_in_one_sentence(made, capsys, text, more, named):
    Path("x.csv").write_text(text)
    asked = {"--client": "east", "--data": "x.csv", "--out": "p.csv"} | dict(zip(more[::2], more[1::2], strict=True))
    argv = [word for pair in asked.items() for word in pair]
    assert named in complaint(["predict", made("bayes"), *argv], capsys)
    assert not Path("p.csv").exists()


def test_a_client_that_was_held_out_is_told_to_onboard(made, rows, capsys):
    held = next(line.split()[0] for line in told(["clients", made("point")], capsys).splitlines() if "held" in line)
    ask = ["predict", "point", "--client", held, "--data", "x.csv", "--out", "p.csv"]
    assert f"client={held} was held out as a newcomer" in complaint(ask, capsys)


def test_no_client_and_no_room_are_refused(made, rows, capsys):
    ask = ["predict", made("bayes"), "--data", "x.csv", "--out", "p.csv"]
    assert "No client is named, and bayes is not the model of a single one; see" in complaint(ask, capsys)
    assert "No client is named" in complaint(["export", "bayes"], capsys)
    Path("taken").mkdir()
    assert "out=taken exists already" in complaint(["export", "bayes", "--client", "east", "--out", "taken"], capsys)
    assert "draws=-1 is below 0" in complaint(["export", "bayes", "--client", "east", "--draws", "-1"], capsys)


def test_parquet_needs_its_library(made, rows, capsys, monkeypatch):
    monkeypatch.setattr(tables.importlib.util, "find_spec", lambda name: None)
    ask = ["predict", made("bayes"), "--client", "east", "--data", "x.csv"]
    assert "install `priory[parquet]`" in complaint([*ask, "--out", "p.parquet"], capsys)


def cut(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])


def swap_classes(path: Path) -> None:
    table = json.loads(path.read_text())
    table["data"]["classes"].reverse()
    path.write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda path: cut(path / "weights.safetensors"), "does not match its checksum"),
        (lambda path: swap_classes(path / "model.json"), "model.json does not match its checksum"),
        (lambda path: cut(path / "model.json"), "is no description of a personal model"),
        (lambda path: (path / "weights.safetensors").unlink(), "weights.safetensors cannot be read"),
        (lambda path: (path / "model.json").write_text('{"format": 7}'), "has format 7 where this version reads 1"),
        (lambda path: (path / "model.json").write_text('{"format": 1}'), "does not describe a personal model"),
    ],
)
def test_a_damaged_model_ends_in_one_sentence(made, rows, capsys, harm, named):
    told(["export", made("bayes"), "--client", "east", "--draws", "0", "--out", "model"], capsys)
    harm(Path("model"))
    ask = ["predict", "model", "--data", "x.csv", "--out", "p.csv", "--keep", "id"]
    assert named in complaint(ask, capsys)


def test_damaged_draws_of_a_model_are_refused_and_deleted_ones_are_not_missed(made, rows, capsys):
    told(["export", made("bayes"), "--client", "east", "--draws", "2", "--out", "model"], capsys)
    raw = bytearray(Path("model/draws.nc").read_bytes())
    raw[len(raw) // 2] ^= 1
    Path("model/draws.nc").write_bytes(raw)
    ask = ["predict", "model", "--data", "x.csv", "--out", "p.csv", "--keep", "id"]
    assert "model/draws.nc does not match its checksum" in complaint(ask, capsys)
    Path("model/draws.nc").unlink()
    told(ask, capsys)


@pytest.mark.parametrize("name", ["file", "probabilities"])
def test_a_column_that_cannot_be_an_array_of_its_own_is_refused(made, rows, capsys, name):
    rows.rename(columns={"id": name}).drop(columns=["ill", "cost", "site"]).to_csv("named.csv", index=False)
    ask = ["predict", made("bayes"), "--client", "east", "--data", "named.csv", "--keep", name, "--out", "p.npz"]
    assert f"keep={name} is a name that p.npz needs itself" in complaint(ask, capsys)
    assert not Path("p.npz").exists()
