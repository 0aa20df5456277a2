"""Tables: gaps, categories and standardisation, with statistics from training rows only."""

import numpy as np
import pandas as pd
import pytest

from priory.cli.federation import DataFlags
from priory.core.errors import UsageError
from priory.data import PartitionOptions, ReadOptions, columns, from_frame, load


def a_frame(rows=40):
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "clinic": np.where(np.arange(rows) % 2, "north", "south"),
            "age": rng.normal(50.0, 10.0, rows),
            "dose": np.where(np.arange(rows) % 5 == 0, np.nan, rng.normal(3.0, 1.0, rows)),
            "colour": np.array(["red", "blue", None], object)[np.arange(rows) % 3],
            "ill": np.where(np.arange(rows) % 4 < 2, "no", "yes"),
        }
    )


def training_rows(federation):
    return np.concatenate([federation.x[federation.rows(k)] for k in range(federation.num_clients)])


def test_columns_become_numbers_with_names():
    federation = from_frame(a_frame(), target="ill", client="clinic").partition()
    assert federation.encoder.names == ("age", "dose", "dose missing", "colour=blue", "colour=red", "colour missing")
    assert federation.classes == ("no", "yes")
    assert federation.clients == ("north", "south")
    assert np.isfinite(federation.x).all()


def test_training_rows_have_mean_zero_and_deviation_one():
    federation = from_frame(a_frame(), target="ill", client="clinic").partition(validation=0.2)
    age = training_rows(federation)[:, 0]
    assert np.allclose([age.mean(), age.std()], [0.0, 1.0], atol=1e-5)


@pytest.mark.parametrize("part", ["test", "validation", "newcomer"])
def test_statistics_come_from_training_rows_of_participants_only(part):
    frame = a_frame().assign(clinic=np.arange(40) % 4, row=np.arange(40.0))
    options = {"validation": 0.2, "newcomers": 0.25}

    def build(table):
        return from_frame(table, target="ill", client="clinic").partition(**options)

    before = build(frame)
    where = before.rows(3, "train") if part == "newcomer" else before.rows(0, part)
    column = before.encoder.names.index("row")
    index = [feature.name for feature in before.encoder.features].index("row")
    rows = np.round(before.x[where, column] * before.encoder.deviation[index] + before.encoder.mean[index]).astype(int)
    frame.loc[rows, "age"] = 1e6
    after = build(frame)
    assert (training_rows(before) == training_rows(after)).all()
    assert (before.x[where] != after.x[where]).any()


def test_a_gap_is_filled_with_the_mean_and_marked():
    federation = from_frame(a_frame(), target="ill", client="clinic").partition()
    filled = federation.x[federation.x[:, 2] == 1.0]
    assert len(filled) == 8
    assert (filled[:, 1] == 0.0).all()


def test_a_missing_category_is_marked_and_belongs_to_none():
    federation = from_frame(a_frame(), target="ill", client="clinic").partition()
    categories, marked = federation.x[:, 3:5], federation.x[:, 5]
    assert (categories.sum(axis=1) + marked == 1.0).all()


def test_a_new_frame_is_encoded_as_the_old_one_was():
    frame = a_frame()
    federation = from_frame(frame, target="ill", client="clinic").partition(test=0.0)
    order = np.argsort(frame["clinic"], kind="stable")
    assert np.array_equal(federation.encoder.encode_frame(frame.iloc[order]), federation.x)


def test_a_category_never_seen_counts_as_missing():
    federation = from_frame(a_frame(), target="ill", client="clinic").partition()
    row = federation.encoder.encode_frame(pd.DataFrame({"age": [50.0], "dose": [3.0], "colour": ["mauve"]}))
    assert row[0, 3:].tolist() == [0.0, 0.0, 1.0]


def test_numeric_codes_can_be_read_as_categories():
    frame = a_frame().assign(kind=np.arange(40) % 3)
    data = from_frame(frame, target="ill", client="clinic", drop=["age", "dose", "colour"], categorical=["kind"])
    assert data.partition().encoder.names == ("kind=0", "kind=1", "kind=2")


def test_dropped_and_role_columns_are_no_features():
    frame = a_frame().assign(patient=np.arange(40), error=1.5, effect=np.linspace(0, 1, 40))
    data = from_frame(frame, target="effect", client="clinic", drop=["ill", "colour"], group="patient", scale="error")
    federation = data.partition()
    assert federation.num_classes is None
    assert federation.encoder.names == ("age", "dose", "dose missing")
    assert set(federation.scale) == {1.5}


def test_a_csv_file_is_read_like_the_frame(tmp_path):
    path = tmp_path / "visits.csv"
    a_frame().to_csv(path, index=False)
    from_file = load(str(path), target="ill", client="clinic", drop=["colour"]).partition(seed=1)
    from_memory = from_frame(pd.read_csv(path), target="ill", client="clinic", drop=["colour"]).partition(seed=1)
    assert from_file.checksum == from_memory.checksum
    assert from_file.spec["data"] == str(path)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"target": "sick"}, "the choice is|choose one of"),
        ({}, {"client": "clinik"}, "did you mean 'clinic'"),
        ({}, {"drop": ["aeg"]}, "did you mean 'age'"),
        ({}, {"client": "ill"}, "two roles"),
        ({"ill": None}, {}, "target column 'ill' is missing in 40 of 40 rows"),
        ({"clinic": [None] * 3 + ["a"] * 37}, {}, "client column 'clinic' is missing in 3 of 40 rows"),
        ({"age": [np.inf] * 2 + [1.0] * 38}, {}, "column 'age' is infinite in 2 rows"),
        ({"age": [-1e308] * 2 + [1.0] * 38}, {}, r"column 'age' is beyond single precision \(±3.4e\+38\) in 2 rows"),
        ({"age": None}, {}, "column 'age' has no value"),
        ({"when": pd.Timestamp("2020-01-01")}, {}, "column 'when' has type datetime64"),
        ({"error": 0.0}, {"scale": "error"}, "standard error is above 0"),
        ({"error": "large"}, {"scale": "error"}, "not numeric"),
        ({}, {"drop": ["age", "dose", "colour"]}, "no column is left"),
        ({}, {"target": "colour"}, "target column 'colour' is missing in 13 of 40 rows"),
        ({}, {"target": "age", "task": "ranking"}, "task 'ranking'"),
        ({}, {"task": "regression"}, "not numeric"),
    ],
)
def test_a_bad_table_is_refused_by_name(change, options, words):
    frame = a_frame().assign(**change)
    make = {"target": "ill", "client": "clinic", **options}
    with pytest.raises(UsageError, match=f"(?i){words}") as caught:
        from_frame(frame, **make)
    assert "\n" not in str(caught.value)


def test_too_many_categories_are_refused_by_name():
    frame = pd.DataFrame({"note": [f"text {row}" for row in range(60)], "y": np.arange(60) % 2, "client": 0})
    with pytest.raises(UsageError, match="column 'note' is not numeric and has 60 different values"):
        from_frame(frame, target="y", client="client")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"a,b\n", "no rows"),
        (b'a,b\n1,2\n"3', "cannot be read as CSV"),
        (b"a,b\n1,2\n1,2,3\n", "cannot be read as CSV"),
        (b"\xff\xfe\x00,\n1", "cannot be read as CSV"),
        (b"a,b,c,c\n1,2,3,4\n", "two columns named 'c'"),
        (b",a,b\n0,1,2\n", "no name for column 1.*drop='Unnamed: 0'"),
        (b"a;b;c\n1;2;3\n", "separated by semicolons"),
        (b"a\tb\n1\t2\n", "separated by tabs"),
        (b"a,b\n1,2,3\n4,5,6\n", "Expected 2 fields in line 2, saw 3"),
    ],
)
def test_a_bad_csv_file_ends_in_one_sentence(tmp_path, content, words):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        load(path, target="a", client="b")


def test_a_row_index_in_a_csv_file_can_be_dropped_and_blanks_behind_commas_do_not_count(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text(", a, b, c\n0, 1, x, 1.5\n1, 0, y, 2.5\n")
    assert load(str(path), target="a", client="b", drop=["Unnamed: 0"]).clients == ("x", "y")


def test_a_sign_for_a_gap_in_a_column_of_numbers_is_pointed_out():
    frame = pd.DataFrame({"age": ["31", "?", "45", "52"], "y": [0, 1, 0, 1], "client": 0})
    with pytest.warns(UserWarning, match=r"column 'age' is read as 4 categories, because '\?' is no number"):
        from_frame(frame, target="y", client="client")
    long = pd.DataFrame({"age": [*map(str, range(60)), "?"], "y": np.arange(61) % 2, "client": 0})
    with pytest.raises(UsageError, match=r"not numeric, because of values such as '\?', and has 61"):
        from_frame(long, target="y", client="client")


def test_many_whole_numbers_with_few_rows_each_are_a_quantity():
    frame = pd.DataFrame({"x": np.arange(60.0), "price": 50_000 + 10 * np.arange(60), "client": 0})
    assert from_frame(frame, target="price", client="client").num_classes is None
    assert from_frame(frame, target="price", client="client", task="classification").num_classes == 60
    few = pd.concat([frame, frame]).assign(price=np.arange(120) % 12)
    assert from_frame(few, target="price", client="client").num_classes == 12


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            np.arange(60) % 12,
            "12 different whole numbers in 60 rows, and classes are at most a tenth .* --task regression .* --task cl",
        ),
        (
            [f"n{row % 30}" for row in range(60)],
            "is text with 30 different values in 60 rows.* another column with --targ",
        ),
        (
            ["?", *map(str, range(59))],
            r"is text, because of values such as '\?', with 60 different values.* drop those",
        ),
    ],
)
def test_more_classes_than_a_tenth_of_the_rows_are_refused_unless_they_are_asked_for(target, words):
    frame = pd.DataFrame({"x": np.arange(60.0), "y": target, "client": 0})
    with pytest.raises(UsageError, match=words):
        from_frame(frame, target="y", client="client")
    num = len(set(target))
    assert from_frame(frame, target="y", client="client", task="classification").num_classes == num


def test_more_than_a_thousand_classes_are_refused_however_many_rows_they_have():
    frame = pd.DataFrame({"x": 0.5, "y": [f"n{row % 1001}" for row in range(11_000)], "client": 0})
    with pytest.raises(UsageError, match="1,001 different values in 11,000 rows, and classes are at most 1,000"):
        from_frame(frame, target="y", client="client")


def test_all_problems_of_a_table_are_named_at_once(tmp_path):
    frame = a_frame().assign(empty=None, when="2020-01-31", code=[f"id{row}" for row in range(40)], patient=None)
    path = tmp_path / "data.csv"
    frame.to_csv(path, index=False)
    with pytest.raises(UsageError, match=r"^The table has 6 problems\. \(1\)") as caught:
        load(path, target="il", client="clinic", group="patient", drop=["hour"])
    for words in (
        "column 'il' is not known; did you mean 'ill'",
        "column 'hour' is not known",
        "group column 'patient' is missing in 40 of 40 rows",
        "column 'empty' has no value in any row; leave it out with --drop empty",
        "column 'when' holds dates such as '2020-01-31'",
        "column 'code' is not numeric and has 40 different values in 40 rows, like an identifier",
    ):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    path.write_text(",a,a,when\n" + "".join(f"{row},{row % 2},x,2020-01-{row + 10}\n" for row in range(12)))
    with pytest.raises(
        UsageError, match=r"3 problems.*two columns named 'a'.*no name for column 1.*'when' holds dates"
    ):
        load(path, target="a")
    with pytest.raises(UsageError, match=r"The table has 30 problems.* \(10\) .* And 20 more\.$"):
        from_frame(a_frame().assign(**{f"c{k}": None for k in range(30)}), target="ill")


@pytest.mark.parametrize(
    ("values", "are_dates"),
    [
        (["2024-03-01", "2024-12-31T10:15", "2023/7/2 8:00"], True),
        (["1.3.2024", "31/12/99", "01-Mar-2020", "1 March 2020", "March 1, 2020"], True),
        (["20-30", "30-40", "type 3"], False),
        (["may", "june", "12"], False),
        (["1.2.3", "10.0.1"], False),
        ([], False),
    ],
)
def test_text_is_recognised_as_dates(values, are_dates):
    assert columns.holds_dates(values) is are_dates


def described(frame, **roles):
    return from_frame(frame, **roles).describe().splitlines()


def test_a_description_says_how_each_column_was_read():
    frame = a_frame().assign(smokes=np.arange(40) % 2, grade=np.arange(40) % 3 + 1, note="x", error=0.5)
    lines = described(frame, target="grade", client="clinic", drop=["note"], scale="error", task="regression")
    assert lines == [
        "frame: 40 rows, 9 columns",
        "  clinic  client   2 names",
        "  grade   target   number",
        "  error   scale    standard error of the target",
        "  age     feature  number",
        "  dose    feature  number, 8 missing",
        "  colour  feature  2 categories: blue, red, 13 missing",
        "  ill     feature  2 categories: no, yes",
        "  smokes  feature  yes/no (0, 1)",
        "  dropped: note",
    ]


def test_a_csv_file_is_described_when_a_command_reads_it_and_a_data_set_by_name_is_not(tmp_path, capsys):
    path = tmp_path / "visits.csv"
    a_frame().to_csv(path, index=False)
    flags = DataFlags(str(path), reading=ReadOptions(target="ill", client="clinic"))
    flags.federation()
    described = load(str(path), target="ill", client="clinic").describe()
    assert capsys.readouterr().out == described + "\n"
    flags.federation(told=False)
    DataFlags("digits", PartitionOptions(clients=4)).federation()
    assert capsys.readouterr().out == ""


def test_counts_that_are_taken_for_classes_are_pointed_out_with_the_flag_that_changes_it():
    frame = a_frame(260).assign(visits=np.arange(260) % 13)
    lines = described(frame, target="visits", client="clinic")
    assert "  visits  target   13 classes: 0, 1, 2, 3, ... (13 in all)" in lines
    assert (
        lines[-1] == "  the target is whole numbers, taken for 13 classes; --task regression takes them for a quantity"
    )
    asked = described(frame, target="visits", client="clinic", task="classification")
    assert not any("--task" in line for line in asked + described(a_frame(), target="ill", client="clinic"))


def test_a_wide_table_is_summed_up():
    wide = {f"x{place}": np.linspace(0, 0.5, 40) for place in range(230)}
    lines = described(pd.concat([a_frame(), pd.DataFrame(wide)], axis=1), target="ill", client="clinic")
    assert len(lines) == 6
    assert lines[-1] == "  and 231 more numeric columns"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.arange(40), "counts up by 1"),
        (np.arange(40) // 2, "counts up by 1"),  # within each client
        (np.random.default_rng(0).permutation(40) + 7.0, "counts up by 1"),
        (np.arange(40) ** 2, "has another whole number in every row"),
        (np.arange(40) / 2, None),
        (np.arange(40) % 7, None),
        (np.where(np.arange(40) == 3, np.nan, np.arange(40)), None),
    ],
)
def test_a_column_that_numbers_rows_is_pointed_out(values, words):
    lines = described(a_frame().assign(row=values), target="ill", client="clinic")
    found = [line for line in lines if "warning" in line]
    assert len(found) == (words is not None)
    assert all(f"column 'row' {words}" in line and line.endswith("--drop row") for line in found)


def test_a_csv_file_needs_a_target(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match=r"needs target=.*its columns are a, b"):
        load(path, client="b")
