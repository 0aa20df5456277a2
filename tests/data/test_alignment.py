"""Alignment sets: rows that everybody knows and nobody holds, the same for the same seed."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import priory
from priory.cli.federation import DataFlags
from priory.core.errors import UsageError
from priory.data import PartitionOptions, from_frame, from_spec, load
from priory.data.alignment import Alignment, parse
from priory.data.arrays import dataset
from priory.data.federation import checksum


def images(rows=60, brightest=255, seed=0, classes=3):
    """uint8 images of 8x8 pixels, no two of them alike."""
    x = np.random.default_rng(seed).integers(0, brightest + 1, size=(rows, 8, 8, 1)).astype(np.uint8)
    return replace(dataset(x, np.arange(rows) % classes, task="classification"), pixel_max=brightest)


def real(rows=60, spread=1.0, seed=0):
    x = spread * np.random.default_rng(seed).normal(size=(rows, 3))
    return dataset(x, np.arange(rows) % 2, task="classification")


def kept_rows(tmp_path, **arrays):
    path = tmp_path / "public.npz"
    np.savez(path, **arrays)
    return str(path)


def drawn(made, align, seed=0, **options):
    """Row numbers of the alignment set, in order."""
    return made.partition("iid", clients=2, seed=seed, align=align, **options).public_rows.index.tolist()


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.5", "shards:2", "classes:2"])
def test_no_client_holds_a_row_of_the_alignment_set(numbered, ids, spec):
    made = numbered(rows=120, classes=4)
    federation = made.partition(spec, clients=6, validation=0.2, newcomers=0.2, align="own:30", seed=1)
    held = [row for part in ("train", "validation", "test") for row in ids(federation, part)]
    public = federation.public.ravel().astype(int).tolist()
    assert len(set(public)) == 30
    assert sorted(held + public) == list(range(120))


def test_no_natural_client_holds_a_row_of_the_alignment_set(numbered, ids):
    made = numbered(rows=120, classes=4, client=np.arange(120) % 7)
    federation = made.partition(align="own:30")
    held = [row for part in ("train", "test") for row in ids(federation, part)]
    assert sorted(held + federation.public.ravel().astype(int).tolist()) == list(range(120))
    for client in federation.clients:
        assert {row % 7 for row in ids(federation, "train", client)} == {int(client)}


def test_no_client_holds_a_row_of_the_alignment_set_where_parts_are_pooled(numbered, ids):
    made = replace(numbered(rows=120, classes=4), official_test=np.arange(120) >= 80)
    federation = made.partition("classes:2", clients=4, per_class=(5, 5), align="own:20")
    held = set(ids(federation, "train")) | set(ids(federation, "test"))
    assert not held & set(federation.public.ravel().astype(int).tolist())
    assert (federation.train.count == 10).all()


def test_own_rows_come_from_the_training_part_where_there_is_a_test_part(official):
    made = official()
    federation = made.partition("dirichlet:0.5", clients=5, align="own:200")
    assert not made.official_test[federation.public_rows.index].any()
    assert federation.test.total == 200


def test_public_rows_are_those_of_the_source_by_number():
    federation = load("digits").partition("iid", clients=5, align="own:40")
    assert federation.public_rows.source == "digits"
    np.testing.assert_array_equal(federation.public, load("digits").x[federation.public_rows.index])


def test_classes_count_equally_as_far_as_possible(numbered):
    labels = np.array(drawn(numbered(rows=120, classes=4), "own:30")) % 4
    assert sorted(np.bincount(labels).tolist()) == [7, 7, 8, 8]


def test_a_class_that_runs_out_leaves_its_share_to_the_others():
    y = np.repeat([0, 1, 2], [4, 30, 30])
    made = dataset(np.arange(64.0)[:, None], y, task="classification")
    assert np.bincount(y[drawn(made, "own:33")]).tolist() == [3, 15, 15]  # the data set keeps one of each class


def test_only_as_many_classes_as_were_asked_for_occur(numbered):
    labels = np.array(drawn(numbered(rows=120, classes=6), "own:30:classes=3")) % 6
    assert np.bincount(labels, minlength=6)[np.unique(labels)].tolist() == [10, 10, 10]


def test_a_smaller_set_is_the_beginning_of_a_larger_one(numbered):
    made = numbered(rows=120, classes=4)
    for ending in ("", ":classes=3"):
        assert drawn(made, f"own:10{ending}") == drawn(made, f"own:40{ending}")[:10]


def test_fewer_classes_are_among_more(numbered):
    made = numbered(rows=200, classes=10)
    nested = [{row % 10 for row in drawn(made, f"own:20:classes={num}")} for num in (2, 5, 8, 10)]
    assert [len(each) for each in nested] == [2, 5, 8, 10]
    assert nested[0] < nested[1] < nested[2] < nested[3]


def test_another_seed_draws_other_rows_of_other_classes(numbered):
    made = numbered(rows=200, classes=10)
    one, other = (drawn(made, "own:20:classes=2", seed=seed) for seed in (0, 1))
    assert {row % 10 for row in one} != {row % 10 for row in other}


def test_the_spec_makes_the_alignment_set_again():
    federation = load("digits").partition("dirichlet:0.3", clients=5, seed=4, align="own:30:classes=5")
    again = from_spec(federation.spec)
    assert federation.spec["align"] == "own:30:classes=5"
    assert (again.checksum, again.spec) == (federation.checksum, federation.spec)
    np.testing.assert_array_equal(again.public, federation.public)


def test_the_spec_names_a_file_by_its_whole_path(tmp_path, monkeypatch):
    kept_rows(tmp_path, x=images(brightest=16).x)
    monkeypatch.chdir(tmp_path)
    federation = load("digits").partition("iid", clients=5, align="public.npz:12")
    assert federation.spec["align"] == f"{tmp_path / 'public.npz'}:12"
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(from_spec(federation.spec).public, federation.public)


def test_without_an_alignment_set_spec_and_checksum_do_not_know_of_it():
    federation = load("digits").partition("iid", clients=5)
    splits = [
        each for part in (federation.train, federation.validation, federation.test) for each in (part.start, part.count)
    ]
    assert (federation.public, federation.public_rows) == (None, None)
    assert "align" not in federation.spec
    assert federation.checksum == checksum(federation.x, federation.y, *splits)


def test_the_checksum_sees_a_foreign_alignment_set(tmp_path):
    path, made = kept_rows(tmp_path, x=images(seed=1).x), images()
    without, with_ten, with_all = (
        made.partition("iid", clients=2, align=align) for align in (None, f"{path}:10", path)
    )
    np.testing.assert_array_equal(without.x, with_ten.x)
    assert len({without.checksum, with_ten.checksum, with_all.checksum}) == 3


def test_an_alignment_set_from_elsewhere_reshuffles_nothing(tmp_path):
    plain, other = (
        load("digits").partition("dirichlet:0.3", clients=5, seed=2, align=align)
        for align in (None, kept_rows(tmp_path, x=images(brightest=16).x))
    )
    np.testing.assert_array_equal(plain.x, other.x)
    np.testing.assert_array_equal(plain.train.start, other.train.start)


def test_transforms_do_not_touch_the_alignment_set():
    federation = load("digits").partition(
        "iid", clients=5, align="own:40", transform=["invert-half", "rotate-by-client", "corrupt-by-client:5"]
    )
    np.testing.assert_array_equal(federation.public, load("digits").x[federation.public_rows.index])


def test_rows_of_another_data_set_are_drawn_by_the_seed():
    made = images(brightest=16)
    federation = made.partition("iid", clients=2, align="digits:30:classes=3", seed=5)
    digits = load("digits")
    assert federation.public_rows.source == "digits"
    np.testing.assert_array_equal(federation.public, digits.x[federation.public_rows.index])
    assert np.bincount(digits.y[federation.public_rows.index]).max() == 10
    assert federation.num_examples == 60


def test_another_data_set_is_scaled_like_the_federation():
    made = replace(images(brightest=16), shift=np.float32(8.0), factor=np.float32(0.125))
    federation = made.partition("iid", clients=2, align="digits:30")  # whose own scaling is [0, 1]
    inputs = federation.inputs(federation.public)
    assert (inputs.dtype, inputs.min(), inputs.max()) == (np.float32, -1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "other"),
    [("mnist", "fashion_mnist"), pytest.param("cifar10", "cifar100", marks=pytest.mark.slow)],
)
def test_public_images_of_another_kind_fit(whole, name, other):
    federation = whole(name).partition("classes:5", clients=20, align=f"{other}:500")
    source = whole(other)
    np.testing.assert_array_equal(federation.public, source.x[federation.public_rows.index])
    assert not source.official_test[federation.public_rows.index].any()


def test_a_data_set_with_colons_in_its_name_can_be_named():
    made = load("synthetic:clusters:clients=4,dim=3")
    federation = made.partition(align="synthetic:clusters:clients=2,dim=3,seed=1:9")
    assert federation.public.shape == (9, 3)


@pytest.mark.parametrize("names", [{"x": None, "y": "labels"}, {"inputs": None}])
def test_a_file_gives_its_array_x_or_its_only_array(tmp_path, names):
    x = images(rows=7, seed=1).x
    path = kept_rows(tmp_path, **{name: x if what is None else np.arange(7) for name, what in names.items()})
    federation = images().partition("iid", clients=2, align=path)
    np.testing.assert_array_equal(federation.public, x)
    assert (federation.public_rows.source, federation.public_rows.index.tolist()) == (path, list(range(7)))


def test_some_rows_of_a_file_are_drawn_by_the_seed(tmp_path):
    path, made = kept_rows(tmp_path, x=images(rows=50, seed=1).x), images()
    few, more, other = drawn(made, f"{path}:5"), drawn(made, f"{path}:20"), drawn(made, f"{path}:5", seed=1)
    assert few == more[:5] != other
    assert len(set(more)) == 20


def test_numbers_of_any_type_become_those_of_the_pool(tmp_path):
    path = kept_rows(tmp_path, x=np.arange(-3, 3).reshape(2, 3))
    public = real().partition("iid", clients=2, align=path).public
    assert (public.dtype, public.tolist()) == (np.float32, [[-3, -2, -1], [0, 1, 2]])


def a_frame(rows=40):
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "clinic": np.where(np.arange(rows) % 2, "north", "south"),
            "dose": np.where(np.arange(rows) % 5 == 0, np.nan, rng.normal(3.0, 1.0, rows)),
            "colour": np.array(["red", "blue", None], object)[np.arange(rows) % 3],
            "ill": np.where(np.arange(rows) % 4 < 2, "no", "yes"),
        }
    )


def test_own_rows_of_a_table_go_through_the_encoder_of_the_training_rows():
    frame = a_frame()
    federation = from_frame(frame, target="ill", client="clinic").partition(align="own:10")
    rows = federation.public_rows.index
    np.testing.assert_array_equal(federation.public, federation.encoder.encode_frame(frame.iloc[rows]))
    training = np.concatenate([federation.x[federation.rows(client)] for client in federation.clients])
    dose = training[training[:, federation.encoder.names.index("dose missing")] == 0, 0]
    assert np.allclose([dose.mean(), dose.std()], [0.0, 1.0], atol=1e-5)  # and public rows had no part in it


def test_a_regression_holds_out_rows_at_random():
    made = dataset(np.arange(30.0)[:, None], np.linspace(0.0, 1.0, 30), task="regression")
    rows = drawn(made, "own:10")
    assert len(set(rows)) == 10
    assert rows != sorted(rows)


def test_standard_errors_stay_with_their_rows_when_others_are_held_out():
    x = np.arange(30.0)
    made = dataset(x[:, None], x / 7, np.arange(30) % 3, scale=x + 1, task="regression")
    federation = made.partition(align="own:10")
    np.testing.assert_array_equal(federation.scale, federation.x[:, 0] + 1)


def test_a_run_sees_the_alignment_set_as_a_model_does():
    federation = load("digits", scaling="symmetric").partition("iid", clients=4, align="own:20")
    run = priory.simulate(priory.FedAvg(), federation, rounds=1, model="linear", seed=0)
    np.testing.assert_array_equal(run.task.public, federation.inputs(federation.public))
    assert run.task.public.dtype == np.float32


def test_the_flag_gives_the_alignment_set():
    federation = DataFlags("digits", PartitionOptions(clients=4, align="own:20")).federation()
    assert (len(federation.public), federation.spec["align"]) == (20, "own:20")


def test_a_federation_tells_how_many_rows_are_public():
    assert repr(load("digits").partition("iid", clients=4, align="own:20")).endswith("356 test, 20 public>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("own:500", Alignment("own", 500)),
        ("own:500:classes=5", Alignment("own", 500, 5)),
        ("cifar100:20", Alignment("cifar100", 20)),
        ("synthetic:linear:dim=3:20", Alignment("synthetic:linear:dim=3", 20)),
        ("/a/b.npz", Alignment("/a/b.npz", None)),
        ("/a/b:c.npz:20", Alignment("/a/b:c.npz", 20)),
    ],
)
def test_a_spec_is_taken_apart_and_put_together_again(text, expected):
    assert parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    ("align", "words"),
    [
        ("", r"align '' does not say how many rows of what; write one of own:500"),
        ("own", r"align 'own' does not say how many rows of what; write one of own:500"),
        ("digits", r"align 'digits' does not say how many rows"),
        ("own:0", r"'0' in align 'own:0' is not a positive whole number; write one of own:500"),
        ("own:-3", r"'-3' in align 'own:-3' is not a positive whole number"),
        ("own:many", r"'many' in align 'own:many' is not a positive whole number"),
        ("own:10:classes=0", r"'0' in align 'own:10:classes=0' is not a positive whole number"),
        ("own:3:classes=4", r"spreads 3 rows over 4 classes; ask for a row a class or more"),
        ("own:58", r"'own:58' asks for 58 rows, and arrays can give 57; ask for at most that"),
        ("own:39:classes=2", r"asks for 39 rows of 2 classes, and arrays can give 38; ask for at most that"),
        ("own:10:classes=4", r"asks for 4 classes, and arrays can give 3; ask for at most that"),
        ("nothing:10", r"alignment source 'nothing' is not known; choose one of own, digits, "),
        ("mnits:10", r"alignment source 'mnits' is not known; did you mean 'mnist'"),
        ("table.csv:10", r"alignment source 'table.csv' is not known"),
        ("arrays:10", r"takes rows that are dealt to clients; write own:N"),
        ("digits:10", r"has pixels from 0 to 16, and those of arrays go to 255; choose another"),
        ("absent.npz", r"absent.npz' does not exist; give the path of a .npz file"),
        ("a.npz:10:classes=2", r"chooses classes, and the rows of a file have none; leave out classes"),
        ("eight_schools:3", r"rows of shape \(1,\), and arrays has \(8, 8, 1\); give rows like those"),
        ("eight_schools:3:classes=1", r"eight_schools is a regression; leave out classes"),
        ("digits:1798", r"asks for 1798 rows, and digits can give 1797; ask for at most that"),
    ],
)
def test_a_bad_alignment_set_is_refused_in_a_sentence(align, words):
    with pytest.raises(UsageError, match=words) as error:
        images().partition("iid", clients=2, align=align)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((4, 8, 8), np.uint8), r"rows of shape \(8, 8\), and arrays has \(8, 8, 1\); give rows like those"),
        (np.full((4, 8, 8, 1), 0.5), r"has float64 from 0.5 to 0.5, and arrays has uint8 up to 255; bring the rows"),
        (np.full((4, 8, 8, 1), True), r"has bool from 1 to 1, and arrays has uint8"),
        (np.full((4, 8, 8, 1), np.nan), r"is NaN or infinite in 4 of 4 rows; mend or drop those rows"),
        (np.zeros((0, 8, 8, 1), np.uint8), r"has uint8 of shape \(0, 8, 8, 1\), no row of numbers; give one or more"),
        (np.array([["a"]]), r"has <U1 of shape \(1, 1\), no row of numbers"),
        (np.array(3.0), r"has float64 of shape \(\), no row of numbers"),
        (np.array([[{}]]), r"cannot be read \(array 'x' holds object"),
    ],
)
def test_a_file_that_does_not_fit_images_is_refused_in_a_sentence(tmp_path, x, words):
    path = kept_rows(tmp_path, x=x)
    with pytest.raises(UsageError, match=words):
        images().partition("iid", clients=2, align=path)


def test_pixels_brighter_than_the_data_can_be_are_refused(tmp_path):
    path = kept_rows(tmp_path, x=images(brightest=17).x)
    with pytest.raises(UsageError, match="has uint8 from 0 to 17, and digits has uint8 up to 16"):
        load("digits").partition("iid", clients=2, align=path)


def test_a_file_of_several_arrays_must_say_which(tmp_path):
    path = kept_rows(tmp_path, a=np.zeros(3), b=np.zeros(3))
    with pytest.raises(UsageError, match=r"has no array 'x', only a, b; write it with numpy.savez"):
        images().partition("iid", clients=2, align=path)


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "public.npz").write_text("x")
    with pytest.raises(UsageError, match=r"public.npz' cannot be read \("):
        images().partition("iid", clients=2, align=str(tmp_path / "public.npz"))


@pytest.mark.parametrize("spread", [1 / 25, 25.0])
def test_a_spread_within_a_factor_of_30_is_accepted(tmp_path, spread):
    path = kept_rows(tmp_path, x=real(rows=500, spread=spread, seed=1).x)
    assert len(real(rows=500).partition("iid", clients=2, align=path).public) == 500


@pytest.mark.parametrize("spread", [1 / 100, 100.0])
@pytest.mark.parametrize("scaling", ["none", "standard"])
def test_a_foreign_scale_is_refused_whatever_the_scaling_of_the_data(tmp_path, spread, scaling):
    # Centred on the data, so that the spread alone gives it away.
    made = dataset(real(rows=500).x, np.arange(500) % 2, task="classification", scaling=scaling)
    path = kept_rows(tmp_path, x=real(rows=500, spread=spread, seed=1).x + made.x.mean(axis=0))
    with pytest.raises(UsageError, match="which is not within a factor of 30; bring it to the units of the data"):
        made.partition("iid", clients=2, align=path)


def test_a_column_in_foreign_units_is_seen_where_columns_are_standardised(tmp_path):
    # The wide column hides the narrow one until both are scaled.
    wide, foreign = real(rows=500).x * [1, 1, 1000], real(rows=500, seed=1).x * [1000, 1, 1000]
    made = dataset(wide, np.arange(500) % 2, task="classification", scaling="standard")
    with pytest.raises(UsageError, match="not within a factor of 30"):
        made.partition("iid", clients=2, align=kept_rows(tmp_path, x=foreign))


def test_a_foreign_origin_is_refused(tmp_path):
    path = kept_rows(tmp_path, x=real(seed=1).x + 1000.0)
    with pytest.raises(UsageError, match="not within a factor of 30"):
        real().partition("iid", clients=2, align=path)


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    x = real(seed=1).x.astype(float)
    x[3, 0], x[5, 1] = np.inf, 1e300  # the second is infinite in single precision
    with pytest.raises(UsageError, match="is NaN or infinite in 2 of 60 rows"):
        real().partition("iid", clients=2, align=kept_rows(tmp_path, x=x))


def test_a_table_has_no_rows_but_its_own(tmp_path):
    made = from_frame(a_frame(), target="ill", client="clinic")
    for align in (kept_rows(tmp_path, x=np.zeros((4, 5))), "eight_schools:3"):
        with pytest.raises(UsageError, match="no columns that fit the table frame; hold out its own with own:N"):
            made.partition(align=align)


@pytest.mark.parametrize("spec", ["natural", "iid", "dirichlet:0.5"])
def test_no_client_holds_a_row_of_a_group_of_the_alignment_set(numbered, ids, spec):
    group = np.arange(120) // 3
    made = numbered(rows=120, classes=4, client=group % 5, group=[f"g{name}" for name in group])
    federation = made.partition(spec, clients=5, validation=0.2, align="own:20")
    public = set(federation.public.ravel().astype(int) // 3)
    sides = [{row // 3 for row in ids(federation, part)} for part in ("train", "validation", "test")]
    assert len(federation.public) == 20
    assert all(sides)
    assert sum(map(len, [public, *sides])) == len(public.union(*sides)) == 40
    held = [row for part in ("train", "validation", "test") for row in ids(federation, part)]
    assert sorted(held) == [row for row in range(120) if row // 3 not in public]  # all rows of all other groups


def test_groups_of_one_row_are_drawn_as_rows_are(numbered):
    plain, alone = numbered(rows=60), numbered(rows=60, group=np.arange(60))
    for align in ("own:20", "own:7:classes=2"):
        assert drawn(alone, align) == drawn(plain, align)


def test_a_smaller_set_of_groups_is_the_beginning_of_a_larger_one(numbered):
    made = numbered(rows=120, classes=4, group=np.arange(120) // 3)
    assert drawn(made, "own:50")[:10] == drawn(made, "own:10")


def test_classes_of_an_alignment_set_are_chosen_with_groups_too(numbered):
    made = numbered(rows=120, classes=4, group=np.arange(120) // 3)
    labels = np.array(drawn(made, "own:12:classes=2")) % 4
    assert len(set(labels)) == 2


def test_the_last_rows_of_a_class_stay_with_the_clients_although_another_class_has_their_group():
    y = np.r_[np.repeat(["a", "b"], 20), ["a", "a", "c"]]
    made = dataset(np.arange(43.0)[:, None], y, group=np.r_[np.arange(40) // 2, 20, 20, 20], task="classification")
    for seed in range(5):
        federation = made.partition("iid", clients=2, align="own:34", seed=seed)
        assert 42 not in federation.public_rows.index
        assert set(federation.y) == {0, 1, 2}
    with pytest.raises(UsageError, match=r"asks for 40 rows, and arrays can give 3[68]; ask for at most that"):
        made.partition("iid", clients=2, align="own:40")


def test_rows_that_a_transform_deals_to_clients_are_refused():
    with pytest.raises(UsageError, match="that transform 'mix:digits' deals to clients; choose another"):
        load("digits").partition("iid", clients=4, align="own:20", transform="mix:digits")
    with pytest.raises(UsageError, match="that transform 'mix:digits' deals to clients; choose another"):
        images(brightest=16, classes=10).partition("iid", clients=4, align="digits:20", transform="mix:digits")
