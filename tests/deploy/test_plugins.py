"""Methods from outside the package behind the wire: a file travels with the app, a package has to be installed."""

import shutil
import sys
from pathlib import Path

import pytest

import priory
from priory import UsageError, methods
from priory.deploy import charter as charters
from priory.deploy.app import changed_files, write_app
from priory.deploy.charter import METHOD
from tests.deploy.conftest import Deployed, small_charter, small_federation
from tests.deploy.test_one_truth import assert_same_server
from tests.methods.problems import FEDAVGM

MODEL = "linear"


@pytest.fixture
def app(tmp_path) -> Path:
    """The package of an app whose method is a file."""
    return write_app(tmp_path / "app", small_charter(methods.make(FEDAVGM), model=MODEL), {})


@pytest.fixture
def forgotten(monkeypatch):
    """A process that has not imported the file yet, as that of a node."""
    for name in [name for name in sys.modules if name.startswith("priory_method_")]:
        monkeypatch.delitem(sys.modules, name)


def test_the_file_is_in_the_app(app):
    assert (app / METHOD).read_bytes() == Path(FEDAVGM.rpartition(":")[0]).read_bytes()
    assert charters.code_in(app)["method"] == "method.py:FedAvgM"


def test_a_node_finds_the_method_in_its_app(app, tmp_path, forgotten):
    shutil.copytree(app, tmp_path / "node")
    charter = charters.load(tmp_path / "node", trust_code=True)
    assert charter.digest == small_charter(methods.make(FEDAVGM), model=MODEL).digest
    assert charter.name == "fedavgm"
    assert sys.modules[type(charter.method).__module__].__file__ == str(tmp_path / "node" / METHOD)


def test_a_charter_that_is_not_trusted_imports_no_file(app, forgotten):
    for read in (charters.load, charters.read):
        with pytest.raises(UsageError, match=r"names the method 'method.py:FedAvgM'.*trust_code=True"):
            read(app)
    assert [name for name in sys.modules if name.startswith("priory_method_")] == []


def test_simulator_and_wire_give_the_same_server_and_scores(app, tmp_path, forgotten):
    made = Deployed(tmp_path, charters.load(app, trust_code=True), small_federation())
    server = made.server()
    summary = server.go()
    method = methods.make(FEDAVGM)
    run = priory.simulate(method, made.federation, rounds=3, seed=1, eval_every=0, model=MODEL)
    assert_same_server(server.server, run.server)
    assert summary["personal"]["accuracy"] == pytest.approx(run.personal.accuracy)
    assert summary["method"] == "fedavgm"


def test_a_method_that_was_changed_in_the_app_is_refused(app, tmp_path):
    charter = charters.load(app)  # as in the process that wrote it
    fresh = write_app(tmp_path / "fresh" / "app", charter, {})
    assert changed_files(app.parent, fresh.parent) == []
    (app / METHOD).write_text((app / METHOD).read_text() + "\n# Changed in the app.\n")
    assert changed_files(app.parent, fresh.parent) == ["app/method.py"]
    with pytest.raises(UsageError, match="names the method"):
        charters.load(app)
    with pytest.raises(UsageError, match="written with other code of the method fedavgm"):
        charters.load(app, trust_code=True)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with the method, whose name it declares."""
    place = tmp_path / "site"
    info = place / "their_fedavgm-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-fedavgm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[priory.methods]\nfedavgm = their_fedavgm:FedAvgM\n")
    shutil.copy(FEDAVGM.rpartition(":")[0], place / "their_fedavgm.py")
    monkeypatch.syspath_prepend(str(place))
    yield place
    sys.modules.pop("their_fedavgm", None)


@pytest.mark.parametrize("name", ["fedavgm", "their_fedavgm:FedAvgM"])
def test_a_method_of_a_package_is_not_in_the_app_and_has_to_be_installed(package, tmp_path, monkeypatch, name):
    charter = small_charter(methods.make(name), model=MODEL)
    app = write_app(tmp_path / "app", charter, {})
    assert not (app / METHOD).exists()
    assert charters.load(app, trust_code=True).digest == charter.digest
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(package)])
    sys.modules.pop("their_fedavgm")
    with pytest.raises(UsageError, match=r"not installed here; install its package|No module named 'their_fedavgm'"):
        charters.load(app, trust_code=True)


def test_another_version_of_a_package_is_refused(package, tmp_path):
    app = write_app(tmp_path / "app", small_charter(methods.make("fedavgm"), model=MODEL), {})
    sys.modules.pop("their_fedavgm")
    (package / "their_fedavgm.py").write_text((package / "their_fedavgm.py").read_text() + "\n# Version 2.\n")
    with pytest.raises(UsageError, match="install the same version of its package on all sides"):
        charters.load(app)
