"""The named data sets: shapes, counts and where their files come from."""

import hashlib
import io

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.datasets import load_digits

from priory.core.errors import UsageError
from priory.data import describe, files, from_spec, load

ARRAYS = {
    "x_train": np.zeros((50, 28, 28, 1), np.uint8),
    "y_train": np.arange(50, dtype=np.uint8) % 10,
    "x_test": np.zeros((20, 28, 28, 1), np.uint8),
    "y_test": np.arange(20, dtype=np.uint8) % 10,
}


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """Neither data directory nor cache has anything."""
    monkeypatch.delenv("PRIORY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_digits_are_bytes_of_sixteen_levels():
    data = load("digits")
    assert (data.x.shape, data.x.dtype, data.x.max()) == ((1797, 8, 8, 1), np.uint8, 16)


def test_digits_are_those_of_scikit_learn():
    data, theirs = load("digits"), load_digits()
    np.testing.assert_array_equal(data.x[..., 0], theirs.images)
    np.testing.assert_array_equal(data.y, theirs.target)


def test_standard_scaling_of_digits_is_that_of_the_data():
    federation = load("digits", scaling="standard").partition("iid", clients=2)
    inputs = federation.inputs(federation.x)
    assert np.allclose([inputs.mean(), inputs.std()], [0.0, 1.0], atol=1e-3)


@pytest.mark.parametrize(
    ("name", "shape", "tests"),
    [
        ("mnist", (70000, 28, 28, 1), 10000),
        ("fashion_mnist", (70000, 28, 28, 1), 10000),
        ("cifar10", (26000, 32, 32, 3), 6000),
        ("cifar100", (26000, 32, 32, 3), 6000),
    ],
)
def test_image_files_are_read_whole_and_standardised(whole, name, shape, tests):
    data = whole(name)
    assert data.x.shape == shape
    assert data.official_test.sum() == tests
    assert np.bincount(data.y).min() > 0
    mean = data.x[~data.official_test].mean(axis=(0, 1, 2))
    assert np.abs((mean - data.shift) * data.factor).max() < 0.02  # the constants are rounded, CIFAR is a sample


def test_writers_are_natural_clients(data_dir):
    federation = load("mnist_writers").partition()
    total = federation.train.count + federation.test.count
    assert (len(total), total.min(), total.max(), total.sum()) == (539, 19, 131, 60000)


def test_hospitals_are_natural_clients_and_zero_cholesterol_is_missing():
    federation = load("heart_disease").partition(test=0.0)
    assert dict(zip(federation.clients, federation.train.count.tolist(), strict=True)) == {
        "cleveland": 303,
        "hungarian": 294,
        "switzerland": 123,
        "va": 200,
    }
    missing = federation.x[federation.rows("switzerland"), federation.encoder.names.index("chol missing")]
    assert missing.all()
    assert np.isfinite(federation.x).all()


def test_radon_keeps_floor_and_log_uranium_in_their_units():
    federation = load("radon").partition(test=0.0)
    assert (federation.num_clients, federation.num_examples, federation.num_classes) == (85, 919, None)
    assert set(federation.x[:, 0]) == {0.0, 1.0}
    assert abs(federation.x[:, 1].mean() + 0.13) < 0.02
    assert federation.train.count.min() == 1


def test_a_column_of_radon_may_be_dropped():
    both, floor = load("radon"), load("radon", drop=["log_uranium"])
    assert np.array_equal(floor.x, both.x[:, :1])
    assert np.array_equal(load("radon", drop="floor").x, both.x[:, 1:])


def test_a_manifest_says_which_column_was_dropped():
    federation = load("radon", drop=["log_uranium"]).partition(seed=1)
    assert federation.spec["drop"] == ["log_uranium"]
    assert from_spec(federation.spec).checksum == federation.checksum


def test_the_varying_intercept_model_of_radon_has_the_known_maximum():
    """y_ij = a_i + b floor_ij + e_ij with a_i ~ N(mu, sigma^2), e_ij ~ N(0, s^2), the a_i integrated out."""
    data = load("radon", drop=["log_uranium"])
    floor, y, num = data.x[:, 0].astype(float), data.y.astype(float), np.bincount(data.client)

    def negative_log_likelihood(at):
        noise, between = np.exp(2 * at[2]), np.exp(2 * at[3])
        rest = y - at[0] - at[1] * floor
        total, squares = np.bincount(data.client, rest), np.bincount(data.client, rest**2)
        log_det = (num - 1) * np.log(noise) + np.log(noise + num * between)
        quadratic = squares / noise - between * total**2 / (noise * (noise + num * between))
        return 0.5 * np.sum(num * np.log(2 * np.pi) + log_det + quadratic)

    found = minimize(negative_log_likelihood, [1.0, -0.5, 0.0, -1.0], method="BFGS")
    estimate = [*found.x[:2], *np.exp(found.x[2:])]
    assert np.allclose(estimate, [1.4612, -0.6926, 0.7552, 0.3245], atol=1e-4)
    assert abs(found.fun - 1081.8253) < 1e-3


def test_eight_schools_is_the_published_table(data_dir):
    table = np.genfromtxt(data_dir / "eight_schools.csv", delimiter=",", skip_header=1, usecols=(1, 2))
    data = load("eight_schools")
    assert np.array_equal(np.stack([data.y, data.scale], axis=1), table)


def test_eight_schools_have_no_test_part():
    federation = load("eight_schools").partition(validation=0.5)
    assert (federation.train.total, federation.validation.total, federation.test.total) == (8, 0, 0)


def test_the_catalogue_agrees_with_the_data(whole):
    for entry in describe():
        data = whole(entry.name)
        assert entry.available
        assert entry.classes == data.num_classes
        assert entry.examples in (None, len(data.y))


def test_data_that_come_with_the_package_are_always_available(nowhere):
    available = {entry.name for entry in describe() if entry.available}
    assert {"digits", "heart_disease", "radon", "eight_schools", "synthetic:linear"} <= available
    assert "mnist" not in available


@pytest.mark.parametrize("name", ["heart_disease", "radon"])
def test_a_shipped_file_is_the_published_one_and_its_notice_cites_it(nowhere, name):
    ((file, checksum),) = files.FILES[name].items()
    assert hashlib.sha256((files.SHIPPED / file).read_bytes()).hexdigest() == checksum
    (entry,) = (entry for entry in describe() if entry.name == name)
    notice = (files.SHIPPED / "README.md").read_text().split("\n## ")
    (about,) = (section for section in notice if section.startswith(file))
    for part in ("Source", "Licence", "Citation", "Changes"):
        assert f"- **{part}**: " in about
    assert entry.licence in about


def test_the_notice_attributes_the_heart_disease_data_as_their_licence_asks():
    notice = " ".join((files.SHIPPED / "README.md").read_text().split())
    for words in ("Janosi", "Steinbrunn", "Pfisterer", "Detrano", "doi.org/10.24432/C52P4X", "licenses/by/4.0"):
        assert words in notice


@pytest.mark.parametrize("name", ["heart_disease", "radon"])
def test_a_file_of_the_data_directory_never_replaces_a_shipped_one(nowhere, monkeypatch, name):
    checksum = load(name).partition().checksum
    (file,) = files.FILES[name]
    (nowhere / file).write_text("another file of that name\n")
    monkeypatch.setenv("PRIORY_DATA", str(nowhere))
    assert load(name).partition().checksum == checksum


def test_a_damaged_shipped_file_says_to_install_again(nowhere, monkeypatch):
    (nowhere / "radon_minnesota.csv").write_text("county\nAITKEN\n")
    monkeypatch.setattr(files, "SHIPPED", nowhere)
    with pytest.raises(UsageError, match=r"radon_minnesota\.csv is damaged: .*; install Priory again\.$"):
        load("radon")


@pytest.mark.parametrize("name", ["mnist", "mnist_writers", "cifar100"])
def test_absent_data_say_what_to_set(nowhere, monkeypatch, name):
    monkeypatch.setattr(files, "fetch", offline)
    with pytest.raises(UsageError, match=f"data set '{name}' is in neither .*; set PRIORY_DATA to") as caught:
        load(name)
    assert "\n" not in str(caught.value)


def offline(name):
    raise ConnectionError("no route\nto host")


def test_a_wrong_data_directory_is_named(nowhere, monkeypatch):
    monkeypatch.setenv("PRIORY_DATA", str(nowhere / "gone"))
    with pytest.raises(UsageError, match="gone is not a directory"):
        load("mnist")


def test_fetched_data_are_kept_and_fetched_once(nowhere, monkeypatch):
    fetched = []
    monkeypatch.setattr(files, "fetch", lambda name: fetched.append(name) or ARRAYS)
    first, second = load("mnist"), load("mnist")
    assert fetched == ["mnist"]
    assert first.x.shape == (70, 28, 28, 1)
    assert (first.y == second.y).all()


def test_a_damaged_cache_says_what_to_delete(nowhere, monkeypatch):
    monkeypatch.setattr(files, "fetch", lambda name: ARRAYS)
    load("mnist")
    path = nowhere / "cache" / "priory" / "fetched" / "mnist.npz"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"mnist\.npz is damaged.*delete it"):
        load("mnist")


def test_a_damaged_file_is_named(nowhere, monkeypatch):
    (nowhere / "cifar10_26k.npz").write_bytes(b"not what was published")
    monkeypatch.setenv("PRIORY_DATA", str(nowhere))
    with pytest.raises(UsageError, match=r"cifar10_26k\.npz is damaged.*; replace it with the published file"):
        load("cifar10")


def test_files_in_the_cache_serve_as_well(nowhere, monkeypatch):
    content = io.BytesIO()
    differences = {f"d_{part}": np.ones((5, 3, 32, 32), np.uint8) for part in ("train", "test")}
    np.savez(content, y_train=np.arange(5), y_test=np.arange(5), **differences)
    checksum = hashlib.sha256(content.getvalue()).hexdigest()
    monkeypatch.setitem(files.FILES, "cifar10", {"cifar10_26k.npz": checksum})
    (nowhere / "cache" / "priory").mkdir(parents=True)
    (nowhere / "cache" / "priory" / "cifar10_26k.npz").write_bytes(content.getvalue())
    assert len(load("cifar10").y) == 10


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("digit", {}, "did you mean 'digits'"),
        ("MNIST", {}, "data set 'MNIST' is not known"),
        ("own.parquet", {}, "neither a data set nor a .csv or .npz file"),
        ("absent.csv", {"target": "y"}, "absent.csv does not exist"),
        ("absent.npz", {}, "absent.npz does not exist"),
        ("digits", {"target": "y"}, "target='y' does not apply"),
        ("eight_schools", {"drop": ["x"]}, "drop=['x'] does not apply"),
        ("radon", {"target": "log_radon"}, "target='log_radon' does not apply"),
        ("radon", {"drop": ["uranium"]}, "column of radon 'uranium' is not known; did you mean 'log_uranium'"),
        ("radon", {"drop": ["floor", "log_uranium"]}, "leaves radon without a column"),
        ("own.xlsx", {"target": "y"}, "neither a data set nor a .csv or .npz file"),
        ("own.npz", {"client": "c"}, "client='c' does not apply"),
        ("eight_schools", {"scaling": "unit"}, "scaling='unit' does not apply"),
        ("digits", {"scaling": "log"}, "scaling 'log' is not known"),
    ],
)
def test_a_bad_name_or_option_ends_in_one_sentence(name, options, words):
    with pytest.raises(UsageError) as caught:
        load(name, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cifar100_knows_its_twenty_coarse_classes(whole):
    data = whole("cifar100")
    pairs = np.unique(np.stack([data.y, data.coarse]), axis=1)
    assert pairs.shape == (2, 100)  # a fine class has one coarse class
    assert (np.bincount(pairs[1]) == 5).all()
