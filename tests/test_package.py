"""The wheel and the source archive install elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_built_installs_and_runs_elsewhere(kind, tmp_path):
    build = [sys.executable, "-m", "build", f"--{kind}", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (made,) = (tmp_path / "dist").iterdir()
    place = tmp_path / "place"
    install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(place), str(made)]
    subprocess.run(install, check=True, capture_output=True)
    assert (place / "priory" / "py.typed").exists()
    assert {"page.css", "page.js"} <= {path.name for path in (place / "priory" / "report").iterdir()}
    shipped = {"README.md", "heart_disease.csv", "radon_minnesota.csv"}
    assert {path.name for path in (place / "priory" / "data" / "shipped").iterdir()} == shipped
    code = "import priory, sys; from priory.cli import main; print(priory.__file__); sys.exit(main(['methods']))"
    environment = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.stdout.startswith(str(place))
    assert "fedprox" in done.stdout
