"""What the site has beside the pages of `docs/`: the README as its start, the API reference, lists of cells.

Links in the repository lead where its reader expects, to `docs/privacy.md` or to a directory. Here they are turned to
the page that stands for that place; a link that leads nowhere fails the build, as does a page that no menu names.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Files above `docs/` that pages link to, and where they are in the site.
ABOVE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CITATION.cff": "CITATION.cff",
    "SECURITY.md": "security-policy.md",
}
# The rooms of the API reference, in the order of the menu; those that are named neither here nor below come last.
FIRST = [
    "priory.data",
    "priory.engine",
    "priory.methods",
    "priory.fed",
    "priory.bayes",
    "priory.models",
    "priory.metrics",
    "priory.uncertainty",
    "priory.certificate",
    "priory.effects",
    "priory.calibration",
    "priory.report",
    "priory.tune",
    "priory.reproduce",
    "priory.estimator",
    "priory.track",
    "priory.deploy",
    "priory.core",
]
INNER = {"priory.cli", "priory.evaluate", "priory.store"}  # serve the other rooms, and may change with them
LINK = re.compile(r"\]\((?P<link>[^)#\s]+)(?P<anchor>#[^)\s]*|)\)")
TABLE = re.compile(r"^\|.*$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The menu with its patterns replaced by pages."""
    named = set(_paths(config.nav))
    config.nav = [_expanded(entry, named) for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made here to the files of `docs/`."""
    for source, target in ABOVE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    style = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    files.append(File.generated(config, "css/code.css", content=style))
    for target, content in _reference().items():
        files.append(File.generated(config, target, content=content))
    for target, content in _cells(files).items():
        file = File.generated(config, target, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page whose links lead to pages of the site, and whose tables keep a number and its error on one line."""
    del config
    here = posixpath.dirname(page.file.src_uri)
    # Links of a file above `docs/` are relative to the root of the repository.
    folder = "" if page.file.src_uri in ABOVE.values() else posixpath.join("docs", here)

    def turned(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(folder, match["link"]))
        target = ABOVE.get(place, place.removeprefix("docs/"))
        if files.get_file_from_path(f"{target}/index.md"):
            target = f"{target}/index.md"
        if not files.get_file_from_path(target):
            return match.group()  # another host, or code that looks like a link; what leads nowhere is found by MkDocs
        return f"]({posixpath.relpath(target, here or '.')}{match['anchor']})"

    return TABLE.sub(
        lambda row: row.group().replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"), LINK.sub(turned, markdown)
    )


def on_post_build(config: MkDocsConfig) -> None:
    """The search index as a script: a page that is opened from a disk may load scripts, but no data."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(path.read_text())
    sections = {doc["location"].partition("#")[0] for doc in index["docs"] if "#" in doc["location"]}
    # A page is found by its sections; and lists of cells would answer every question with their commands.
    index["docs"] = [
        doc for doc in index["docs"] if doc["location"] not in sections and "/index.html" not in doc["location"]
    ]
    path.with_suffix(".js").write_text(f"var search_index = {json.dumps(index, ensure_ascii=False)};\n")
    path.unlink()


def _paths(entry: Any) -> Iterator[str]:
    """Every path of a part of the menu."""
    if isinstance(entry, str):
        yield entry
    elif entry:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from _paths(inner)


def _expanded(entry: Any, named: set[str]) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(inner, named) for title, inner in entry.items()}
    if not isinstance(entry, list):
        return entry
    found: list[Any] = []
    for inner in entry:
        if inner == "api/*.md":
            found += [{room: _page_of(room)} for room in ["priory", *_rooms()]]
        elif isinstance(inner, str) and "*" in inner:
            pages = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.glob(inner))}
            found += [{_title(path): page} for page, path in pages.items() if page not in named]
        else:
            found.append(_expanded(inner, named))
    return found


def _title(path: Path) -> str:
    """What the menu calls a page: its heading up to a colon."""
    heading = path.read_text().lstrip("# ").splitlines()[0]
    return heading.partition(":")[0].replace("`", "")


def _rooms() -> list[str]:
    names = {path.stem for path in (ROOT / "priory").iterdir() if path.suffix in ("", ".py") and path.name[0] != "_"}
    return [*FIRST, *sorted({f"priory.{name}" for name in names} - {*FIRST} - INNER)]


def _page_of(room: str) -> str:
    return f"api/{room.removeprefix('priory.')}.md"


def _reference() -> dict[str, str]:
    """Pages of the API reference: one for the names of `priory` itself, and one for each room."""
    package = griffe.load("priory", search_paths=[ROOT], resolve_aliases=True)
    pages = {_page_of("priory"): _names(package)}
    for room in _rooms():
        module = package[room.removeprefix("priory.")]
        if module.exports:  # a room that lists no public names shows its modules instead
            listed = [_meant(module, name).canonical_path for name in module.exports]
            body = [
                module.docstring.value,
                *(f"::: {path}\n    options: {{show_root_heading: true}}" for path in listed),
            ]
        else:
            body = [f"::: {room}\n    options: {{show_submodules: true}}"]
        pages[_page_of(room)] = "\n\n".join([f"# `{room}`", *body, ""])
    return pages


def _names(package: griffe.Module) -> str:
    rows = []
    public = package["_names"]
    for name in sorted(name for name in public.members if not name.startswith("_")):
        thing = _meant(public, name)
        link = f"({name}.md)" if thing.is_module else f"[{thing.canonical_path}]"
        # One paper, one file: the module says what the class of its name is.
        told = thing.module if thing.canonical_path.startswith("priory.methods.") else thing
        summary = " ".join(told.docstring.value.split("\n\n")[0].split()).replace("|", "\\|")
        rows.append(f"| [`{name}`]{link} | {summary} |")
    opening = "What `import priory` brings; the other pages have the rest."
    return "\n".join(["# `priory`", "", opening, "", "| name | what it is |", "|---|---|", *rows])


def _meant(module: griffe.Module, name: str) -> griffe.Object | griffe.Alias:
    """A public name of a module. `from priory.engine.simulate import simulate` hides a module behind its function."""
    found = module[name]
    return found[name] if found.is_module and name in found.members else found


def _cells(files: Files) -> dict[str, str]:
    """A list for each directory of measurements, since a link to a directory needs a page: files and their commands."""
    folders: dict[str, list[str]] = {}
    for file in files:
        if file.src_uri.endswith(".json"):
            folder, name = posixpath.split(file.src_uri)
            cell = json.loads(file.content_string)
            command = str(cell.get("command", "–")).replace("|", "\\|") if isinstance(cell, dict) else "–"
            folders.setdefault(folder, []).append(f"| [{name}]({name}) | `{command}` |")
    head = "# Cells of `{}`\n\nOne file for each run.\n\n| cell | made by |\n|---|---|\n"
    return {f"{folder}/index.md": head.format(folder) + "\n".join(rows) for folder, rows in folders.items()}
