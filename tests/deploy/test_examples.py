"""A node's rows: dealt to it, or in a file of its own."""

import stat

import numpy as np
import pytest

from priory import data, methods
from priory.core.errors import UsageError
from priory.deploy import charter as charters
from priory.deploy.examples import from_file, load, of_client, save
from priory.engine.settings import Settings
from tests.deploy.conftest import MODEL, small_charter, small_federation


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A CSV file of two clients, and the charter of its federation."""
    path = tmp_path_factory.mktemp("table") / "rows.csv"
    rows = [f"{i % 7},{'red' if i % 3 else 'blue'},{'yes' if i % 2 else 'no'},{i % 2}" for i in range(40)]
    path.write_text("age,colour,ill,site\n" + "\n".join(rows) + "\n")
    federation = data.load(str(path), target="ill", client="site").partition(min_examples=1)
    return path, charters.make(methods.get("fedavg")(), federation, Settings(rounds=1, model=MODEL))


def test_the_rows_of_a_client_are_its_own_and_no_others():
    federation = small_federation()
    parts = [of_client(federation, client) for client in (0, 1)]
    assert sum(len(part.x) for part in parts) == len(federation.x)
    assert not {row.tobytes() for row in parts[0].x} & {row.tobytes() for row in parts[1].x}


def test_held_out_rows_are_those_of_the_federation():
    federation = small_federation()
    own = of_client(federation, 1)
    test = federation.rows(1, "test")
    np.testing.assert_array_equal(own.x[own.is_test], federation.x[test])


@pytest.mark.parametrize("client", [-1, 2])
def test_a_client_that_is_not_there_is_refused(client):
    with pytest.raises(UsageError, match=f"client {client} does not fit the 2 clients of"):
        of_client(small_federation(), client)


def test_dealt_rows_come_back_as_they_were(tmp_path):
    own = of_client(small_federation(), 0)
    save(own, tmp_path / "deep" / "rows.npz")
    again = load(tmp_path / "deep" / "rows.npz")
    for name in ("x", "y", "is_test"):
        np.testing.assert_array_equal(getattr(again, name), getattr(own, name))
        assert getattr(again, name).dtype == getattr(own, name).dtype
    assert again.scale is None


def test_dealt_rows_are_for_their_owner_alone(tmp_path, open_umask):
    save(of_client(small_federation(), 0), tmp_path / "node" / "rows.npz")
    assert stat.S_IMODE((tmp_path / "node" / "rows.npz").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["absent", "a directory", "empty", "text", "cut", "other arrays", "pickled"])
def test_dealt_rows_that_are_none_are_refused(tmp_path, damage):
    path = tmp_path / "rows.npz"
    save(of_client(small_federation(), 0), tmp_path / "good.npz")
    match damage:
        case "a directory":
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("x,y\n1,2\n")
        case "cut":
            path.write_bytes((tmp_path / "good.npz").read_bytes()[:300])
        case "other arrays":
            np.savez(path, a=np.ones(3))
        case "pickled":
            np.savez(path, x=np.array([{}, 1], object), y=np.ones(2), is_test=np.ones(2, bool))
    with pytest.raises(UsageError, match=r"rows\.npz (cannot be read|holds no dealt rows).*; deal .* or name a file"):
        load(path)


def test_a_file_is_read_in_the_form_of_the_federation(table):
    path, charter = table
    own = from_file(path, charter)
    own.check(charter, 0)
    assert own.x.shape == (40, *charter.question.input_shape)
    assert own.is_test.sum() == 8
    np.testing.assert_array_equal(own.y, np.arange(40) % 2)


def test_the_same_rows_are_held_out_every_time(table):
    path, charter = table
    np.testing.assert_array_equal(from_file(path, charter).is_test, from_file(path, charter).is_test)


def test_rows_of_a_group_are_held_out_together(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("age,ill,site,patient\n" + "".join(f"{i % 7},{i % 2},{i // 20},{i // 4}\n" for i in range(40)))
    federation = data.load(str(path), target="ill", client="site", group="patient").partition()
    charter = charters.make(methods.get("fedavg")(), federation, Settings(rounds=1, model=MODEL))
    assert from_file(path, charter).is_test.reshape(10, 4).sum(axis=1).tolist().count(4) == 2
    assert from_file(path, charter).is_test.sum() == 8
    path.write_text("age,ill\n1,0\n2,1\n")
    with pytest.raises(UsageError, match="column 'patient' is absent"):
        from_file(path, charter)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("age,colour\n1,red\n", "has no labels; add the column 'ill'"),
        ("age,ill\n1,yes\n", "column 'colour' is absent"),
        ("age,colour,ill\n1,red,maybe\n", "maybe"),
        ("age,colour,ill\n", "no rows"),
    ],
    ids=["no labels", "a column absent", "an unknown class", "no rows"],
)
def test_a_file_that_does_not_fit_is_told_in_one_sentence(table, tmp_path, text, sentence):
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(UsageError, match=sentence):
        from_file(tmp_path / "own.csv", table[1])


@pytest.mark.parametrize("name", ["absent.csv", "rows.txt", "rows.npz"])
def test_a_file_of_another_kind_is_refused(table, tmp_path, name):
    np.savez(tmp_path / "rows.npz", x=np.ones((2, 5)))
    (tmp_path / "rows.txt").write_text("")
    with pytest.raises(UsageError, match=name):
        from_file(tmp_path / name, table[1])


def test_targets_with_standard_errors_need_them(tmp_path):
    schools = data.load("eight_schools").partition()
    charter = charters.make(methods.get("fedpop")(), schools, Settings(rounds=1, model="intercept"))
    own = of_client(schools, 0)
    own.check(charter, 0)
    with pytest.raises(UsageError, match="Client 0 has no standard errors, which targets have here; add `scale`"):
        type(own)(own.x, own.y, None, own.is_test).check(charter, 0)


def test_rows_fit_the_charter_they_were_dealt_under():
    of_client(small_federation(), 0).check(small_charter(methods.get("fedavg")()), 0)
