"""What an app carries: under differential privacy it comes from a reviewed schema, and everybody is told what it is."""

from dataclasses import replace

import numpy as np
import pytest

from priory import data, methods
from priory.core.errors import UsageError
from priory.data import schema as schemas
from priory.deploy import charter as charters
from priory.deploy import shared
from priory.deploy.examples import from_file
from priory.engine.settings import Settings
from tests.deploy.conftest import MODEL, small_federation

TEXT = """
reviewed = true
name = "visits"
clients = 5
examples = 1000
target = "ill"
classes = ["no", "yes"]
client = "site"

[columns]
age = { kind = "number", low = 0, high = 120 }
colour = { kind = "category", categories = ["red", "blue"], missing = true }
"""
FEDAVG = methods.get("fedavg")()
CHOSEN = Settings(rounds=1, model=MODEL)


@pytest.fixture
def schema(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text(TEXT)
    return schemas.read(str(path))


def reloaded(charter, place):
    (place / "app").mkdir()
    charter.save(place / "app")
    return charters.load(place / "app")


def test_a_charter_of_a_schema_comes_back_from_its_files(tmp_path, schema):
    charter = charters.from_schema(FEDAVG, schema, CHOSEN)
    again = reloaded(charter, tmp_path)
    assert (again.digest, again.question.num_clients, again.question.num_examples) == (charter.digest, 5, 1000)


def test_a_charter_of_a_schema_is_that_of_data_which_it_describes_except_for_the_counts(tmp_path, schema):
    path = tmp_path / "visits.csv"
    path.write_text(
        "age,colour,ill,site\n" + "".join(f"{20 + i},red,{'no' if i % 2 else 'yes'},{i % 5}\n" for i in range(50))
    )
    federation = data.load(path, schema=schema.path).partition()
    made, stated = charters.make(FEDAVG, federation, CHOSEN), charters.from_schema(FEDAVG, schema, CHOSEN)
    counted = replace(made.question, num_examples=1000)
    assert replace(made, question=counted).digest == stated.digest


def test_a_node_reads_its_own_file_as_the_schema_states(tmp_path, schema):
    again = reloaded(charters.from_schema(FEDAVG, schema, CHOSEN), tmp_path)
    own = tmp_path / "own.csv"
    own.write_text("age,colour,ill,room\n60,blue,no,1\n1e9,mauve,yes,2\n-3,,yes,3\n,red,no,4\n")
    rows = from_file(own, again, test=0.0)
    rows.check(again, 0)
    limit = np.sqrt(3)
    np.testing.assert_allclose(
        rows.x, [[0, 0, 1, 0], [limit, 0, 0, 1], [-limit, 0, 0, 1], [0, 1, 0, 0]], rtol=1e-6, atol=1e-6
    )
    assert rows.y.tolist() == [0, 1, 1, 0]
    own.write_text("age,colour,ill\n60,blue,perhaps\n")
    with pytest.raises(UsageError, match=r"y has the labels perhaps, .* label the rows with no, yes"):
        from_file(own, again)


def test_a_schema_changes_the_digest_with_its_bounds(tmp_path, schema):
    before = charters.from_schema(FEDAVG, schema, CHOSEN).digest
    (tmp_path / "schema.toml").write_text(TEXT.replace("high = 120", "high = 110"))
    assert charters.from_schema(FEDAVG, schemas.read(schema.path), CHOSEN).digest != before


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("visits.csv", (), None), "dp='local' covers messages and not the app, .* of visits.csv .*; draft a schema"),
        (("scans.npz", (), None), "which would carry statistics, names and counts of scans.npz"),
        (("digits", ("mix:scans.npz",), None), "statistics, names and counts of scans.npz"),
    ],
    ids=["table", "arrays", "mixed"],
)
def test_privacy_needs_a_schema_for_a_file(given, sentence):
    with pytest.raises(UsageError, match=sentence):
        shared.check("local", *given, None)
    shared.check(None, *given, None)


def test_privacy_needs_a_reviewed_schema(schema):
    draft = replace(schema, reviewed=False, path="s.toml")
    with pytest.raises(
        UsageError, match=r"s\.toml states reviewed = false, and dp='central' needs a reviewed schema; rep"
    ):
        shared.check("central", "visits.csv", (), None, draft)
    shared.check(None, "visits.csv", (), None, draft)
    shared.check("central", "visits.csv", (), None, schema)


def test_privacy_lets_no_row_of_a_file_be_public(schema):
    with pytest.raises(
        UsageError, match=r"align='own:5' would put rows of visits\.csv into the app, .*; give public rows"
    ):
        shared.check("central", "visits.csv", (), "own:5", schema)
    shared.check("central", "visits.csv", (), "digits:5", schema)
    shared.check(None, "visits.csv", (), "own:5", schema)


def test_public_data_need_no_schema():
    for name in ("digits", "heart_disease", "synthetic:linear"):
        shared.check("central", name, (), "own:5", None)


def test_the_summary_of_a_schema_names_what_is_shared(schema):
    charter = charters.from_schema(FEDAVG, schema, CHOSEN)
    assert shared.summary(charter, "", None, schema) == [
        "shared with the server and every node: names of 4 columns, bounds of 1, categories of 1 (2 names), which of "
        "them have gaps, names of 2 classes, number of clients (5), number of examples (1000)",
        f"  all as stated in {schema.path} (reviewed)",
    ]


def test_the_summary_of_a_table_names_what_was_read_from_its_rows(tmp_path):
    path = tmp_path / "visits.csv"
    path.write_text("age,ill,site\n" + "".join(f"{20 + i},{i / 7},{i % 2}\n" for i in range(20)))
    charter = charters.make(FEDAVG, data.load(path, target="ill", client="site").partition(), CHOSEN)
    assert shared.summary(charter, str(path), None, None) == [
        "shared with the server and every node: names of 3 columns, mean and deviation of 1, which of them have gaps, "
        "number of clients (2), number of examples (16), path of visits.csv",
        f"  read from the rows of {path}; --schema shares values that you state (`priory flower schema {path}`)",
    ]


@pytest.mark.parametrize(
    ("name", "scaling", "words"),
    [
        ("scans.npz", "standard", "mean and deviation"),
        ("scans.npz", None, "scaling"),
        ("digits", "standard", "scaling"),
    ],
)
def test_the_summary_of_arrays_says_whether_their_scaling_was_read_from_rows(name, scaling, words):
    charter = charters.make(FEDAVG, small_federation(), CHOSEN)
    first, second = shared.summary(charter, name, scaling, None)
    assert f"shape (5) and {words} of the inputs, names of 3 classes" in first
    assert "all of the 8 public rows" in first
    assert ("is a public data set" in second) is (name == "digits")
