"""What the documents say runs: every Python block of every page, the links; `test_commands.py` has the commands."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

import priory
from priory.methods import REGISTRY

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = ["own-data.md"]  # writes files and has commands in between: `tests/test_own_data.py`
WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text() and page.name not in ELSEWHERE]
# The others train methods on federations of their own, so that no test shares their programs.
NUMBER = re.compile(r"\d+(?:\.\d+)?%?")
AT_ONCE = ["README.md", "adding-a-method.md", "alignment.md", "tracking.md"]


def code_of(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name in AT_ONCE else pytest.mark.slow, id=page.name) for page in WITH_PYTHON],
)
@pytest.mark.usefixtures("without_files")
def test_the_python_of_a_page_runs(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(compile(code_of(page), str(page), "exec"), {"__name__": "__page__"})
    printed = capsys.readouterr().out.strip()
    assert printed, "an example prints something worth seeing"
    for shown in re.findall(r"```\n\n```text\n(.*?)```", page.read_text(), re.DOTALL):
        check_output(printed, shown.strip())


def test_the_method_on_the_page_is_the_file_next_to_it():
    text = (ROOT / "docs" / "adding-a-method.md").read_text()
    assert f"```python\n{(ROOT / 'docs' / 'fedavgm.py').read_text()}```" in text


def check_output(printed: str, shown: str) -> None:
    """Compare words exactly, and numbers up to what rounding does on another processor: 0.05, or 5 %."""
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    for found, expected in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        slack = 0.05 if "." in expected else 5 if "%" in expected else 0
        assert abs(float(found.rstrip("%")) - float(expected.rstrip("%"))) <= slack, (found, expected)


def test_output_that_differs_is_found():
    check_output("digit 6: 0.93, 14%", "digit 6: 0.95, 12%")
    for other in ("digit 5: 0.95, 12%", "digit 6: 0.85, 12%", "digit 6: 0.95, 20%", "figure 6: 0.95, 12%"):
        with pytest.raises(AssertionError):
            check_output(other, "digit 6: 0.95, 12%")


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_names_what_exists(page):
    used = [ast.unparse(node) for node in ast.walk(ast.parse(code_of(page))) if isinstance(node, ast.Attribute)]
    names = [name for name in used if re.fullmatch(r"priory(\.\w+)+", name)]
    assert names
    for name in names:
        assert pkgutil.resolve_name(name) is not None, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_the_readme_names_every_method():
    text = (ROOT / "README.md").read_text()
    assert [name for name in REGISTRY if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize("name", REGISTRY)
def test_the_readme_cites_the_paper_that_a_method_declares(name):
    cited = str(REGISTRY[name].about.paper).split(", ")[0]
    assert f"| `{name}` | {cited} |" in (ROOT / "README.md").read_text()


def test_the_version_is_the_same_everywhere():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{priory.__version__}"' in pyproject
    assert f"version: {priory.__version__}" in (ROOT / "CITATION.cff").read_text()
