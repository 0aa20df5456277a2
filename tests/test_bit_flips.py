"""A flipped bit in any file of a run directory or of an exported model: an error in one sentence, or the same output.

Outputs are compared byte for byte: the file of predictions, report.html, clients.json and the states of server and
clients. Of summary.json and metrics.jsonl of a resumed run all is compared but what depends on the machine: seconds,
peak_rss_bytes, and with them the length and the checksum of the metrics.
"""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

import priory
from priory.cli import main, progress
from priory.core.sealed import sealed
from priory.engine import runner
from priory.records import RecordStore
from priory.store import METRICS_BYTES, METRICS_SHA256, RunDirectory
from tests.cli.conftest import BAYES

pytestmark = [
    pytest.mark.xdist_group("command line"),  # one worker makes the runs, of methods that other commands train too
    pytest.mark.filterwarnings("ignore::priory.fed.capabilities.AdviceWarning"),  # a few rounds are too few
]

FOUND, HARMLESS, SILENT = "found", "harmless", "silent"
ON_MACHINE = ("seconds", "peak_rss_bytes", METRICS_BYTES, METRICS_SHA256, "sha256")


@dataclass(frozen=True)
class Command:
    """What reads damaged files.

    Attributes:
        argv: Its words.
        output: What it leaves in a directory.
    """

    argv: tuple[str, ...]
    output: Callable[[Path], object]


def of_resumed(place: Path) -> dict[str, object]:
    """Results of a resumed run, without what depends on the machine."""

    def kept(table: dict) -> dict:
        return {name: value for name, value in table.items() if name not in ON_MACHINE}

    run = RunDirectory(place / "run")
    return {
        "summary": kept(json.loads((run.path / "summary.json").read_text())),
        "metrics": [kept(line) for line in run.metrics()],
        "clients": (run.path / "clients.json").read_bytes(),
        **{who: states(run.checkpoint / who) for who in ("server", "clients")},
    }


def states(path: Path) -> bytes:
    """The newest records of a store, whatever their structure."""
    num = (path / "index.bin").stat().st_size // 16
    size = (path / "records.bin").stat().st_size // (2 * num) - 8
    stacked, found = RecordStore(path, np.zeros(size, np.uint8), num, is_new=False).read(np.arange(num), 1 << 30)
    return stacked.tobytes() + found.tobytes()


def writes(*argv: str) -> Command:
    """A command whose last word is the file that it writes."""
    return Command(argv, lambda place: (place / argv[-1]).read_bytes())


PREDICT = ("predict", "--data", "rows.npz")
COMMANDS = {
    "stopped": (Command(("resume", "run"), of_resumed),),
    "finished": (
        writes(*PREDICT, "both/a", "--client", "1", "--out", "one.csv"),
        writes(*PREDICT, "both/a", "--client", "later", "--out", "later.csv"),
        writes("report", "both", "--out", "report.html"),
    ),
    "model": (writes(*PREDICT, "model", "--out", "one.csv"),),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """A directory for each kind: a run that was stopped half way, two finished ones side by side, a model."""
    jax.devices()
    root = tmp_path_factory.mktemp("places")
    with pytest.MonkeyPatch.context() as patch:
        for name in COMMANDS:
            (root / name).mkdir()
        patch.chdir(root / "finished")
        for seed, name in enumerate("ab"):
            assert main(["run", "pfedbayes", *BAYES, "--certify", "--seed", str(seed), "--out", f"both/{name}"]) == 0
        rows = priory.data.load("digits").x[:20]
        np.savez("rows.npz", x=rows)
        np.savez(root / "model" / "rows.npz", x=rows)
        assert main(["export", "both/a", "--client", "1", "--draws", "2", "--out", str(root / "model" / "model")]) == 0
        shutil.copytree(root / "model" / "model", "both/a/onboarded/later/model")
        assert main(["report", "both"]) == 0  # which measures the uncertainty
        Path("both/report.html").unlink()  # nothing reads it
        runs = [{"runs": [{"path": "b"}, {"path": "a"}]}]
        Path("both/comparison.json").write_text(sealed({"methods": runs}))

        patch.chdir(root / "stopped")
        asked = iter([False, False, True])
        patch.setattr(progress, "interruptible", lambda: contextlib.nullcontext(lambda: next(asked)))
        patch.setattr(runner, "LOOK_SECONDS", 0.0)
        assert main(["run", "pfedbayes", *BAYES, "--out", "run"]) == 130
    return {name: root / name for name in COMMANDS}


@pytest.fixture(scope="module")
def flip(places, tmp_path_factory) -> Callable[[str, str, np.random.Generator], str]:
    """Flips a random bit of a file in a copy and runs the commands; returns the outcome."""
    work = tmp_path_factory.mktemp("work")

    def outputs(kind: str, damage: Callable[[], object]) -> list[object]:
        """What each command leaves; None for one that refuses."""
        place = work / kind
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(places[kind], place)
        left: list[object] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            damage()
            for command in COMMANDS[kind]:
                code = main([*command.argv])
                assert code in (0, 2)
                left.append(command.output(place) if code == 0 else None)
        return left

    expected = {kind: outputs(kind, lambda: None) for kind in COMMANDS}
    assert all(one is not None for left in expected.values() for one in left)

    def once(kind: str, name: str, draw: np.random.Generator) -> str:
        def damage() -> None:
            raw = bytearray(Path(name).read_bytes())
            raw[draw.integers(len(raw))] ^= 1 << draw.integers(8)
            Path(name).write_bytes(raw)

        left = outputs(kind, damage)
        if any(one not in (None, wanted) for one, wanted in zip(left, expected[kind], strict=True)):
            return SILENT
        return FOUND if None in left else HARMLESS

    return once


def files_of(place: Path) -> list[str]:
    """What is damaged: everything but the rows to predict and the run that is only there for company."""
    found = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    return [name for name in found if name != "rows.npz" and not name.startswith("both/b/")]


def outcomes(places, flip, num: int, seed: int, capsys) -> Counter:
    """How many flips of each file had each outcome; every file has its turn."""
    draw = np.random.default_rng(seed)
    files = [(kind, name) for kind in COMMANDS for name in files_of(places[kind])]
    turns = [files[place] for _ in range(-(-num // len(files))) for place in draw.permutation(len(files))][:num]
    counts: Counter = Counter()
    for kind, name in turns:
        capsys.readouterr()
        outcome = flip(kind, name, draw)
        counts[kind, name, outcome] += 1
        if outcome == FOUND:
            complaints = [line for line in capsys.readouterr().err.splitlines() if line.startswith("priory: ")]
            assert complaints
            assert all(line.endswith(".") for line in complaints)
    return counts


def table(counts: Counter) -> str:
    """The counts by file."""
    rows = sorted({key[:2] for key in counts})
    lines = [f"{'':9} {'':45} {FOUND:>9} {HARMLESS:>9} {SILENT:>9}"]
    for kind, name in rows:
        numbers = " ".join(f"{counts[kind, name, outcome]:9}" for outcome in (FOUND, HARMLESS, SILENT))
        lines.append(f"{kind:9} {name:45} {numbers}")
    totals = [sum(value for key, value in counts.items() if key[2] == one) for one in (FOUND, HARMLESS, SILENT)]
    return "\n".join([*lines, f"{'':9} {'all':45} " + " ".join(f"{total:9}" for total in totals)])


def silent(counts: Counter) -> dict:
    return {key[:2]: value for key, value in counts.items() if key[2] == SILENT}


def test_a_flipped_bit_is_found_or_changes_no_output(places, flip, capsys):
    counts = outcomes(places, flip, 60, 0, capsys)
    assert counts.total() == 60
    assert silent(counts) == {}, table(counts)


@pytest.mark.slow  # 1,000 copies of run directories, and as many commands
def test_of_a_thousand_flipped_bits_each_is_found_or_changes_no_output(places, flip, capsys):
    counts = outcomes(places, flip, 1000, 1, capsys)
    with capsys.disabled():
        print(f"\n{table(counts)}")
    assert silent(counts) == {}
