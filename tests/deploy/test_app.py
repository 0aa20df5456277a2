"""The written app: valid Python and TOML, made to be changed, and never written over another."""

import ast
import tomllib
from importlib import resources

import pytest

import priory
from priory.core.errors import UsageError
from priory.deploy import charter as charters
from priory.deploy.app import FILES, package_of, write_app
from priory.deploy.flower import OPTIONS, configured
from priory.methods import get
from tests.deploy.conftest import small_charter

SPEC = {"data": "digits", "partition": "iid", "clients": 2, "note": "@NAME@ 'quoted' \\ ü"}


@pytest.fixture(scope="module")
def charter():
    return small_charter(get("fedavg")())


def test_all_files_are_there(tmp_path, charter):
    package = write_app(tmp_path / "clinic", charter, SPEC)
    assert package == tmp_path / "clinic" / "clinic"
    assert sorted(path.name for path in package.iterdir()) == [
        "__init__.py", "client.py", "manifest.toml", "problem.json", "rows.py", "server.py",
    ]  # fmt: skip
    assert [path.name for path in package.parent.iterdir() if path.is_file()] == ["pyproject.toml"]


ODD = [
    "clinic",
    "My Clinic!",
    "3rd",
    "...",
    "class",
    "priory",
    "flwr",
    "json",
    "numpy",
    "Übung",
    "a--b",
    "9",
    "x" * 80,
    f"9{'-y' * 40}",
]


@pytest.mark.parametrize("name", ODD)
def test_whatever_the_directory_is_called_the_app_is_valid(tmp_path, charter, name):
    package = write_app(tmp_path / name, charter, SPEC)
    assert package.name.isidentifier()
    assert len(package.name) <= 32
    assert package.name not in ("class", "priory", "flwr", "json", "numpy")
    for path in package.glob("*.py"):
        compile(path.read_text(), str(path), "exec")
        assert "@" not in path.read_text().replace("@NAME@", "")
    table = tomllib.loads((package.parent / "pyproject.toml").read_text())
    components = table["tool"]["flwr"]["app"]["components"]
    assert components == {"serverapp": f"{package.name}.server:app", "clientapp": f"{package.name}.client:app"}
    assert table["project"]["dependencies"] == [f"priory[flower]=={priory.__version__}"]
    assert table["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [package.name]


def test_its_configuration_is_what_a_server_takes(tmp_path, charter):
    write_app(tmp_path / "clinic", charter, SPEC, out=str(tmp_path / "out"), authenticated=True)
    table = tomllib.loads((tmp_path / "clinic" / "pyproject.toml").read_text())
    config = table["tool"]["flwr"]["app"]["config"]
    assert set(config) == set(OPTIONS)
    running, how = configured(charter, config)
    assert running == charter
    assert (how.out, how.authenticated) == (tmp_path / "out", True)


@pytest.mark.parametrize("out", ['/a "b"/c', "/back\\slash", "/ünï/😀", "~/new\nline"])
def test_an_odd_directory_of_the_server_is_written_as_it_is(tmp_path, charter, out):
    write_app(tmp_path / "clinic", charter, SPEC, out=out)
    table = tomllib.loads((tmp_path / "clinic" / "pyproject.toml").read_text())
    assert table["tool"]["flwr"]["app"]["config"]["out"] == out


def test_the_charter_in_it_is_the_one_it_was_made_of(tmp_path, charter):
    assert charters.load(write_app(tmp_path / "clinic", charter, SPEC)).digest == charter.digest


def test_the_rows_of_simulated_nodes_come_from_its_data(tmp_path, charter):
    package = write_app(tmp_path / "clinic", charter, SPEC)
    tree = ast.parse((package / "rows.py").read_text())
    (spec,) = [node.value for node in tree.body if isinstance(node, ast.AnnAssign)]
    assert ast.literal_eval(spec) == SPEC


@pytest.mark.parametrize("what", ["a file in it", "a file"])
def test_nothing_is_overwritten(tmp_path, charter, what):
    place = tmp_path / "clinic"
    if what == "a file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="clinic exists and is not empty, and no app is overwritten; choose another"):
        write_app(place, charter, SPEC)
    assert place.is_file() or [path.name for path in place.iterdir()] == ["notes.txt"]


def test_an_empty_directory_will_do(tmp_path, charter):
    (tmp_path / "clinic").mkdir()
    assert write_app(tmp_path / "clinic", charter, SPEC).is_dir()


def test_a_directory_that_cannot_be_written_is_told(tmp_path, charter):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be written \(Not a directory\); choose a directory that can"):
        write_app(tmp_path / "file" / "clinic", charter, SPEC)


def test_an_app_is_found_where_it_was_written(tmp_path, charter):
    package = write_app(tmp_path / "clinic", charter, SPEC)
    assert package_of(tmp_path / "clinic") == package


@pytest.mark.parametrize("damage", ["no pyproject", "two packages", "nothing"])
def test_what_is_no_app_is_not_taken_for_one(tmp_path, charter, damage):
    place = tmp_path / "clinic"
    if damage != "nothing":
        write_app(place, charter, SPEC)
    if damage == "no pyproject":
        (place / "pyproject.toml").unlink()
    if damage == "two packages":
        (place / "other").mkdir()
        (place / "other" / "manifest.toml").write_text("")
    with pytest.raises(UsageError, match="clinic does not contain a Priory app; make one with `priory flower init"):
        package_of(place)


@pytest.mark.parametrize("name", FILES)
def test_the_templates_are_in_the_package(name):
    assert (resources.files("priory.deploy") / "template" / f"{name}.in").is_file()


def test_the_wheel_takes_all_of_the_package():
    table = tomllib.loads((resources.files("priory") / ".." / "pyproject.toml").read_text())
    wheel = table["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["priory"]}
