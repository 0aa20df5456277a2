"""What a person sees while a run is under way: a bar on a terminal, a line per evaluation elsewhere; and Ctrl-C."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from priory import report
from priory.core.text import one_line
from priory.engine import Listener

NARROW = 100  # columns of a terminal below which the bar leaves out what is not needed


class Bar:
    """A live bar: round, rounds a second, time left, latest metrics."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress, self._scores = progress, ""
        self._task = progress.add_task(one_line(label), total=None, count="", rate="", latest="compiling")
        self._mark: float | None = None  # when the current block began; the first one compiles and tells no pace
        self._rounds, self._seconds, self._before = 0, 0.0, 0

    def advanced(self, completed: int, rounds: int, info: dict[str, float]) -> None:
        """Move the bar."""
        now = time.perf_counter()
        if self._mark is not None:
            self._rounds, self._seconds = self._rounds + completed - self._before, self._seconds + now - self._mark
        self._mark, self._before = now, completed
        rate = f"{self._rounds / self._seconds:.1f} rounds/s" if self._rounds and self._seconds > 0 else ""
        crowded = self._scores and self._progress.console.width < NARROW
        loss = f"loss {info['loss']:.3f}" if "loss" in info and not crowded else ""
        self._progress.update(
            self._task,
            completed=completed,
            total=rounds,
            count=f"{completed}/{rounds}",
            rate=rate,
            latest=" ".join(filter(None, (self._scores, loss))),
        )

    def evaluated(self, line: dict[str, Any]) -> None:
        """Show the scores; the time that they took is not the rounds'."""
        self._scores, self._mark = report.score_line(line, short=True), time.perf_counter()
        self._progress.update(self._task, latest=self._scores)


class Lines:
    """A plain line for each evaluation."""

    def __init__(self, console: Console, label: str) -> None:
        self._console, self._label, self._rounds = console, label, 0

    def advanced(self, completed: int, rounds: int, info: dict[str, float]) -> None:
        """Nothing to say between evaluations."""
        del completed, info
        self._rounds = rounds

    def evaluated(self, line: dict[str, Any]) -> None:
        """Print the scores."""
        seconds = sum(line["seconds"].values())
        text = f"{self._label}  round {line['round']}/{self._rounds or line['round']}  {report.score_line(line)}"
        self._console.print(f"{text}  {seconds:.1f} s", soft_wrap=True)


class Tenths:
    """A plain line for each tenth of the rounds, with the time left."""

    def __init__(self, console: Console, label: str) -> None:
        self._console, self._label, self._tenth = console, label, 0
        self._mark: tuple[int, float] | None = None  # of the first rounds, which were compiled for

    def __call__(self, done: int, total: int) -> None:
        """Print how many rounds are done, where that is a tenth more."""
        now, left = time.perf_counter(), ""
        if self._mark is not None and self._mark[0] < done < total:
            seconds = (total - done) * (now - self._mark[1]) / (done - self._mark[0])
            left = f", about {seconds:.0f} s left" if seconds < 120 else f", about {seconds / 60:.0f} minutes left"
        if self._mark is None and done:
            self._mark = done, now
        tenth = 10 * done // max(total, 1)
        if tenth > self._tenth:
            self._tenth = tenth
            text = f"{self._label}  {done}/{total} rounds{left}"
            self._console.print(text, soft_wrap=True)


@contextmanager
def watching(label: str) -> Iterator[Listener]:
    """A listener that suits where standard error goes."""
    console = report.console(stderr=True)
    if not console.is_terminal:
        yield Lines(console, label)
        return
    rate, latest = (TextColumn(f"{{task.fields[{name}]}}") for name in ("rate", "latest"))
    with Progress(*_bar(console), rate, TimeRemainingColumn(compact=True), latest, console=console) as progress:
        yield Bar(progress, label)


@contextmanager
def counting(label: str) -> Iterator[Callable[[int, int], None]]:
    """A function that shows how many of how many rounds are done, and the time left."""
    console = report.console(stderr=True)
    if not console.is_terminal:
        yield Tenths(console, label)
        return
    columns = (*_bar(console), TimeRemainingColumn(compact=True))
    # Rich forgets a pace after 30 s by default, and a single round may take longer.
    with Progress(*columns, console=console, speed_estimate_period=3600) as progress:
        task = progress.add_task(one_line(label), total=None, count="compiling")
        yield lambda done, total: progress.update(
            task, completed=done, total=total, count=f"{done}/{total} rounds" if done else "compiling"
        )


def _bar(console: Console) -> tuple[TextColumn, BarColumn, TextColumn]:
    """Return the label, cut short on a narrow terminal so that the numbers are not, the bar and the count."""
    place = Column(no_wrap=True, overflow="ellipsis", max_width=16 if console.width < NARROW else None)
    label = TextColumn("{task.description}", markup=False, table_column=place)
    return label, BarColumn(bar_width=20), TextColumn("{task.fields[count]}")


class Interrupt:
    """Whether Ctrl-C was pressed; called by the engine between blocks of rounds."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self) -> bool:
        return self.pressed


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """The first Ctrl-C asks the run to stop after its block of rounds; the second aborts at once."""
    interrupt = Interrupt()

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True
        report.console(stderr=True).print("stopping after this block of rounds; press Ctrl-C again to abort")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
