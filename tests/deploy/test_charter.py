"""The charter: what all sides know, the same from its files as from its data, and never more than can be deployed."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import priory
from priory import data, methods
from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.deploy import charter as charters
from priory.engine.settings import Settings
from tests.deploy.conftest import MODEL, small_charter, small_federation

pytestmark = pytest.mark.filterwarnings("ignore::priory.fed.capabilities.AdviceWarning")
FEDAVG = methods.get("fedavg")()
DP = {"dp": "central", "dp_delta": 0.1}


def reloaded(charter, place):
    charter.save(place)
    return charters.load(place)


@pytest.mark.parametrize(
    ("method", "digest"),
    [
        (priory.FedOpt("adam"), "3931e5a708e2fd1e"),
        (priory.FedOpt("yogi"), "5fdac8579ef336b0"),
        (priory.RandomGroups(predict_with="group"), "b98ea07f0e88f4b0"),
        (priory.RandomGroups(predict_with="all"), "b544499ce2f7463b"),
    ],
    ids=["fedadam", "fedyogi", "preset", "ensemble"],
)
def test_a_charter_has_the_digest_that_it_had_under_the_old_name_of_its_method(method, digest):
    """Servers and clients go on with their states only under the same digest."""
    assert small_charter(method).digest == digest


@pytest.mark.parametrize("name", sorted(set(methods.REGISTRY) - {"pooled"}))
def test_every_method_has_the_same_digest_after_loading(name, tmp_path):
    charter = small_charter(methods.get(name)())
    again = reloaded(charter, tmp_path)
    assert again.digest == charter.digest
    assert again.method == charter.method
    assert again.settings == charter.settings


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": ("step-size=cosine",), "compress": "top:0.3"},
        {"cohort": 1, "active": 2, "max_norm": 5.0},
        {"model": None, "models": "mlp:4,linear"},
        {**DP, "dp_epsilon": 3.0},
        {**DP, "dp_noise": 1.0},
        {**DP, "dp_noise": 1.0, "dp_clip": "0.5,20"},
        {"robust": "median"},
    ],
    ids=["schedule", "cohort", "models", "epsilon", "noise", "clips", "robust"],
)
def test_every_setting_comes_back(settings, tmp_path):
    name = "fedbnn" if "models" in settings else "fedpop" if "dp_clip" in settings else "fedavg"
    charter = small_charter(methods.get(name)(), **settings)
    again = reloaded(charter, tmp_path)
    assert (again.digest, again.settings, again.channel) == (charter.digest, charter.settings, charter.channel)


def test_the_shapes_of_what_travels_come_back(tmp_path):
    charter = small_charter(FEDAVG)
    again = reloaded(charter, tmp_path)
    assert again.uplink == charter.uplink
    assert again.record(1) == charter.record(1)


def test_the_alignment_set_comes_back_with_its_bits(tmp_path):
    charter = small_charter(methods.get("fedbnn")())
    again = reloaded(charter, tmp_path)
    assert again.public.dtype == charter.public.dtype
    np.testing.assert_array_equal(again.public, charter.public)
    np.testing.assert_array_equal(again.tasks[0].public, charter.tasks[0].public)


@pytest.mark.parametrize(
    "changed",
    [
        {"method": replace(FEDAVG, finetune_epochs=6)},
        {"method": replace(FEDAVG, finetune_step_size=0.011)},
        {"method": methods.get("fedprox")()},
        {"num_clients": 3},
        {"model": "mlp:5"},
        {"cohort": 1},
        {"weighting": "uniform"},
        {"compress": "top:0.5"},
        {"max_norm": 3.0},
    ],
    ids=lambda changed: ", ".join(changed),
)
def test_what_decides_the_meaning_of_messages_changes_the_digest(changed):
    assert small_charter(**{"method": FEDAVG, **changed}).digest != small_charter(FEDAVG).digest


@pytest.mark.parametrize("changed", [{"rounds": 99}, {"seed": 8}, {"rounds": 2, "seed": 3}])
def test_rounds_and_seed_do_not_change_the_digest(changed):
    charter = small_charter(FEDAVG)
    assert charter.running(**changed).digest == charter.digest
    assert small_charter(FEDAVG, **changed).digest == charter.digest


def test_more_rounds_do_not_change_the_noise_that_was_agreed_on():
    charter = small_charter(FEDAVG, **DP, dp_epsilon=3.0)
    assert charter.running(rounds=30).channel == charter.channel
    assert charter.running(rounds=30).ledger.rounds == charter.settings.rounds


def test_nobodys_examples_are_in_it(tmp_path):
    federation = small_federation()
    small_charter(FEDAVG).save(tmp_path)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert all(f"{value:.6f}".encode() not in written for value in federation.x[:, 0])


def test_a_pooling_method_is_refused():
    with pytest.raises(
        UsageError, match="pooled needs all data in one place, which no network can give; choose fedavg"
    ):
        small_charter(methods.get("pooled")())


def test_leaving_out_the_uncertain_is_refused():
    with pytest.raises(UsageError, match=r"exclude-uncertain=0.2 asks clients twice a round, .* leave it out"):
        small_charter(FEDAVG, exclude_uncertain=0.2)


def test_a_method_that_no_node_would_find_is_refused():
    class Mine(priory.FedAvg):
        pass

    with pytest.raises(UsageError, match="Mine is not registered, so no node would find it; register it first"):
        charters.make(Mine(), small_federation(), Settings(rounds=1))


def test_an_alignment_set_that_no_app_can_carry_is_refused(monkeypatch):
    monkeypatch.setattr(charters, "PUBLIC_BYTES", 100)
    with pytest.raises(UsageError, match="The alignment set has 160 bytes, and an app may carry 100; use fewer rows"):
        charters.make(FEDAVG, small_federation(), Settings(rounds=1, model=MODEL))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"cohort": 9}, "cohort=9"), ({"robust": "krum:3"}, "krum:3"), ({"schedule": ("mu=cosine",)}, "mu")],
    ids=["cohort", "robust", "schedule"],
)
def test_what_no_simulation_would_run_is_not_deployed(settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        small_charter(FEDAVG, **settings)


@pytest.fixture
def files(tmp_path):
    small_charter(FEDAVG).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["manifest.toml", "problem.json"])
def test_a_missing_file_is_told(files, name):
    (files / name).unlink()
    with pytest.raises(UsageError, match=rf"{name} cannot be read \(No such file or directory\); make an app with"):
        charters.load(files)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("manifest.toml", "not toml [", "is not valid TOML"),
        ("manifest.toml", "x = 1", r"has no \[method\] table; make the app again"),
        ("problem.json", "{", "is damaged"),
        ("problem.json", "[]", "is damaged"),
        ("problem.json", "{}", "is damaged.*; make the app again"),
    ],
)
def test_a_file_that_is_none_is_told(files, name, text, sentence):
    (files / name).write_text(text)
    with pytest.raises(UsageError, match=sentence):
        charters.load(files)


@pytest.mark.parametrize(
    "changed",
    [
        {"clients": "two"},
        {"clients": 0},
        {"clients": float("inf")},
        {"input_shape": 5},
        {"input_shape": [-5]},
        {"input_shape": ["a"]},
        {"form": []},
        {"form": {}},
        {"public": {"dtype": "float32", "shape": [3], "base64": "AAAA"}},
        {"public": {"dtype": "O", "shape": [1], "base64": "AAAAAAAAAAA="}},
        {"public": 4},
        {"examples": None},
    ],
    ids=repr,
)
def test_a_problem_that_makes_no_sense_is_told(files, changed):
    table = json.loads((files / "problem.json").read_text())
    (files / "problem.json").write_text(json.dumps(table | changed))
    with pytest.raises(UsageError):
        charters.load(files)


@pytest.mark.parametrize("changed", [{"num_classes": -1}, {"num_classes": "a"}, {"shift": "b"}, {"classes": 3}])
def test_a_form_that_makes_no_sense_is_told(files, changed):
    table = json.loads((files / "problem.json").read_text())
    table["form"] |= changed
    (files / "problem.json").write_text(json.dumps(table))
    with pytest.raises(UsageError):
        charters.load(files)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('name = "fedavg"', 'name = "fedavgg"'),
        ("finetune_epochs = 5", 'finetune_epochs = "five"'),
        ("finetune_epochs = 5", "finetune_epoch = 5"),
        ("rounds = 3", 'rounds = "three"'),
        ("rounds = 3", "round = 3"),
        ('model = "mlp:4"', "model = 4"),
        ('weighting = "method"', "weighting = [1]"),
        ("schedule = []", "schedule = [3]"),
        ("schedule = []", "schedule = 3"),
        ('priory = "', 'priory = "9.'),
    ],
)
def test_a_manifest_that_makes_no_sense_is_told(files, old, new):
    text = (files / "manifest.toml").read_text()
    assert old in text
    (files / "manifest.toml").write_text(text.replace(old, new))
    with pytest.raises(UsageError):
        charters.load(files)


def test_clients_of_like_sizes_share_a_program():
    charter = small_charter(FEDAVG)
    x = np.zeros((8, 5), np.float32)
    assert charter.shard(x[:5], None, None).capacity == charter.shard(x, None, None).capacity == 8


def test_a_shard_holds_its_own_rows_and_nothing_else():
    charter = small_charter(FEDAVG)
    own = small_federation().x[:5]
    pool = charter.shard(own, np.zeros(5, np.int32), None).pool
    np.testing.assert_array_equal(pool.x[:5], own)
    assert not np.any(pool.x[5:])


def test_groups_have_contacts_of_their_own():
    charter = small_charter(methods.get("fedbnn")(), 3, model=None, models="mlp:4,linear")
    shapes = [jax.tree.leaves(charter.record(client).client) for client in range(3)]
    assert shapes[0] == shapes[2] != shapes[1]


def test_it_changes_no_setting_but_the_model_that_was_chosen():
    chosen = Settings(rounds=2, seed=4)
    made = charters.make(FEDAVG, small_federation(), chosen)
    assert made.settings.model is not None
    assert dataclasses.replace(made.settings, model=None) == chosen


def test_data_of_a_table_come_back_with_their_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("age,colour,ill,site\n" + "".join(f"{i},{'rg'[i % 2]},{i % 3 % 2},{i % 2}\n" for i in range(20)))
    federation = data.load(str(path), target="ill", client="site").partition(min_examples=1)
    charter = charters.make(FEDAVG, federation, Settings(rounds=1, model=MODEL))
    (tmp_path / "app").mkdir()
    again = reloaded(charter, tmp_path / "app")
    assert again.form.columns == ("age", "colour")
    assert again.digest == charter.digest
