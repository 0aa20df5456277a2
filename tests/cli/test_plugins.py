"""Commands with a method of the user's own; `tests/test_commands.py` runs those of `docs/adding-a-method.md`."""

import shutil
import sys
from pathlib import Path

import pytest

from priory import UsageError, load, load_model, methods
from priory.cli import compare, main
from priory.cli.compare import _split
from priory.cli.flower import up
from priory.deploy.app import package_of
from priory.store import RunDirectory
from tests.cli.conftest import TINY, without_scores
from tests.deploy.conftest import small_charter
from tests.hostile_files import forge
from tests.methods.problems import FEDAVGM

pytestmark = pytest.mark.xdist_group("command line")  # other files train the same clients
NAME = "./fedavgm.py:FedAvgM"


@pytest.fixture(autouse=True)
def _copied(_somewhere_else):
    shutil.copy(FEDAVGM.rpartition(":")[0], "fedavgm.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of the file; the file is in its directory."""
    place = tmp_path_factory.mktemp("plugin")
    with pytest.MonkeyPatch.context() as patch, without_scores():
        patch.chdir(place)
        shutil.copy(FEDAVGM.rpartition(":")[0], "fedavgm.py")
        assert main(["run", NAME, *TINY, "--beta", "0.5", "--out", "run"]) == 0
    return place / "run"


@pytest.mark.parametrize("argv", [["run", NAME], ["tune", NAME], ["flower", "init", "--method", NAME]])
def test_the_help_of_a_file_shows_its_flags(argv, capsys):
    assert main([*argv, "--help"]) == 0
    assert "--beta" in capsys.readouterr().out


def test_a_run_of_a_file_is_read_with_trust_and_has_its_settings(trained, capsys):
    with pytest.raises(UsageError, match="--trust-code"):  # a new process would have to import the file
        _forgotten(lambda: load(trained))
    run = load(trained, trust_code=True)
    assert type(run.method).__name__ == "FedAvgM"
    assert run.method.beta == 0.5
    assert run.settings.rounds == run.completed == 3
    assert main(["report", str(trained), "--trust-code", "--out", "report.html"]) == 0
    assert "fedavgm" in Path("report.html").read_text()


def _forgotten(call):
    """Call a function as a process would that has not imported the file yet."""
    name = methods.load(FEDAVGM).__module__
    module = sys.modules.pop(name)
    try:
        call()
    finally:
        sys.modules[name] = module


def test_a_class_with_an_old_name_of_a_built_in_method_is_read_as_itself(unscored):
    source = Path("fedavgm.py").read_text()
    Path("mine.py").write_text(source.replace("class FedAvgM(", "class FedYogi("))
    assert main(["run", "./mine.py:FedYogi", *TINY, "--beta", "0.5", "--out", "own"]) == 0
    run = load("own", trust_code=True)
    assert (type(run.method).__name__, run.method.beta, run.name) == ("FedYogi", 0.5, "fedyogi")
    assert main(["export", "own", "--client", "0", "--out", "model", "--trust-code"]) == 0
    assert load_model("model", trust_code=True).method == run.method


def test_a_model_of_a_file_predicts_elsewhere(trained):
    assert main(["export", str(trained), "--client", "1", "--draws", "0", "--out", "model", "--trust-code"]) == 0
    assert load_model("model", trust_code=True).source.method == "fedavgm"
    assert load_model("model", method=methods.make(FEDAVGM)).source.method == "fedavgm"


@pytest.mark.filterwarnings("default:The code of fedavgm")
def test_a_run_whose_file_was_changed_is_read_with_a_warning(trained, capsys):
    shutil.copytree(trained.parent, "moved")
    forge(Path("moved/run/manifest.toml"), f"{trained.parent}/fedavgm.py", "../fedavgm.py")
    with Path("moved/fedavgm.py").open("a") as file:
        file.write("\n# Changed.\n")
    with without_scores():
        assert main(["run", "moved/run/manifest.toml", "--trust-code", "--out", "again"]) == 0
    told = "warning: The code of fedavgm was changed since moved/run/manifest.toml was written"
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_comparison_with_a_file_that_was_changed_is_refused(unscored, capsys):
    argv = ["compare", NAME, *TINY, "--out", "compared"]
    assert main(argv) == 0
    assert RunDirectory("compared/fedavgm.py-FedAvgM-s0").summary() is not None
    shutil.move("fedavgm.py", "elsewhere.py")
    shutil.copy("elsewhere.py", "fedavgm.py")
    assert main(argv) == 0
    assert "finished already" in capsys.readouterr().out
    with Path("fedavgm.py").open("a") as file:
        file.write("\n# Changed.\n")
    assert main(argv) == 2
    assert "with other code of its method" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("fedavg", ("fedavg", "")),
        ("fedprox:mu=0.1", ("fedprox", "mu=0.1")),
        ("fedprox:mu", ("fedprox", "mu")),
        ("./mine.py:Mine", ("./mine.py:Mine", "")),
        ("./mine.py:Mine:mu=0.1,epochs=2", ("./mine.py:Mine", "mu=0.1,epochs=2")),
        ("a/b.py:Mine:mu=c:d", ("a/b.py:Mine", "mu=c:d")),
        ("mine.there:Mine:mu=0.1", ("mine.there:Mine", "mu=0.1")),
        ("fedporx:mu=0.1", ("fedporx", "mu=0.1")),
    ],
)
def test_settings_stand_behind_the_class(text, parts):
    assert _split(text) == parts


def test_settings_of_a_file_are_read_by_its_flags():
    named = compare.methods_from([NAME, f"{NAME}:beta=0.25"], {"batch_size": 8})
    assert [(one.beta, one.work.batch_size) for one in named.values()] == [(0.9, 8), (0.25, 8)]
    with pytest.raises(UsageError, match=r"bta is not a setting of ./fedavgm.py:FedAvgM; did you mean beta"):
        compare.methods_from([f"{NAME}:bta=0.25"], {})


def test_a_module_of_the_current_directory_is_found_by_a_typed_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    shutil.move("fedavgm.py", "my_fedavgm.py")
    assert main(["run", "my_fedavgm:FedAvgM", "--help"]) == 0
    assert "--beta" in capsys.readouterr().out
    sys.modules.pop("my_fedavgm")


def test_a_setting_with_the_name_of_a_flag_is_refused(capsys):
    text = Path("fedavgm.py").read_text().replace("beta", "seed")
    Path("fedavgm.py").write_text(text)
    assert main(["run", NAME, *TINY]) == 2
    assert "seed is the name of two flags" in capsys.readouterr().err


def test_two_files_whose_runs_would_share_a_directory_are_refused(capsys):
    Path("sub").mkdir()
    for copy in ("sub/mine.py", "sub_mine.py"):
        shutil.copy("fedavgm.py", copy)
    assert main(["compare", "sub/mine.py:FedAvgM", "sub_mine.py:FedAvgM", *TINY, "--out", "both"]) == 2
    assert "would have one directory, sub_mine.py-FedAvgM; rename one of the files." in capsys.readouterr().err
    assert main(["compare", "./fedavgm.py:FedAvgM", "fedavgm.py:FedAvgM", *TINY, "--out", "both"]) == 2


def test_the_list_of_methods_has_installed_ones_and_says_which_cannot_be_used(tmp_path, monkeypatch, capsys):
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[priory.methods]\nfedavgm = installed_fedavgm:FedAvgM\nbroken = nowhere:Mine\n"
    )
    shutil.copy("fedavgm.py", tmp_path / "installed_fedavgm.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["methods"]) == 0
    shown = capsys.readouterr().out
    assert "fedavgm" in shown
    assert "Hsu et al. 2019" in shown
    assert "cannot be imported from nowhere:Mine" in " ".join(shown.split())
    with without_scores():
        assert main(["run", "fedavgm", *TINY, "--out", "by-name"]) == 0
    assert load("by-name").method == methods.make("fedavgm")  # a file may name an installed method without trust
    sys.modules.pop("installed_fedavgm")


def test_up_goes_on_with_the_app_of_the_same_file_and_no_other():
    def app(trust_code: bool = False) -> Path:
        Path("here").mkdir(exist_ok=True)
        return up._app(Path("here"), small_charter(methods.make(NAME), model="linear"), {}, False, trust_code)

    copy = package_of(app()) / "method.py"
    text = copy.read_text()
    assert app() == Path("here/app")
    copy.write_text(f"{text}\n# Changed by hand.\n")
    with pytest.raises(UsageError, match=r"names the method 'method.py:FedAvgM'"):
        app()
    with pytest.raises(UsageError, match="written with other code"):
        app(trust_code=True)
    copy.write_text(text)
    Path("fedavgm.py").write_text(f"{text}\n# Changed here.\n")
    with pytest.raises(UsageError, match="out=here holds another federation"):
        app()
