"""Schemas: the form of data comes from the file alone, and rows that do not fit are read as documented."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from priory import data
from priory.core.errors import UsageError
from priory.data import form as forms
from priory.data import schema as schemas
from priory.data.draft import draft, rounded_outwards

TABLE = """
reviewed = true
name = "visits"
clients = 2
examples = 300
target = "ill"
classes = ["yes", "no"]
client = "clinic"
drop = ["note"]

[columns]
age = { kind = "number", low = 0, high = 120 }
dose = { kind = "number", low = -1.0, high = 3.0, missing = true }
colour = { kind = "category", categories = ["red", "blue"], missing = true }
code = { kind = "category", categories = [1, 2] }
"""
ARRAYS = """
reviewed = true
name = "scans"
clients = 2
examples = 10
target = "y"
classes = ["a", "b", "c"]
client = "client"
group = "group"

[inputs]
shape = [4, 4, 1]
scaling = "symmetric"
"""


def a_frame(rows=12, **changed):
    number = np.arange(rows)
    columns = {
        "clinic": np.where(number % 2, "north", "south"),
        "age": 30.0 + number,
        "note": "x",
        "dose": np.where(number % 5 == 0, np.nan, 1.0),
        "colour": np.where(number % 3 == 0, "red", "blue"),
        "code": 1 + number % 2,
        "ill": np.where(number % 4 < 2, "no", "yes"),
    }
    return pd.DataFrame(columns | changed)


def the_schema(place, text=TABLE):
    path = place / "schema.toml"
    path.write_text(text)
    return schemas.read(str(path))


def loaded(place, frame, text=TABLE, **options):
    schema = the_schema(place, text)
    frame.to_csv(place / "visits.csv", index=False)
    return data.load(place / "visits.csv", schema=schema.path, **options)


def arrays(**changed):
    draw = np.random.default_rng(0)
    found = {"x": draw.integers(0, 256, (8, 4, 4, 1)).astype(np.uint8), "y": np.arange(8) % 2}
    return found | {"client": np.arange(8) // 4, "group": np.arange(8) // 2} | changed


def loaded_arrays(place, text=ARRAYS, **changed):
    schema = the_schema(place, text)
    np.savez(place / "scans.npz", **arrays(**changed))
    return data.load(place / "scans.npz", schema=schema.path)


# What the inputs are.


def test_numbers_that_are_uniform_between_the_bounds_have_mean_0_and_deviation_1(tmp_path):
    ages = np.linspace(0, 120, 20_001)
    encoded = the_schema(tmp_path).encoder.encode_frame(a_frame(len(ages), age=ages))[:, 0]
    assert abs(encoded.mean()) < 1e-3
    assert abs(encoded.std() - 1) < 1e-3
    np.testing.assert_allclose([encoded.min(), encoded.max()], [-np.sqrt(3), np.sqrt(3)], rtol=1e-6)


def test_numbers_outside_the_bounds_are_clipped(tmp_path):
    encoder = the_schema(tmp_path).encoder
    outside = encoder.encode_frame(a_frame(4, age=[-1e9, -1.0, 121.0, 1e30]))
    np.testing.assert_array_equal(outside, encoder.encode_frame(a_frame(4, age=[0.0, 0.0, 120.0, 120.0])))


def test_a_gap_is_the_middle_of_the_bounds_and_marked_if_the_schema_says_so(tmp_path):
    encoder = the_schema(tmp_path).encoder
    assert encoder.names == (
        "age", "dose", "dose missing", "colour=red", "colour=blue", "colour missing", "code=1", "code=2",
    )  # fmt: skip
    gaps = encoder.encode_frame(a_frame(1, age=np.nan, dose=np.nan, colour=None, code=1))[0]
    middle = encoder.encode_frame(a_frame(1, age=60.0, dose=1.0, colour="red", code=1))[0]
    np.testing.assert_array_equal(gaps[:2], middle[:2])
    assert gaps[2:6].tolist() == [1, 0, 0, 1]


def test_a_category_that_is_not_stated_counts_as_missing(tmp_path):
    encoder = the_schema(tmp_path).encoder
    encoded = encoder.encode_frame(a_frame(1, colour="mauve", code=3))[0]
    assert encoded[3:].tolist() == [0, 0, 1, 0, 0]  # marked for colour; code states no missing = true


def test_classes_have_the_order_of_the_schema(tmp_path):
    found = loaded(tmp_path, a_frame())
    assert found.classes == ("yes", "no")
    assert found.y[:4].tolist() == [1, 1, 0, 0]


def test_without_classes_the_target_is_a_number(tmp_path):
    text = (
        TABLE.replace('classes = ["yes", "no"]\n', "").replace('"ill"', '"cost"')
        + 'ill = { kind = "category", categories = ["no", "yes"] }\n'
    )
    found = loaded(tmp_path, a_frame(cost=np.arange(12)), text)
    assert found.num_classes is None
    np.testing.assert_array_equal(found.y, np.arange(12, dtype=np.float32))


# That it comes from nowhere else.


@pytest.mark.parametrize(
    "changed",
    [{"age": 99.0}, {"dose": np.nan}, {"age": np.nan}, {"colour": "mauve"}, {"code": 7}, {"clinic": "south"}],
    ids=str,
)
def test_no_row_changes_the_form(tmp_path, changed):
    frame = a_frame()
    other = frame.astype(object)
    for column, value in changed.items():
        other.loc[3, column] = value
    one, two = (loaded(tmp_path, each).partition() for each in (frame, other))
    assert forms.to_table(one.form) == forms.to_table(two.form)
    assert one.checksum != two.checksum


def test_the_form_of_a_table_is_that_of_its_schema(tmp_path):
    federation = loaded(tmp_path, a_frame()).partition()
    stated = the_schema(tmp_path).form
    assert forms.to_table(federation.form) == forms.to_table(stated)
    assert federation.input_shape == stated.input_shape
    assert federation.form.roles == {"target": ("ill",), "client": ("clinic",), "drop": ("note",)}


def test_the_form_of_arrays_is_that_of_their_schema(tmp_path):
    federation = loaded_arrays(tmp_path).partition()
    stated = the_schema(tmp_path, ARRAYS).form
    assert forms.to_table(federation.form) == forms.to_table(stated)
    assert federation.input_shape == stated.input_shape
    assert federation.inputs(np.array([0, 255], np.uint8)).tolist() == [-1, 1]


@pytest.mark.parametrize(("text", "more"), [("group", {}), ("scale", {"scale": np.ones(8)})])
def test_only_arrays_with_a_stated_role_are_read(tmp_path, text, more):
    without = ARRAYS.replace('group = "group"\n', "").replace("classes =", "#")
    found = loaded_arrays(tmp_path, without, **more)
    assert (found.group, found.scale) == (None, None)
    stated = loaded_arrays(tmp_path, without.replace("[inputs]", f'{text} = "{text}"\n[inputs]'), **more)
    assert getattr(stated, text) is not None


def test_the_form_comes_back_from_its_file_and_still_clips(tmp_path):
    form = the_schema(tmp_path).form
    again = forms.from_table(json.loads(json.dumps(forms.to_table(form))), form.input_shape)
    assert forms.to_table(again) == forms.to_table(form)
    frame = a_frame(age=np.linspace(-500, 500, 12))
    np.testing.assert_array_equal(again.read_inputs(frame), form.read_inputs(frame))


def test_a_form_without_a_schema_is_written_as_before(tmp_path):
    a_frame().to_csv(tmp_path / "visits.csv", index=False)
    found = data.load(tmp_path / "visits.csv", target="ill", client="clinic", drop=["note"]).partition()
    (age, *_) = forms.to_table(found.form)["columns"]
    assert list(age) == ["name", "categories", "missing", "mean", "deviation"]


@pytest.mark.parametrize("made", [lambda place: loaded(place, a_frame()), loaded_arrays], ids=["table", "arrays"])
def test_a_manifest_makes_the_federation_again(tmp_path, made):
    federation = made(tmp_path).partition(seed=3)
    assert Path(federation.spec["schema"]).is_absolute()
    assert data.from_spec(federation.spec).checksum == federation.checksum


def test_a_column_that_the_schema_does_not_name_is_left_out(tmp_path):
    found = loaded(tmp_path, a_frame(extra=np.arange(12)))
    assert "extra" not in [feature.name for feature in found.features]
    assert "  dropped: note, extra" in found.describe().splitlines()


def test_the_description_counts_rows_that_do_not_fit(tmp_path):
    frame = a_frame(age=[*np.full(10, 50.0), 121.0, -1.0], colour=["mauve", *["red"] * 11])
    frame["code"] = [1.0, np.nan, *np.full(10, 2.0)]
    lines = loaded(tmp_path, frame).describe().splitlines()
    assert "  column 'age' is outside 0 to 120 in 2 rows, which are clipped" in lines
    assert "  column 'colour' has none of its categories in 1 rows, which count as missing" in lines
    assert "  column 'code' has 1 gaps, which are not marked under missing = false" in lines
    assert not any("'dose'" in line for line in lines)


# What is refused.


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"target": "age"}, "target='age' contradicts .*schema.toml, which states 'ill'; leave it out"),
        ({"group": "patient"}, "group='patient' contradicts .*, which states none"),
        ({"drop": ["age"]}, r"drop=\['age'\] contradicts .*, which states \['note'\]"),
        ({"task": "regression"}, "task='regression' contradicts .*, which states 'classification'"),
        ({"scaling": "unit"}, "scaling='unit' contradicts .*, which states none"),
    ],
    ids=str,
)
def test_an_argument_that_contradicts_the_schema_is_refused(tmp_path, given, sentence):
    with pytest.raises(UsageError, match=sentence):
        loaded(tmp_path, a_frame(), **given)


def test_an_argument_that_agrees_with_the_schema_changes_nothing(tmp_path):
    agreed = loaded(tmp_path, a_frame(), target="ill", client="clinic", drop="note", task="classification")
    assert agreed.source == loaded(tmp_path, a_frame()).source


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda frame: frame.drop(columns="age"), "visits.csv: column 'age' is absent"),
        (lambda frame: frame.drop(columns="ill"), "visits.csv: column 'ill' is not known"),
        (lambda frame: frame.drop(columns="clinic"), "visits.csv: column 'clinic' is not known"),
        (
            lambda frame: frame.assign(ill="maybe"),
            "visits.csv: target column 'ill' has the labels maybe, .* with yes, no",
        ),
        (lambda frame: frame.assign(ill=None), "visits.csv: target column 'ill'"),
        (lambda frame: frame.assign(age="old"), "visits.csv: column 'age' is not numeric; make it a number"),
        (lambda frame: frame.assign(age=np.inf), "visits.csv: column 'age' is infinite in 12 rows"),
        (lambda frame: frame[:0], "visits.csv: no rows; give at least one"),
    ],
    ids=["no input", "no target", "no client", "class", "no class", "text", "infinite", "no rows"],
)
def test_a_table_that_cannot_be_read_ends_in_one_sentence(tmp_path, change, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        loaded(tmp_path, change(a_frame()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"x": np.zeros((8, 4), np.uint8)}, r"scans.npz: x has examples of shape \(4,\), and .* states \(4, 4, 1\)"),
        ({"x": np.zeros((8, 4, 4, 1))}, "scans.npz: scaling='symmetric' is for uint8 pixels"),
        ({"y": np.full(8, 5)}, "scans.npz: y has the labels 5"),
        ({"client": np.arange(3)}, "scans.npz: client has 3 rows and x has 8"),
    ],
    ids=["shape", "type", "class", "client"],
)
def test_arrays_that_do_not_fit_end_in_one_sentence(tmp_path, changed, sentence):
    with pytest.raises(UsageError, match=sentence):
        loaded_arrays(tmp_path, **changed)


def test_a_schema_of_arrays_describes_no_table(tmp_path):
    with pytest.raises(UsageError, match=r"visits\.csv holds a table and .* describes arrays; give the file's"):
        loaded(tmp_path, a_frame(), ARRAYS)
    with pytest.raises(UsageError, match=r"scans\.npz holds arrays and .* describes a table"):
        loaded_arrays(tmp_path, TABLE)


def test_a_public_data_set_has_no_schema(tmp_path):
    with pytest.raises(UsageError, match=r"schema='schema\.toml' does not apply to data 'digits'; leave it out"):
        data.load("digits", schema="schema.toml")


FAULTS = [
    ("reviewed = true", "", "does not state reviewed, which is true or false; add it"),
    ("reviewed = true", 'reviewed = "yes"', "states reviewed = 'yes', which is not true or false; correct it"),
    ("clients = 2", "clients = 0", "states clients = 0, which is not a whole number of 1 or more"),
    ("clients = 2", "clients = true", "states clients = True, which is not a whole number"),
    ("examples = 300", "examples = 2.5", "states examples = 2.5, which is not a whole number"),
    ('name = "visits"', 'name = ""', "states name = '', which is not a text of one character or more"),
    ('target = "ill"', "", "does not state target"),
    ('["yes", "no"]', '["yes"]', r"states classes = \['yes'\], which is not a list of 2 or more different names"),
    ('["yes", "no"]', '["yes", "yes"]', "which is not a list of 2 or more different names"),
    ('["yes", "no"]', '["yes", ["no"]]', "which is not a list of 2 or more different names"),
    ('client = "clinic"', 'clinet = "clinic"', "key 'clinet' is not known; did you mean 'client'"),
    ('client = "clinic"', 'client = "age"', "names 'age' twice; give every column one role"),
    ('drop = ["note"]', 'drop = "note"', "states drop = 'note', which is not a list of different names"),
    ('kind = "number", low = 0', 'kind = "numbr", low = 0', "age states kind = 'numbr', which is not 'number' or 'cat"),
    ("low = 0, high = 120", "low = 0", "age does not state high"),
    ("low = 0, high = 120", "low = 120, high = 0", "age states high = 0.0, which is not above low = 120; correct it"),
    ("low = 0, high = 120", "low = 5, high = 5", "age states high = 5.0, which is not above low = 5"),
    ("low = 0, high = 120", "low = 0, high = inf", "states high = inf, which is not a number between"),
    ("low = 0, high = 120", "low = nan, high = 1", "states low = nan, which is not a number between"),
    ("low = 0, high = 120", 'low = "0", high = 1', "states low = '0', which is not a number between"),
    ("high = 120", "high = 120, categories = [1]", "age: key 'categories' is not known"),
    ("high = 3.0, missing = true", "high = 3.0, missing = 1", "dose states missing = 1, which is not true or false"),
    (
        "categories = [1, 2]",
        "categories = []",
        r"code states categories = \[\], which is not a list of different names",
    ),
    ("categories = [1, 2]", 'categories = [1, "1"]', "which is not a list of different names"),
    ("code = {", "code = 3\nother = {", r"\[columns\] states code = 3, which is not a table"),
    ("[columns]", "[column]", r"needs one of \[columns\], for a table, and \[inputs\], for arrays"),
]


@pytest.mark.parametrize(("old", "new", "sentence"), FAULTS, ids=[f"{old} > {new}" for old, new, _ in FAULTS])
def test_a_fault_of_a_schema_ends_in_one_sentence(tmp_path, old, new, sentence):
    assert old in TABLE
    with pytest.raises(UsageError, match=sentence) as caught:
        the_schema(tmp_path, TABLE.replace(old, new))
    assert "schema.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("shape = [4, 4, 1]", "", r"\[inputs\] does not state shape"),
        ("shape = [4, 4, 1]", "shape = []", r"states shape = \[\], which is not a list of whole numbers of 1 or more"),
        ("shape = [4, 4, 1]", "shape = [4, 0]", r"states shape = \[4, 0\], which is not a list"),
        ('"symmetric"', '"standard"', "states scaling = 'standard', which is not one of 'unit', 'symmetric', 'none'"),
        (
            'client = "client"',
            'client = "site"',
            "states client = 'site', which is not 'client', as the array of a .npz",
        ),
        ("[inputs]", "[columns]\n[inputs]", r"needs one of \[columns\]"),
    ],
)
def test_a_fault_of_a_schema_of_arrays_ends_in_one_sentence(tmp_path, old, new, sentence):
    assert old in ARRAYS
    with pytest.raises(UsageError, match=sentence):
        the_schema(tmp_path, ARRAYS.replace(old, new))


def test_a_schema_of_no_columns_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"\[columns\] has no column to predict from; describe one or more"):
        the_schema(tmp_path, TABLE.partition("[columns]")[0] + "[columns]\n")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"reviewed =", "is not valid TOML"),
        (b"\xff", "is not valid TOML"),
        (None, "cannot be read .No such file.*draft"),
    ],
)
def test_a_file_that_is_no_schema_is_refused(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "schema.toml").write_bytes(content)
    with pytest.raises(UsageError, match=rf"schema\.toml {sentence}"):
        schemas.read(str(tmp_path / "schema.toml"))


# Drafts.


def drafted(place, found, **options):
    return the_schema(place, draft(found, **options))


def test_a_draft_describes_the_table_and_is_not_reviewed(tmp_path):
    frame = a_frame(age=np.linspace(21.5, 88.0, 12))
    frame.to_csv(tmp_path / "visits.csv", index=False)
    found = data.load(tmp_path / "visits.csv", target="ill", client="clinic", drop=["note"])
    schema = drafted(tmp_path, found)
    assert schema.reviewed is False
    assert (schema.name, schema.clients, schema.examples, schema.classes) == ("visits", 2, 10, ("no", "yes"))
    assert schema.roles == {"target": ("ill",), "client": ("clinic",), "drop": ("note",)}
    stated = {feature.name: (feature.categories, feature.bounds, feature.missing) for feature in schema.features}
    assert stated == {
        "age": (None, (20.0, 90.0), False),
        "dose": (None, (1.0, 2.0), True),
        "colour": (("blue", "red"), None, False),
        "code": (None, (1.0, 2.0), False),
    }
    assert schema.dataset(str(tmp_path / "visits.csv")).y.tolist() == found.y.tolist()


def test_every_value_of_a_draft_that_comes_from_the_rows_is_marked(tmp_path):
    a_frame().to_csv(tmp_path / "visits.csv", index=False)
    columns = {"target": "ill", "client": "clinic", "drop": ["note"]}
    texts = [draft(data.load(tmp_path / "visits.csv", **columns))]
    other = a_frame(40, age=np.linspace(500, 900, 40), dose=np.linspace(7, 8, 40), code=9)
    other.loc[7, ["clinic", "colour", "ill", "age"]] = "east", "mauve", "maybe", np.nan
    other.to_csv(tmp_path / "visits.csv", index=False)
    texts.append(draft(data.load(tmp_path / "visits.csv", **columns)))
    before, after = (text.splitlines() for text in texts)
    assert len(before) == len(after)
    changed = [one for one, two in zip(before, after, strict=True) if one != two]
    assert len(changed) == 7
    assert all("# FROM THE DATA" in line for line in changed)


@pytest.mark.parametrize("name", ["a b", "a.b", '"', "ü", "#", "x\\", "\x7f", "'"])
def test_odd_names_of_columns_and_categories_come_back(tmp_path, name):
    frame = a_frame()[["age", "ill", "clinic"]].assign(**{name: [f"{name}!", "b"] * 6})
    frame.to_csv(tmp_path / "visits.csv", index=False)
    schema = drafted(tmp_path, data.load(tmp_path / "visits.csv", target="ill", client="clinic"))
    assert [feature.name for feature in schema.features] == ["age", name]
    assert set(schema.features[1].categories) == {f"{name}!", "b"}


def test_a_draft_describes_arrays(tmp_path):
    np.savez(tmp_path / "scans.npz", **arrays())
    found = data.load(tmp_path / "scans.npz")
    schema = drafted(tmp_path, found)
    assert (schema.shape, schema.scaling, schema.classes, schema.clients) == ((4, 4, 1), "unit", ("0", "1"), 2)
    assert schema.roles == {"target": ("y",), "client": ("client",), "group": ("group",)}
    again, before = schema.dataset(str(tmp_path / "scans.npz")).partition(), found.partition()
    assert again.checksum == before.checksum
    assert forms.to_table(again.form) == forms.to_table(before.form)


def test_a_draft_takes_no_statistics_of_arrays(tmp_path):
    np.savez(tmp_path / "scans.npz", **arrays())
    with pytest.raises(UsageError, match=r"scaling='standard' takes mean and deviation from .*; choose unit"):
        draft(data.load(tmp_path / "scans.npz", scaling="standard"), scaling="standard")


def test_a_draft_asks_how_many_clients_take_part_where_no_column_says(tmp_path):
    a_frame().drop(columns="clinic").to_csv(tmp_path / "visits.csv", index=False)
    found = data.load(tmp_path / "visits.csv", target="ill", drop=["note"])
    with pytest.raises(UsageError, match="does not say which client a row is of; give --clients N"):
        draft(found)
    assert "clients = 7\n" in draft(found, clients=7)
    with pytest.raises(UsageError, match="clients=0 is below 1"):
        draft(found, clients=0)


def test_drafted_bounds_hold_all_values():
    draw = np.random.default_rng(0)
    for scale in 10.0 ** np.arange(-30, 31, 5):
        for low, high in scale * np.sort(draw.normal(size=(50, 2)), axis=1):
            below, above = rounded_outwards(low, high)
            assert below <= low < high <= above
            assert above - below <= 4 * (high - low) + 1e-30
    assert rounded_outwards(0.0, 0.0) == (0.0, 1.0)
    assert all(np.isfinite(np.float32(rounded_outwards(-3.3e38, 3.3e38))))
