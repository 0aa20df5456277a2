"""The commands of the documents run, on a machine that has no data files."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import priory
from priory.cli import main
from priory.cli.app import COMMANDS
from priory.cli.flower import COMMANDS as FLOWER
from priory.data import describe, files
from priory.deploy.app_hash import written_hash
from priory.deploy.node_log import NodeLog
from priory.reproduce import names, read

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = ["own-data.md"]  # code and commands in turn: `tests/test_own_data.py`
# Commands that no page runs, by how they begin, each with its reason.
NOT_RUN = {
    "pip install": "needs a network; tests/test_package.py installs the package",
    "make": "makes an environment of its own",
    "export": "sets a variable of the shell",
    "tensorboard": "is a server of another package",
    "flwr": "needs servers that run; tests/deploy/test_one_truth_flower.py runs an app on them",
    "flower-superlink": "is a server; tests/deploy/test_processes.py starts it",
    "flower-supernode": "is a node; tests/deploy/test_processes.py starts it",
    "flower-superexec": "is a server; tests/deploy/test_recipe.py starts it",
    "env": "starts a server; tests/deploy/test_recipe.py starts it",
    "nginx": "is a server; tests/deploy/test_gateway.py starts it",
    "ssh-keygen": "is a tool of OpenSSH; tests/deploy/test_node_keys_flower.py uses such keys",
    "head": "makes a secret; `priory flower keys` makes the same",
    "chmod": "corrects files of an older deployment",
    "priory flower keys renew keys --node": "needs a SuperLink; tests/deploy/test_node_keys_flower.py has one",
    "priory flower keys revoke": "needs a SuperLink; tests/deploy/test_node_keys.py has the same without one",
    "umask": "sets a mode of the shell",
    "mkdir": "prepares for flwr; tests/deploy/test_recipe.py follows the recipe",
    "printf": "writes for flwr; tests/deploy/test_recipe.py follows the recipe",
    "curl": "asks a server; tests/deploy/test_recipe.py asks the same",
    "priory flower up": "starts servers; the last test of this file runs it",
    "priory flower status": "needs a server that ran; the last test of this file has one",
    "priory flower forget": "needs a node that ran; the last test of this file has one",
    "priory flower log": "needs a node that ran; the last test of this file has one",
}
# Pages that take more than six seconds, and the fast tests of the same code.
SLOW = {
    "baselines.md": "compiles seven methods; the README's comparison trains three",
    "mixed-effects.md": "runs chains four times; the README's commands run them once, tests/data reads radon",
    "newcomers.md": "trains two methods and onboards in every way; tests/cli/test_onboard.py",
    "privacy.md": "accounts for privacy four times; tests/cli/test_audit.py, tests/methods/test_fedpop_privacy.py",
}
SMALL = {"--cohort": "2", "--chains": "2", "--prior-draws": "50", "--samples": "20", "--steps": "6"}
SLOW_COMMANDS = ["check", "tune"]  # of the README; tests/cli and test_tune.py run them on less
# Exit codes beside 0 that are an answer: a posterior that fails, a claim that is refuted. On less, either may come.
VERDICTS = {"check": (0, 1), "audit": (0, 1)}
IN_FILES = {name for name in files.FILES if not any((files.SHIPPED / file).exists() for file in files.FILES[name])}


def commands_of(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The commands of a page in their order: the machine before the prompt, and the words."""
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        for machine, command in re.findall(r"^([\w-]*)\$ (.*)$", block.replace("\\\n", " "), re.MULTILINE):
            yield machine, shlex.split(command, comments=True)


def begins(words: list[str], start: str) -> bool:
    return words[: len(start.split())] == start.split()


def on_less(words: list[str]) -> list[str]:
    """The command with flags that make it short; of two equal flags the last one counts.

    One round of a linear model, five clients where they are dealt, the digits in place of images that are in files.
    """
    instead = {"METHOD": "pfedbayes", **dict.fromkeys(IN_FILES, "digits")}
    words = [instead.get(word, word) for word in words]
    less = {
        "audit": ["--canaries", "100"],
        "check": ["--clients", "100", "--rounds", "0", "--visits", "20"],
        "reproduce": ["--estimate"],  # tests/reproduce makes a small table
    }.get(words[0], [])
    if "--data" in words and words[0] in ("run", "compare", "tune", "flower"):
        less += ["--rounds", "1"]
        less += [] if "intercept" in words else ["--model", "linear"]
        less += ["--partition", "iid", "--clients", "5"] if "digits" in words else []
        for flag, value in SMALL.items():
            less += [flag, value] if flag in words else []
    return [*words, *less]


def write_files(page: str) -> None:
    """Write the files and runs that the commands of a page take as given."""
    digits = priory.data.load("digits")
    np.savez("clinic.npz", x=digits.x[:50], y=digits.y[:50])  # of a client that comes later
    np.savez("ward.npz", x=digits.x[50:60])
    if page in ("deploy.md", "privacy.md"):
        rows = "".join(f"{name},{age},{age % 2}\n" for name in ("east", "west") for age in range(30, 50))
        for file in (Path("visits.csv"), Path("server", "sample.csv")):
            file.parent.mkdir(exist_ok=True)
            file.write_text("hospital,age,outcome\n" + rows)
    if page == "adding-a-method.md":
        shutil.copy(ROOT / "docs" / "fedavgm.py", "fedavgm.py")
    if page == "report.md":
        np.savez("noise.npz", x=np.random.default_rng(0).integers(0, 17, (20, 8, 8, 1)).astype(np.uint8))
        for seed, name in enumerate(("three/fedavg", "a", "b")):
            words = ["run", "fedavg", "--data", "digits", "--seed", str(seed), "--out", f"runs/{name}"]
            assert main(on_less(words)) == 0


def run(machine: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command in the directory that stands for its machine, with a /srv of its own."""
    with monkeypatch.context() as patch:
        Path(machine).mkdir(exist_ok=True)
        patch.chdir(Path(machine))
        Path("srv/priory").mkdir(parents=True, exist_ok=True)
        words = [word.replace("/srv/", "srv/") for word in words]
        if words[:2] == ["python", "-c"]:
            exec(words[2], {})
            return 0
        assert words[0] == "priory", f"{words} is run by no test and excused in no list"
        code = main(on_less(words[1:]))
        if words[1:3] == ["flower", "schema"]:  # the review that the page asks for
            schema = Path("schema.toml")
            schema.write_text(schema.read_text().replace("reviewed = false", "reviewed = true"))
        return code


@pytest.mark.xdist_group("command line")  # tests/cli trains most of it
@pytest.mark.filterwarnings(
    "ignore::priory.fed.capabilities.AdviceWarning"
)  # one round is too little, and is said to be
@pytest.mark.usefixtures("somewhere_else", "without_files")
@pytest.mark.parametrize(
    ("page", "slow"),
    [
        *(
            pytest.param(page, False, marks=pytest.mark.slow if page.name in SLOW else (), id=page.name)
            for page in PAGES
            if page.name not in ELSEWHERE and any(True for _ in commands_of(page))
        ),
        pytest.param(ROOT / "README.md", True, marks=pytest.mark.slow, id="README.md, slow commands"),
    ],
)
def test_the_commands_of_a_page_run(page, slow, monkeypatch, capsys):
    """As they are, one after the other, but on less: `on_less`."""
    write_files(page.name)
    for machine, words in commands_of(page):
        is_slow = page.name == "README.md" and words[1] in SLOW_COMMANDS
        if any(begins(words, start) for start in NOT_RUN) or is_slow is not slow:
            continue
        code = run(machine, words, monkeypatch)
        assert code in VERDICTS.get(words[1], (0,)), (words, capsys.readouterr().err)


def test_the_readme_has_every_command():
    assert {words[1] for _, words in commands_of(ROOT / "README.md") if words[0] == "priory"} == set(COMMANDS)


def test_no_command_is_excused_that_no_page_has():
    found = [words for page in PAGES for _, words in commands_of(page)]
    assert [start for start in NOT_RUN if not any(begins(words, start) for words in found)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_in_blocks_that_the_tests_run(page):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    others = [block for kind, block in blocks if kind != "console"]
    assert [block for block in others if re.search(r"^(\$ )?priory ", block, re.MULTILINE)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_whose_commands_need_files_says_so(page):
    text = page.read_text()
    read_by_name = re.findall(r"--data ([\w:]+)", text)
    tables = [name for name in re.findall(r"priory reproduce ([\w-]+)", text) if name in names()]
    needed = {*read_by_name, *(name for table in tables for name in read(table).data_sets)} & IN_FILES
    assert not needed or "PRIORY_DATA" in text, needed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_the_text_name_what_exists(page):
    known = {"flower": {*FLOWER}, "reproduce": {*names(), "--list", "NAME"}}
    data = {entry.name.split(":")[0] for entry in describe()}
    for text in re.findall(r"`priory ([^`]+)`", page.read_text()):
        command, *words = text.split()
        assert command in (*COMMANDS, "--help"), text
        assert not words or words[0] in known.get(command, words), text
        assert set(re.findall(r"--data (\w+)(?![\w.])", text)) <= data, text


@pytest.mark.slow  # real Flower: a server and four nodes
@pytest.mark.xdist_group("flower")
@pytest.mark.usefixtures("somewhere_else", "without_files")
def test_a_federation_of_the_pages_runs_on_this_machine(capsys):
    pytest.importorskip("flwr")
    up = next(words for _, words in commands_of(ROOT / "docs" / "deploy.md") if begins(words, "priory flower up"))
    assert main([*up[1:], "--rounds", "1", "--out", "here"]) == 0, capsys.readouterr().err
    assert "4 of 4 replies usable" in capsys.readouterr().out
    number = written_hash(Path("here/app"))
    for node in range(4):
        assert main(["flower", "log", "verify", f"here/nodes/{node}/state"]) == 0
        entries = NodeLog(Path(f"here/nodes/{node}/state/client-{node}"), node).entries()
        assert {"train", "evaluate"} <= {one["kind"] for one in entries}
        assert {(one["app"], one["outcome"]) for one in entries} == {(number, "answered")}
    assert main(["flower", "status", "here"]) == 0
    assert main(["flower", "forget", "here/nodes/0/state", "--client", "0", "--yes"]) == 0
