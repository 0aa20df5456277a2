"""The SHA-256 of an app: what the operator sees is what a node finds, whoever installed the app and however often."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab

from priory.core.errors import UsageError
from priory.deploy.app import write_app
from priory.deploy.app_hash import hash_of_files, installed_hash, written_hash
from priory.methods import get
from tests.deploy.conftest import small_charter
from tests.deploy.test_app import ODD, SPEC

PAGE = Path(__file__).parents[2] / "docs" / "security.md"


@pytest.fixture
def app(tmp_path):
    """An app, as `priory flower init` writes it."""
    write_app(tmp_path / "clinic", small_charter(get("fedavg")()), SPEC)
    return tmp_path / "clinic"


def installed(app, place="home"):
    """The directory of the app as a node installs it."""
    bundle = build_fab_from_disk(app)
    return install_from_fab(bundle, app.parent / place, skip_prompt=True)


@pytest.mark.parametrize("name", ODD)
def test_operator_and_node_find_the_same_number(tmp_path, name):
    write_app(tmp_path / name, small_charter(get("fedavg")()), SPEC)
    assert written_hash(tmp_path / name) == installed_hash(installed(tmp_path / name))


def change(app, file, text):
    path = app / file
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as handle:
        handle.write(text)


@pytest.mark.parametrize(
    ("file", "text"),
    [("clinic/rows.py", "\n# changed\n"), ("clinic/more.py", "x = 1\n"), ("clinic/manifest.toml", "\n[more]\n")],
)
def test_a_changed_app_has_another_number_on_both_sides(app, file, text):
    before = written_hash(app)
    change(app, file, text)
    assert written_hash(app) == installed_hash(installed(app)) != before


@pytest.mark.parametrize("file", ["visits.csv", "notes.txt", "clinic/test_rows.py", "clinic/__pycache__/rows.pyc"])
def test_files_that_flower_leaves_out_do_not_count(app, file):
    before = written_hash(app)
    change(app, file, "anything")
    assert written_hash(app) == installed_hash(installed(app)) == before


def test_an_installed_app_has_the_same_number_after_it_ran(app):
    there = installed(app)
    before = installed_hash(there)
    (there / "clinic" / "__pycache__").mkdir()
    (there / "clinic" / "__pycache__" / "rows.cpython-311.pyc").write_bytes(b"compiled")
    (there / "uv.lock").write_text("version = 1\n")
    assert installed_hash(there) == before == written_hash(there)


@pytest.mark.parametrize("file", ["clinic/rows.py", "clinic/native.so", "sitecustomize.py", ".hidden"])
def test_a_file_that_was_put_into_an_installed_app_shows(app, file):
    there = installed(app)
    before = installed_hash(there)
    change(there, file, "\n")
    assert installed_hash(there) != before


def test_the_command_of_the_page_prints_the_number(app):
    there = installed(app)
    (there / "clinic" / "__pycache__").mkdir()
    (there / "clinic" / "__pycache__" / "rows.cpython-311.pyc").write_bytes(b"compiled")
    (there / "uv.lock").write_text("version = 1\n")
    (command,) = [line for line in PAGE.read_text().splitlines() if line.startswith("    find ")]
    said = subprocess.run(["bash", "-c", command], cwd=there, capture_output=True, text=True, check=True).stdout
    assert said.split()[0] == installed_hash(there) == written_hash(app)


def test_contents_that_changed_places_have_another_number():
    assert hash_of_files({"a": b"1", "b": b"2"}) != hash_of_files({"a": b"2", "b": b"1"})
    assert hash_of_files({"b": b"2", "a": b"1"}) == hash_of_files({"a": b"1", "b": b"2"})


def test_an_app_that_flower_cannot_bundle_is_told_in_one_sentence(app):
    (app / "pyproject.toml").unlink()
    with pytest.raises(UsageError, match=r"clinic cannot be bundled by Flower .*; correct the app"):
        written_hash(app)


def test_without_flower_the_remedy_is_told(app, monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.cli.build", None)
    with pytest.raises(UsageError, match=r"needs Flower, which is not installed; pip install 'priory\[flower\]'"):
        written_hash(app)


def test_an_app_with_a_file_that_cannot_be_read_has_no_number(app):
    (app / "clinic" / "more.py").symlink_to("nowhere")
    with pytest.raises(OSError, match="No such file"):
        installed_hash(app)


def test_an_app_that_is_gone_has_no_number(app):
    shutil.rmtree(app)
    with pytest.raises(OSError, match="No such file"):
        installed_hash(app)
