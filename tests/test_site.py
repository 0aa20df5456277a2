"""The documentation as a site: it is whole, its links lead somewhere, and it needs no other host."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import priory
from tests.browser import CHROMIUM, browser

ROOT = Path(__file__).parents[1]
MISSING = next(
    (name for name in ("mkdocs", "mkdocstrings", "pymdownx") if importlib.util.find_spec(name) is None), None
)
pytestmark = [
    pytest.mark.skipif(MISSING is not None and "CI" not in os.environ, reason=f"needs {MISSING}: the extra `docs`"),
    pytest.mark.xdist_group("site"),  # one worker builds it
]
ASKED_FOR = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Tags(HTMLParser):
    """The attributes of every tag of a page, by the name of the tag."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def values(self, tag: str, attribute: str) -> list[str]:
        return [attrs[attribute] for name, attrs in self.found if name == tag and attribute in attrs]

    def anchors(self) -> set[str]:
        return {attrs["id"] for _, attrs in self.found if "id" in attrs} | {""}


def build(root: Path, target: Path) -> subprocess.CompletedProcess:
    # Not `--quiet`: it silences the warnings before `--strict` has counted them.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT, target)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return target


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Tags]:
    return {page: Tags(page) for page in site.rglob("*.html")}


def test_every_page_of_the_documents_is_in_the_menu(site, pages):
    menu = pages[site / "search.html"].values("a", "href")  # has no links but the menu
    written = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in written if f"./{page.as_posix()}" not in menu] == []


def test_the_readme_is_the_start(site):
    assert "the federation learns the" in (site / "index.html").read_text()


def test_every_public_name_is_in_the_reference(site, pages):
    here = site / "api" / "priory.html"
    links = dict(re.findall(r'href="([^"]+)"[^>]*><code>(\w+)</code>', here.read_text()))
    assert set(links.values()) == set(priory.__all__)
    for link, name in links.items():
        page, _, anchor = link.partition("#")
        assert name == "data" or anchor.endswith(f".{name}"), link
        assert anchor in pages[here.parent / page].anchors(), link


def test_a_function_with_the_name_of_its_module_is_in_the_reference(site):
    page = (site / "api" / "engine.html").read_text()
    assert 'id="priory.engine.simulate.simulate"' in page
    assert "The finished run of a method on a federation" in page


def test_every_link_leads_to_a_place(site, pages):
    dead = []
    for page, tags in pages.items():
        for link in tags.values("a", "href"):
            parts = urlsplit(link)
            if parts.scheme or page.name == "404.html":  # the page of a server, which counts from its root
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            known = pages[target].anchors() if target in pages else {"", parts.fragment}
            if not target.is_file() or unquote(parts.fragment) not in known:
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


def test_nothing_is_asked_of_another_host(site, pages):
    asked = [value for tags in pages.values() for tag, name in ASKED_FOR.items() for value in tags.values(tag, name)]
    assert any(value.endswith("site.css") for value in asked)
    for style in site.rglob("*.css"):
        asked += re.findall(r"(?:url\(|@import\s+)[\"']?([^\"')\s]+)", style.read_text())
    assert [value for value in asked if urlsplit(value).scheme not in ("", "data") or value.startswith("//")] == []


def test_measurements_are_files_and_not_pages(site):
    cells = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.json")}
    assert [str(cell) for cell in cells if not (site / cell).is_file()] == []
    index = (site / "methods" / "baselines" / "index.html").read_text()
    assert all(cell.name in index for cell in cells if cell.parent == Path("methods/baselines"))


@pytest.mark.slow  # opens every page
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; Debian has it as the package chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_pages_open_from_a_disk_and_fit_the_screen(site, width):
    with browser() as page:
        page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        for name in ("index", "notation", "methods/fedhb", "api/engine"):
            visit(page, site / f"{name}.html")
            assert page.complaints() == []
            assert all(url.startswith("file:") for url in page.requests())
            assert page.run("document.documentElement.scrollWidth") <= width, name


@pytest.mark.slow  # a browser of its own
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; Debian has it as the package chromium")
def test_the_search_finds_a_method_from_a_disk(site):
    with browser() as page:
        visit(page, site / "search.html", "?q=fedhb-niw")
        found = "document.querySelector('#mkdocs-search-results a')?.getAttribute('href') || ''"
        deadline = time.monotonic() + 30
        while not page.run(found) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert page.run(found).startswith("./methods/fedhb.html#")
        assert page.complaints() == []
        page.run("document.getElementById('mkdocs-search-query').value = 'zzzzz'")
        page.run("document.getElementById('mkdocs-search-query').dispatchEvent(new Event('input'))")
        assert page.run("document.getElementById('mkdocs-search-results').textContent") == "Nothing found."


@pytest.mark.slow
def test_a_new_method_is_in_the_menu_and_what_is_amiss_fails_the_build(tmp_path):
    for name in ("mkdocs.yml", "README.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "priory").symlink_to(ROOT / "priory")
    (tmp_path / "docs" / "methods" / "novel.md").write_text("# Novel: `novel`\n\n## Once\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert re.search(r'href="./methods/novel.html"[^>]*>Novel</a>', (tmp_path / "site" / "search.html").read_text())

    (tmp_path / "docs" / "stray.md").write_text("# Stray\n")
    text = "# Novel\n\n[a](../nowhere.md) [b](fedpop.md#nowhere) [c](nowhere/) [d](/notation.md) [e](../../Makefile)\n"
    (tmp_path / "docs" / "methods" / "novel.md").write_text(text)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for complaint in ("stray.md", "nowhere.md", "fedpop.md#nowhere", "'nowhere/'", "'/notation.md'", "Makefile"):
        assert complaint in done.stderr


def visit(page, path: Path, query: str = "") -> None:
    page.events.clear()
    page.call("Page.navigate", url=path.resolve().as_uri() + query)
    deadline = time.monotonic() + 30
    while page.run("location.protocol + document.readyState") != "file:complete":
        assert time.monotonic() < deadline, f"{path} does not open"
        time.sleep(0.05)
