"""What the documents say runs: every Python block of every page, the skeleton method, the links."""

import re
from pathlib import Path

import numpy as np
import pytest

import priory
from priory.cli.app import COMMANDS, main
from priory.methods import REGISTRY

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = ["own-data.md"]  # needs data files and writes some: `tests/test_own_data.py`
WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text() and page.name not in ELSEWHERE]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    exec(compile(code, str(page), "exec"), {"__name__": "__page__"})
    assert capsys.readouterr().out.strip(), "an example prints something worth seeing"


@pytest.mark.filterwarnings("ignore::priory.fed.method.AdviceWarning")  # one round is too little, and is said to be
def test_the_commands_of_the_readme_run(tmp_path, monkeypatch, capsys):
    """As they stand, but for the number of rounds and a model that compiles fast."""
    monkeypatch.chdir(tmp_path)
    digits = priory.data.load("digits")
    np.savez("clinic.npz", x=digits.x[:40], y=digits.y[:40])  # of a client that comes later
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^\$ priory ([^#\n]*)", text, re.MULTILINE)
    assert {command.split()[0] for command in commands} == set(COMMANDS)
    for command in commands:
        short = re.sub(r" --rounds \d+", "", command).split()
        if short[0] in ("run", "compare", "tune") and not short[1].endswith(".toml"):
            short += ["--rounds", "1", "--model", "linear"]
        assert main(short) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_the_readme_names_every_method():
    text = (ROOT / "README.md").read_text()
    assert [name for name in REGISTRY if f"| `{name}` |" not in text] == []


def test_the_version_is_the_same_everywhere():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{priory.__version__}"' in pyproject
    assert f"version: {priory.__version__}" in (ROOT / "CITATION.cff").read_text()
