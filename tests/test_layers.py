"""The arrows of the architecture: a module imports only from layers to its left."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "priory"

RANKS = {
    **dict.fromkeys(["core"], 0),
    **dict.fromkeys(["bayes", "models"], 1),
    **dict.fromkeys(["fed"], 2),
    **dict.fromkeys(["data", "metrics", "stats"], 3),
    **dict.fromkeys(["methods", "records"], 4),
    **dict.fromkeys(["store", "evaluate"], 5),
    **dict.fromkeys(["certificate", "effects", "uncertainty", "track"], 6),
    **dict.fromkeys(["engine", "tune", "deploy"], 7),
    **dict.fromkeys(["report", "calibration", "estimator"], 8),
    **dict.fromkeys(["reproduce"], 9),
    "_names": 10,  # gathers the public names
    "": 11,  # priory/__init__.py, which hands them out
    **dict.fromkeys(["cli"], 12),
    **dict.fromkeys(["__main__"], 13),
}
SIDEWAYS = {("tune", "engine"), ("deploy", "engine")}  # the only arrows allowed between layers of one rank


def broken_arrows(package: Path) -> list[str]:
    """Every import in the package that the layers forbid, one sentence each."""
    return [fault for path in sorted(package.rglob("*.py")) for fault in faults(package, path)]


def faults(package: Path, path: Path) -> Iterator[str]:
    place = path.relative_to(package)
    source = layer(module_name(package, path))
    if source is None:
        yield f"{place} belongs to no layer; give it a rank"
        return
    for name in imports(package, path):
        top = name.split(".")[0]
        if top == "flwr" and source != "deploy":
            yield f"{place} imports {name}, which only deploy may"
        elif top == package.name and not allowed(source, layer(name) or ""):
            yield f"{place} imports {name}, which is not to its left"
        elif name.startswith(f"{package.name}.methods") and is_another_method(place, name):
            yield f"{place} imports {name}, and no method may import another"


def allowed(source: str, target: str) -> bool:
    return source == target or RANKS[target] < RANKS[source] or (source, target) in SIDEWAYS


def is_another_method(place: Path, name: str) -> bool:
    """Whether a method imports another one, or a block imports a method; the registry imports all."""
    is_registry = len(place.parts) == 2 and place.name.startswith("_")
    if place.parts[0] != "methods" or is_registry:
        return False
    return name.split(".")[2:3] not in ([place.stem], ["_blocks"])


def layer(name: str) -> str | None:
    """The layer of a dotted name: its second word, "" for the package itself, None for what has no rank."""
    second = name.split(".")[1] if "." in name else ""
    return second if second in RANKS else None


def module_name(package: Path, path: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(package: Path, path: Path) -> Iterator[str]:
    """Absolute dotted names of all imports in a file, those inside functions included."""
    inside = module_name(package, path).split(".")
    folder = inside if path.name == "__init__.py" else inside[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = folder[: len(folder) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_arrow_points_back():
    assert broken_arrows(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("core/trees.py", "from priory.fed import shard"),
        ("core/trees.py", "from ..fed import shard"),
        ("core/trees.py", "def f():\n    import priory.fed.shard"),
        ("bayes/gaussian.py", "from priory.models import nets"),
        ("models/nets.py", "import priory.bayes.gaussian"),
        ("data/load.py", "from priory import metrics"),
        ("evaluate.py", "from priory.store import Store"),
        ("effects.py", "from priory.engine import Run"),
        ("engine.py", "from priory.tune import tune"),
        ("engine.py", "from priory.deploy import flower"),
        ("tune.py", "from priory.deploy import flower"),
        ("engine.py", "from priory import simulate"),
        ("engine.py", "import priory"),
        ("__init__.py", "from priory.cli import main"),
        ("methods/fedprox.py", "from priory.methods.fedavg import FedAvg"),
        ("methods/fedprox.py", "from priory.methods import FedAvg"),
        ("methods/fedprox.py", "from .fedavg import FedAvg"),
        ("methods/fedprox.py", "from . import fedavg"),
        ("methods/_blocks/clustered.py", "from priory.methods.fedavg import FedAvg"),
        ("methods/_blocks/clustered.py", "from priory.methods import FedAvg"),
        ("methods/_blocks/__init__.py", "from priory.methods import fedavg"),
        ("engine.py", "import flwr"),
        ("engine.py", "from flwr.app import Message"),
        ("extras/new.py", "import math"),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path, file, line):
    assert len(broken_arrows(a_package(tmp_path, file, line))) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("fed/shard.py", "from priory.core.struct import struct"),
        ("fed/shard.py", "from .method import Task"),
        ("tune.py", "from priory.engine import simulate"),
        ("deploy/server.py", "from priory.engine.settings import Settings"),
        ("cli.py", "import priory"),
        ("__init__.py", "from priory import data\nfrom priory.engine import simulate"),
        ("methods/_builtin.py", "from priory.methods.fedavg import FedAvg"),
        ("methods/fedprox.py", "from priory.fed.method import Task"),
        ("methods/fedprox.py", "from priory.methods._blocks import clustered"),
        ("methods/_blocks/clustered.py", "from priory.methods._blocks.public_set import as_shard"),
        ("deploy/flower.py", "from flwr.app import Message"),
        ("engine.py", "import flwrlike"),
    ],
)
def test_a_legal_import_passes(tmp_path, file, line):
    assert broken_arrows(a_package(tmp_path, file, line)) == []


def a_package(tmp_path: Path, file: str, line: str) -> Path:
    path = tmp_path / "priory" / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    return tmp_path / "priory"


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """What a fresh interpreter finds after `from priory import *`."""
    code = """
import json, os, sys, jax
settings, environment = dict(jax.config.values), dict(os.environ)
from priory import *
changed = [name for name, value in settings.items() if jax.config.values[name] != value]
found = {"changed": changed, "environment": environment == dict(os.environ), "modules": sorted(sys.modules)}
jax.config.update("jax_num_cpu_devices", 3)
print(json.dumps({**found, "devices": jax.device_count("cpu")}))
"""
    return json.loads(run_python(code))


def test_importing_priory_changes_no_jax_setting(imported):
    assert imported["changed"] == []
    assert imported["environment"]


def test_importing_priory_leaves_the_devices_open(imported):
    assert imported["devices"] == 3


def test_importing_priory_imports_no_library_that_only_some_runs_need(imported):
    extras = {"pandas", "sklearn", "flwr", "datasets", "arviz", "tensorboard", "mlflow", "wandb"}
    extras |= {"scipy.stats", "scipy.optimize", "scipy.sparse"}
    assert "priory.engine" in imported["modules"]
    assert not extras & set(imported["modules"])


def test_help_does_not_wait_for_jax():
    code = "import sys; from priory.cli import main; main(['--help']); print({'jax', 'numpy'} & set(sys.modules))"
    assert run_python(code).splitlines()[-1] == "set()"


def test_priory_hands_out_its_public_names_and_its_modules():
    code = """
import priory
import priory.engine.simulate
print(set(priory.__all__) <= set(dir(priory)), all(hasattr(priory, name) for name in priory.__all__))
print(priory.simulate is priory.engine.simulate, priory.estimator.__name__, priory.FedAvg is priory.FedAvg)
print(hasattr(priory, "fedavg"), hasattr(priory, "_names_"), hasattr(priory, "Any_"))
"""
    assert run_python(code) == "True True\nTrue priory.estimator True\nFalse False False"
