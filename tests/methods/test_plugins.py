"""Methods from outside the package: entry points, modules and files, and the sentence that each fault ends in."""

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from priory import FedAvg, UsageError, methods
from priory.methods._plugins import GROUP
from tests.methods.problems import FEDAVGM

FILE = Path(FEDAVGM.rpartition(":")[0])
GOOD = """
from priory.core.struct import struct
from priory.fed.method import Method

@struct
class Mine(Method):
    strength: float = 0.5

    def client_update(self, task, down, client, data, key): ...

    def personalise(self, task, down, client, data, key): ...
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package of one module that declares entry points, as pip does: a directory on the path."""

    def install(points: str, text: str = GOOD, name: str = "planted"):
        place = tmp_path / name
        module = name.replace("-", "_")
        place.mkdir()
        (place / f"{module}.py").write_text(text)
        info = place / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[priory.methods]\n{points}\n")
        monkeypatch.syspath_prepend(str(place))
        monkeypatch.delitem(sys.modules, module, raising=False)

    yield install
    sys.modules.pop("planted", None)


@pytest.fixture
def written(tmp_path):
    """Write a file and return its name as a method."""

    def write(text: str, name: str = "Mine") -> str:
        (tmp_path / "mine.py").write_text(text)
        return f"{tmp_path}/mine.py:{name}"

    return write


def test_a_built_in_name_is_that_of_the_file():
    assert methods.REGISTRY["fedavg"] is FedAvg
    assert list(methods.REGISTRY) == methods.names()[: len(methods.REGISTRY)]
    for name, cls in methods.REGISTRY.items():
        assert cls.__module__ == f"priory.methods.{name.replace('-', '_')}"


def test_an_entry_point_is_a_method_by_its_name(package):
    package("mine = planted:Mine")
    assert "mine" in methods.names()
    assert "planted" not in sys.modules, "names are listed without an import"
    method = methods.make("mine")
    assert type(method) is sys.modules["planted"].Mine
    assert methods.name_of(method) == "mine"
    assert methods.is_registered(method)
    assert methods.origin_of(type(method)).code is None


def test_a_class_that_was_imported_is_known_by_its_entry_point(package):
    package("mine = planted:Mine")
    import planted

    assert methods.name_of(planted.Mine()) == "mine"


def test_a_class_of_a_module_is_named_by_its_code(package):
    package("other = planted:Other")
    method = methods.make("planted:Mine")
    assert methods.name_of(method) == "mine"
    assert methods.origin_of(type(method)).code == "planted:Mine"


def test_a_file_gives_the_same_class_again_and_so_does_a_copy_of_it(tmp_path):
    (tmp_path / "copy.py").write_bytes(FILE.read_bytes())
    cls = methods.load(FEDAVGM)
    assert methods.load(FEDAVGM) is cls
    assert methods.load(f"{tmp_path}/copy.py:FedAvgM") is cls
    assert sys.modules[cls.__module__].FedAvgM is cls
    assert methods.origin_of(cls).code == f"{tmp_path}/copy.py:FedAvgM", "the name that was given last"
    assert methods.load("copy.py:FedAvgM", tmp_path / "manifest.toml") is cls, "what has run already needs no trust"


def test_a_file_that_was_changed_gives_another_class(written):
    before = methods.load(written(GOOD))
    after = methods.load(written(GOOD.replace("0.5", "0.25")))
    assert (before().strength, after().strength) == (0.5, 0.25)
    assert methods.origin_of(before).table() != methods.origin_of(after).table()


def test_a_class_of_priory_is_built_in_however_it_is_named():
    method = methods.make("priory.methods.fedavg:FedAvg")
    assert methods.name_of(method) == "fedavg"
    assert methods.origin_of(type(method)) is None


def test_a_name_never_imports_code(written):
    for name in (written(GOOD), "planted:Mine"):
        with pytest.raises(UsageError, match="is not registered"):
            methods.get(name)


@pytest.mark.parametrize(
    ("points", "name", "says"),
    [
        ("mine = planted:Nothing", "mine", r"'mine' of the package planted cannot be imported from planted:Nothing"),
        ("mine = nowhere:Mine", "mine", r"cannot be imported from nowhere:Mine \(ModuleNotFoundError"),
        ("mine = planted", "mine", r"'mine' of the package planted is <module .*; name a class that derives"),
        (
            "fedavg = planted:Mine",
            "fedavg",
            r"by Priory and planted; give .* priory.methods.fedavg:FedAvg or planted:Mine, or",
        ),
    ],
)
def test_an_entry_point_that_cannot_be_used_ends_in_one_sentence(package, points, name, says):
    package(points)
    with pytest.raises(UsageError, match=says):
        methods.make(name)
    (found,) = [cls for known, cls in methods.installed() if known == name]
    assert isinstance(found, UsageError)


def test_two_packages_with_one_name_are_told_apart(package):
    package("mine = planted:Mine")
    package("mine = planted_twice:Mine", name="planted-twice")
    assert len(entry_points(group=GROUP, name="mine")) == 2
    with pytest.raises(UsageError, match="registered by planted-twice and planted"):
        methods.make("mine")


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("x = 1\ndef broken(:", "Mine", r"has a syntax error in line 2 of .*mine.py: invalid syntax; correct it"),
        ("import sys\nsys.exit('bye')", "Mine", r"cannot be imported \(SystemExit: bye\)"),
        ("import nothing_like_this", "Mine", r"cannot be imported \(ModuleNotFoundError.*installed packages only"),
        (GOOD, "Yours", r"mine.py:Yours' is not in .*mine.py; choose from Mine"),
        ("x = 1", "Yours", r"is not in .*mine.py; it has no methods"),
        ("Mine = 3", "Mine", "is 3; name a class that derives from priory.fed.method.Method"),
        ("class Mine: pass", "Mine", "name a class that derives"),
        (GOOD.replace("@struct", ""), "Mine", "decorate the class with @struct"),
        (GOOD.replace(" = 0.5", ""), "Mine", "give every setting a default"),
        (GOOD.replace("client_update", "client_updat"), "Mine", "client_update.*write all abstract verbs"),
        (GOOD.replace("strength", "name"), "Mine", "has a setting called name"),
        (GOOD.replace("strength", "broadcast"), "Mine", "called broadcast, which is the name of a verb; rename it"),
        (GOOD.replace("float = 0.5", "str = 'a'"), "Mine", r"strength='a', .* declare it as static\(default='a'\)"),
    ],
    ids=[
        "syntax",
        "exit",
        "import",
        "class",
        "empty",
        "number",
        "protocol",
        "struct",
        "default",
        "verb",
        "name",
        "setting",
        "text",
    ],
)
def test_a_file_that_cannot_be_used_ends_in_one_sentence(written, text, name, says):
    with pytest.raises(UsageError, match=says) as caught:
        methods.make(written(text, name))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_file_that_failed_is_tried_again(written):
    for _ in range(2):
        with pytest.raises(UsageError, match="ZeroDivisionError"):
            methods.make(written("1 / 0"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./mine.py", r"name its class too, as in ./mine.py:MyMethod"),
        ("nowhere/mine.py:Mine", "names a file that does not exist, .*/nowhere/mine.py; check the path"),
        ("nowhere.module:Mine", "cannot be imported .ModuleNotFoundError"),
        ("fedprox:mu=0.1", "is not registered; write path/file.py:Class or package.module:Class"),
        ("./mine.txt:Mine", "is not registered; write path/file.py:Class"),
    ],
)
def test_a_name_that_leads_nowhere_ends_in_one_sentence(name, says):
    with pytest.raises(UsageError, match=says):
        methods.make(name)
