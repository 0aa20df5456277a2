"""Bad files, one a row with the sentence that it ends in: exit code 2, one line, quickly, and little memory."""

import hashlib
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest

from priory.cli import main
from priory.core import memory, reading
from priory.core.errors import UsageError
from priory.core.sealed import sealed, unsealed
from priory.data import arrays, schema, tables
from priory.engine import load_model
from priory.store import read_manifest
from tests.cli.conftest import TINY
from tests.hostile_files import CSV, GOOD, MANIFEST, NPZ, SAFETENSORS, TOML, WORDS, archive, array

pytestmark = pytest.mark.xdist_group("command line")

NOBODY = 65534  # the user without rights
SECONDS, MEGABYTES = 20, 400  # far below what the bombs ask for, far above what a refusal takes

PLACES = ("checkpoint/commit.json", "summary.json", "clients.json", "metrics.jsonl")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run and an exported model."""
    jax.devices()
    place = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["run", "fedavg", *TINY, "--out", "run"]) == 0
        assert main(["export", "run", "--client", "1", "--draws", "0", "--out", "model"]) == 0
    (place / "rows.npz").write_bytes(archive(x=array(np.zeros((2, 8, 8, 1))), y=None, client=None))
    return place


@pytest.fixture
def refused(made, tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """A function that returns the one sentence in which a command ends, after looking at its time and memory."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()

    def run(*argv: str) -> str:
        began, before = time.monotonic(), peak()
        assert main(list(argv)) == 2
        assert time.monotonic() - began < SECONDS
        assert peak() - before < MEGABYTES
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("priory: ")
        assert len(line) < 5000
        return line

    return run


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write(name: str, content: str | bytes) -> None:
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", CSV)
def test_a_bad_table_ends_in_one_sentence(kind, refused):
    content, said = CSV[kind]
    write("d.csv", content)
    assert said in refused("run", "fedavg", "--data", "d.csv", "--target", "y", "--client", "c", "--rounds", "0")


@pytest.mark.parametrize("kind", NPZ)
def test_bad_arrays_end_in_one_sentence(kind, refused):
    make, said = NPZ[kind]
    write("d.npz", make())
    assert said in refused("run", "fedavg", "--data", "d.npz", "--rounds", "0")


@pytest.mark.parametrize("kind", TOML)
def test_a_bad_manifest_ends_in_one_sentence(kind, refused):
    content, said = TOML[kind]
    write("m.toml", content)
    assert said in refused("run", "m.toml", "--out", "out")
    assert not Path("out").exists()


@pytest.mark.parametrize("kind", [kind for kind in TOML if kind in list(TOML)[:13]])
def test_a_bad_schema_ends_in_one_sentence(kind, refused):
    write("s.toml", TOML[kind][0])
    assert "s.toml" in refused("flower", "init", "app", "--schema", "s.toml")


@pytest.mark.parametrize("kind", SAFETENSORS)
def test_bad_weights_end_in_one_sentence(kind, refused):
    write("model/weights.safetensors", SAFETENSORS[kind])
    table = unsealed(Path("model/model.json").read_text())
    table["weights"]["sha256"] = hashlib.sha256(SAFETENSORS[kind]).hexdigest()
    write("model/model.json", sealed(table))
    assert "model/weights.safetensors" in refused("predict", "model", "--data", "rows.npz", "--out", "x.csv")


@pytest.mark.parametrize("kind", WORDS)
def test_a_bad_description_of_a_model_ends_in_one_sentence(kind, refused):
    write("model/model.json", WORDS[kind])
    assert "model/" in refused("predict", "model", "--data", "rows.npz", "--out", "x.csv")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", list(WORDS)[:8])
def test_a_bad_file_of_a_run_ends_in_one_sentence(kind, place, refused):
    content = WORDS[kind]
    write(f"run/{place}", (content.encode() if isinstance(content, str) else content) + b"\n" * 10_000)
    assert "run" in refused("resume", "run")


ASKED = {
    "d.csv": ["run", "fedavg", "--data", "d.csv", "--target", "y"],
    "d.npz": ["run", "fedavg", "--data", "d.npz"],
    "a.npz": ["run", "fedbnn", *TINY, "--align", "a.npz"],
    "m.toml": ["run", "m.toml"],
    "s.toml": ["flower", "init", "app", "--schema", "s.toml"],
    "rows.npz": ["predict", "model", "--data", "rows.npz", "--out", "x.csv"],
    "model/weights.safetensors": ["predict", "model", "--data", "rows.npz", "--out", "x.csv"],
    "run/manifest.toml": ["resume", "run"],
    "run/summary.json": ["resume", "run"],
    "run/metrics.jsonl": ["resume", "run"],
    "run/checkpoint/commit.json": ["predict", "run", "--client", "1", "--data", "rows.npz", "--out", "x.csv"],
}


@pytest.mark.parametrize("kind", ["a directory", "a pipe", "an endless device", "a file of 10 TB"])
@pytest.mark.parametrize("name", ASKED)
def test_what_is_no_usual_file_ends_in_one_sentence(name, kind, refused):
    path = Path(name)
    path.unlink(missing_ok=True)
    match kind:
        case "a directory":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case "an endless device":
            path.symlink_to("/dev/zero")
        case _:
            path.touch()
            os.truncate(path, 10**13)  # sparse: it takes no room on the disk
    refused(*ASKED[name])


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("d.csv", tables.read_csv),
        ("d.npz", lambda path: arrays.read_npz(path, needed=("x",))),
        ("d.parquet", tables.read_parquet),
        ("m.toml", lambda path: read_manifest(Path(path))),
        ("s.toml", schema.read),
        ("model/model.json", lambda path: load_model("model")),
    ],
)
def test_a_file_that_declares_more_than_the_free_memory_is_refused(name, read, made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    write("d.csv", GOOD)
    write("d.npz", archive())
    write("m.toml", MANIFEST)
    write("s.toml", MANIFEST)
    pd.DataFrame({"a": [1.0] * 100_000}).to_parquet("d.parquet")  # a few bytes, since the value is the same
    monkeypatch.setattr(reading, "SMALL", 0)
    monkeypatch.setattr(memory, "free", lambda: 2 * Path("d.parquet").stat().st_size if "parquet" in name else 100)
    with pytest.raises(UsageError, match=rf"{name} .* of memory are free"):
        read(name)


@contextmanager
def not_as_root() -> Iterator[None]:
    """Work as a user who may not read everything, in the current directory."""
    is_root = os.geteuid() == 0
    if is_root:
        Path().chmod(0o777)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("name", ASKED)
def test_a_file_that_may_not_be_read_ends_in_one_sentence(name, refused):
    Path(name).touch()
    Path(name).chmod(0)
    with not_as_root():
        refused(*ASKED[name])
