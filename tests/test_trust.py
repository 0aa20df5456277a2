"""Names of Python code in files: no command and no function imports them unless the user trusts the file."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import priory
from priory import report
from priory.cli import main
from priory.core.errors import UsageError
from priory.data import load as load_data
from priory.deploy import charter as charters
from priory.engine.audit import audit
from tests.cli.conftest import TINY
from tests.hostile_files import forge

pytestmark = pytest.mark.xdist_group("command line")  # other files train the same method on the same clients

NAME = "planted_net:make"
MODULE = """
from pathlib import Path
from priory.models import parse
Path({marker!r}).touch()
def make(num_outputs):
    return parse("linear", input_shape=(8, 8, 1), num_outputs=num_outputs)
"""
FLOWER = ["--data", "digits", "--clients", "2", "--model", "linear", "--rounds", "1"]
PREDICT = ["--data", "client.npz", "--out", "predictions.csv"]
# Each on files that name the planted module. The last four read them and need nothing of the module.
REFUSED = {
    "run a manifest": ["run", "run/manifest.toml", "--out", "again"],
    "run the manifest of a tuning": ["run", "tuning/manifest.toml", "--out", "again"],
    "resume": ["resume", "run"],
    "resume a stopped run": ["resume", "stopped"],
    "resume by the manifest": ["resume", "run/manifest.toml"],
    "run several models": ["run", "several.toml", "--out", "again"],
    "elbo": ["elbo", "run"],
    "effects": ["effects", "run"],
    "audit": ["audit", "run", "--canaries", "100"],
    "onboard": ["onboard", "run", "--data", "client.npz"],
    "predict": ["predict", "run", "--client", "1", *PREDICT],
    "predict with an exported model": ["predict", "exported", *PREDICT],
    "predict with an onboarded model": ["predict", "joined", "--client", "late", *PREDICT],
    "export": ["export", "run", "--client", "1", "--draws", "0"],
    "export again": ["export", "exported", "--draws", "0", "--out", "again"],
    "report on foreign inputs": ["report", "run", "--ood", "digits"],
    "flower gateway": ["flower", "gateway", "nginx", "--app", "up/app", "--keys", "."],
}
OTHER_SETTINGS = {
    "compare": ["compare", "fedavg", *TINY, "--out", "compared"],
    "tune": ["tune", "fedavg", *TINY, "--over", "step-size=0.1,0.2", "--out", "tuning"],
    "flower up": ["flower", "up", *FLOWER[:2], "--nodes", "2", *FLOWER[4:], "--out", "up"],
}
HARMLESS = {
    "clients": ["clients", "run"],
    "report": ["report", "run", "--out", "report.html"],
    "report on a comparison": ["report", "compared", "--out", "report.html"],
    "flower status": ["flower", "status", "up"],
}


METHODS = {
    "a module": "planted_net:Planted",
    "a file": "planted_net.py:Planted",
    "a path": "/{}/planted_net.py:Planted",
}


def name_the_module(file: Path) -> None:
    """Let a manifest or the description of a model name the planted module."""
    forge(file, '"linear"', f'"{NAME}"')


def name_the_method(file: Path, name: str) -> None:
    """Let a manifest or the description of a model name the planted module as the code of its method."""
    if file.suffix == ".json":
        forge(file, '"given": ', f'"code": {{"method": "{name}"}}, "given": ')
    else:
        forge(file, "[run]", f'[code]\nmethod = "{name}"\n\n[run]')


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Directories of every kind that Priory writes, with the model `linear`."""
    jax.devices()
    place = tmp_path_factory.mktemp("foreign")
    digits = load_data("digits")
    np.savez(place / "client.npz", x=digits.x[:50], y=digits.y[:50])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["run", "fedavg", *TINY, "--out", "run"]) == 0
        assert main(["export", "run", "--client", "1", "--draws", "0", "--out", "exported"]) == 0
        assert main(["tune", "fedavg", *TINY, "--over", "step-size=0.1,0.2", "--out", "tuning"]) == 0
        assert main(["flower", "init", "up/app", *FLOWER]) == 0
    shutil.copytree(place / "run", place / "stopped")
    shutil.copytree(place / "run", place / "joined")
    shutil.copytree(place / "run", place / "compared" / "fedavg-s0")
    shutil.copytree(place / "exported", place / "joined/onboarded/late/model")
    for name in ("summary.json", "clients.json"):
        (place / "stopped" / name).unlink()
    (place / "up/server").mkdir()
    (place / "up/server/status.json").write_text(json.dumps({"phase": "finished", "pid": 1}))
    shutil.copy(place / "run/manifest.toml", place / "several.toml")
    forge(place / "several.toml", 'model = "linear"', 'models = "linear,linear"')
    return place


@pytest.fixture
def place(files, tmp_path, monkeypatch, capsys) -> Path:
    """The current directory, whose files name a module that is planted there and leaves a marker when imported."""
    plant(files, tmp_path, monkeypatch, capsys)
    for file in [*tmp_path.rglob("manifest.toml"), *tmp_path.rglob("model.json")]:
        if "joined/manifest" not in str(file):
            name_the_module(file)
    forge(tmp_path / "several.toml", "linear,linear", f"mlp:8,4,{NAME}")
    return tmp_path


def plant(files, place, monkeypatch, capsys) -> None:
    """Copy the files to the current directory, and write a module there that leaves a marker when imported."""
    shutil.copytree(files, place, dirs_exist_ok=True)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    sys.modules.pop("planted_net", None)
    (place / "planted_net.py").write_text(MODULE.format(marker=str(place / "marker")))
    capsys.readouterr()


@pytest.fixture
def importable(place, monkeypatch) -> Path:
    """The same with the module on the path, as that of an installed package is."""
    monkeypatch.syspath_prepend(str(place))
    return place


@pytest.mark.parametrize("command", REFUSED)
def test_a_command_refuses_code_that_a_file_names_before_it_is_imported(command, importable, capsys):
    assert main(REFUSED[command]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert NAME in line
    assert "--trust-code" in line
    assert any(f"{name} names" in line for name in ("manifest.toml", "model.json", "several.toml"))
    assert not (importable / "marker").exists()


@pytest.fixture(params=METHODS)
def named(request, files, tmp_path, monkeypatch, capsys) -> str:
    """The name of a method's code in all files of the current directory, where the planted module is."""
    plant(files, tmp_path, monkeypatch, capsys)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = METHODS[request.param].format(str(tmp_path).strip("/"))
    for file in [*tmp_path.rglob("manifest.toml"), *tmp_path.rglob("model.json"), tmp_path / "several.toml"]:
        name_the_method(file, name)
    if request.param == "a file":  # which is next to the file that names it
        for folder in {file.parent for file in tmp_path.rglob("m*.*")}:
            shutil.copy(tmp_path / "planted_net.py", folder / "planted_net.py")
    return name


@pytest.mark.parametrize("command", REFUSED)
def test_so_is_the_code_of_a_method(command, named, capsys):
    assert main(REFUSED[command]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"names the method {named!r}" in line
    assert "--trust-code" in line
    assert not Path("marker").exists()


@pytest.mark.parametrize("command", OTHER_SETTINGS | HARMLESS)
def test_no_command_imports_the_code_of_another_method(command, named):
    main((OTHER_SETTINGS | HARMLESS)[command])
    assert not Path("marker").exists()


def test_a_network_that_is_passed_in_is_no_trust_in_a_method(named):
    network = priory.models.parse("linear", input_shape=(8, 8, 1), num_outputs=10)
    for read, path in ((priory.load, "run"), (priory.load_model, "exported")):
        with pytest.raises(UsageError, match="names the method"):
            read(path, model=network)
        assert not Path("marker").exists()


@pytest.mark.parametrize("code", ["3", '"planted_net:Planted"', "{ method = 3 }", '{ method = "planted_net" }'])
def test_a_table_of_code_that_priory_did_not_write_is_refused(code, importable):
    forge(Path("run/manifest.toml"), "[method]", f"code = {code}\n\n[method]")
    with pytest.raises(UsageError, match=r"code=|names no class"):
        priory.load("run", trust_code=True)
    assert not (importable / "marker").exists()


@pytest.mark.parametrize("command", OTHER_SETTINGS)
def test_a_command_that_goes_on_does_not_import_what_another_model_is_called(command, importable, capsys):
    assert main(OTHER_SETTINGS[command]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (importable / "marker").exists()


@pytest.mark.parametrize("command", HARMLESS)
def test_a_command_that_builds_no_model_needs_no_trust(command, importable):
    assert main(HARMLESS[command]) == 0
    assert not (importable / "marker").exists()


def test_a_report_says_why_a_foreign_run_was_not_measured(place, capsys):
    assert main(["report", "run"]) == 0
    assert "--trust-code" in capsys.readouterr().out
    assert "--trust-code" in Path("run/report.html").read_text()


@pytest.mark.parametrize(
    "call",
    [
        lambda: priory.load("run"),
        lambda: priory.resume("run"),
        lambda: priory.resume("stopped"),
        lambda: priory.load_model("exported"),
        lambda: audit("run"),
        lambda: report.write(["run"], "report.html", ood="digits"),
        lambda: charters.load(Path("up/app/app")),
    ],
    ids=["load", "resume", "resume a stopped run", "load_model", "audit", "report", "charter"],
)
def test_a_function_refuses_code_that_a_file_names(call, importable):
    with pytest.raises(UsageError, match="trust_code=True"):
        call()
    assert not (importable / "marker").exists()


@pytest.mark.parametrize(
    "argv",
    [["resume", "stopped"], ["predict", "run", "--client", "1", *PREDICT], ["predict", "exported", *PREDICT]],
    ids=["resume", "predict", "predict with an exported model"],
)
def test_a_file_that_is_trusted_may_name_a_module_of_the_current_directory(argv, place):
    assert main([*argv, "--trust-code"]) == 0
    assert (place / "marker").exists()


@pytest.mark.parametrize("command", [*REFUSED, *OTHER_SETTINGS, *HARMLESS])
def test_the_current_directory_is_not_searched_for_modules(command, place):
    before = list(sys.path)
    main((REFUSED | OTHER_SETTINGS | HARMLESS)[command])
    assert sys.path == before


def test_a_typed_name_needs_no_flag_and_a_comparison_goes_on_with_it(place, capsys):
    typed = [*TINY[:-1], NAME]
    assert main(["run", "fedavg", *typed, "--out", "typed"]) == 0
    shutil.rmtree("compared")
    assert main(["compare", "fedavg", *typed, "--out", "compared"]) == 0
    for name in ("summary.json", "clients.json"):
        Path("compared/fedavg-s0", name).unlink()
    sys.modules.pop("planted_net")
    assert main(["compare", "fedavg", *typed, "--out", "compared"]) == 0


def test_a_network_that_is_passed_in_needs_no_trust(importable):
    network = priory.models.parse("linear", input_shape=(8, 8, 1), num_outputs=10)
    assert priory.load_model("exported", model=network).predict(np.zeros((1, 8, 8, 1))).probabilities.shape == (1, 10)
    assert priory.load("run", model=network).completed == 3
    assert not (importable / "marker").exists()


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", ["planted_net.x,mlp:f", " planted_net:make", "planted_net:make ", " mlp:f"])
@pytest.mark.parametrize("file", ["run/manifest.toml", "exported/model.json"])
def test_a_name_that_is_no_factory_is_not_imported_with_trust_or_without(file, name, trust, importable):
    forge(Path(file), f'"{NAME}"', f'"{name}"')
    read = priory.load if file.startswith("run") else priory.load_model
    with pytest.raises(UsageError, match="is unknown"):
        read(Path(file).parent, trust_code=trust)
    assert not (importable / "marker").exists()


@pytest.mark.parametrize("setting", ["model", "models"])
@pytest.mark.parametrize("name", ["planted_net:make", "os:abort", "planted_net..x:f"])
def test_a_factory_is_refused_without_trust_wherever_it_lies(setting, name, importable):
    forge(Path("run/manifest.toml"), f'model = "{NAME}"', f'{setting} = "{name}"')
    with pytest.raises(UsageError, match="trust_code=True"):
        priory.load("run")
    assert not (importable / "marker").exists()


@pytest.mark.parametrize("value", ["3", '["planted_net:make"]', "{ a = 1 }"])
def test_a_model_that_is_no_text_is_refused(value, importable):
    forge(Path("run/manifest.toml"), f'model = "{NAME}"', f"model = {value}")
    with pytest.raises(UsageError, match="is not text"):
        priory.load("run", trust_code=True)
    assert not (importable / "marker").exists()


def test_up_refuses_an_app_whose_code_was_changed(place, capsys):
    argv = OTHER_SETTINGS["flower up"]
    forge(Path("up/app/app/manifest.toml"), NAME, "linear")
    Path("up/app/app/server.py").write_text("import planted_net\n")
    assert main(argv) == 2
    assert "app/server.py is not as Priory wrote it" in " ".join(capsys.readouterr().err.split())
    assert not (place / "marker").exists()
