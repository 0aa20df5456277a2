"""What a client's answers under differential privacy have cost, over all runs, and the total that its owner allows.

    STATE/client-3/budget.json    the total, and for each run what was answered; it outlives `forget`
    STATE/client-3/budget.lock    held while it is looked at and changed

One answer a round is what noise pays for. So a question is written down before it is worked on, and the digest of its
noised answer before that leaves: the same question gets the same bytes again, and any other question of that round, an
earlier round, or a round beyond the run's claim or the owner's total gets none. Two processes that are asked at once
agree on the answer of the first.

Under local privacy every answer costs ρ (zero-concentrated differential privacy), and ρ adds up over rounds and runs.
Under central privacy a client trusts the server's noise, and a run costs what it claims from its first answer on. Until
the owner sets a total, it is the claim of the first run: a server that invents further runs learns nothing. Once the
owner has set one, apps without differential privacy get no answer; and the owner may require that the noise is added
here (`local`).
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from priory.core.errors import UsageError, explain_os_errors
from priory.core.files import locked, private_directory, write_atomically
from priory.core.reading import JsonDict, parse_json, read_bytes
from priory.engine.accountants import Counted, concentrated_epsilon
from priory.engine.accounting import Ledger

BUDGET, LOCK = "budget.json", "budget.lock"
ROUNDING = 1e-9  # by how much the sum of what was claimed may miss the total


@dataclass(frozen=True)
class Price:
    """What a run's charter says of the cost of answers.

    Attributes:
        terms: The app and the settings that decide it; a run has one of each.
        rho: Of one answer under local privacy; 0 under central.
        answers: The most that a client gives in the run.
        rounds: Rounds that the run's budget allows.
        epsilon: Claim of the whole run.
        delta: δ of the claim.
    """

    rho: float
    answers: int
    rounds: int
    epsilon: float
    delta: float
    terms: str = ""


def price_of(ledger: Ledger, terms: str = "") -> Price:
    """Return what answers cost under a charter's ledger."""
    is_local, answers = ledger.mode == "local", ledger.rounds
    if is_local and isinstance(ledger.spending, Counted):
        answers = ledger.spending.most[ledger.rounds]
    rho = 1 / (2 * ledger.noise**2) if is_local else 0.0
    return Price(rho, answers, ledger.rounds, ledger.spent(ledger.rounds), ledger.delta, terms)


@dataclass
class Spent:
    """What one run has cost a client so far.

    Attributes:
        rho: Of all its answers, under local privacy.
        epsilon: Claim of the run, under central privacy.
        delta: δ of that claim.
        answers: How many were given.
        round: The last round that was answered.
        question: Digest of its question.
        reply: Digest of its answer; empty until there is one.
        terms: The app and settings of the run, as its first question had them.
    """

    rho: float = 0.0
    epsilon: float = 0.0
    delta: float = 0.0
    answers: int = 0
    round: int = -1
    question: str = ""
    reply: str = ""
    terms: str = ""


@dataclass
class Book:
    """The contents of the file.

    Attributes:
        epsilon: The total; None until there is one.
        delta: δ at which the total is meant.
        owned: Whether the owner has set it; otherwise it is the claim of the first run.
        local: Whether the owner requires local privacy.
        runs: By name.
    """

    epsilon: float | None = None
    delta: float = 0.0
    owned: bool = False
    local: bool = False
    runs: dict[str, Spent] = field(default_factory=dict)

    def spent(self, rho: float = 0.0, epsilon: float = 0.0, delta: float = 0.0) -> float:
        """Return ε of everything so far at the total's δ, and of so much more."""
        rho += sum(run.rho for run in self.runs.values())
        epsilon += sum(run.epsilon for run in self.runs.values())
        left = self.delta - delta - sum(run.delta for run in self.runs.values())
        if rho == 0.0:
            return epsilon if left >= -ROUNDING * self.delta else float("inf")
        return epsilon + concentrated_epsilon(rho, left) if left > 0 else float("inf")


@dataclass(frozen=True)
class Budget:
    """The budget of one client.

    Attributes:
        place: Directory of the client, of all its runs.
        client: Its number.
    """

    place: Path
    client: int

    def admit(self, mode: str | None) -> None:
        """Raise unless the owner allows apps with that form of differential privacy, or without any."""
        book, whose = self.read(), f"The owner of client {self.client}"
        if book.local and mode != "local":
            told = "no differential privacy" if mode is None else f"dp={mode!r}"
            raise UsageError(f"{whose} requires local differential privacy, and this app has {told}; use --dp local.")
        if book.owned and mode is None:
            raise UsageError(
                f"{whose} allows ε = {book.epsilon:g} over all runs, and this app has no differential privacy; use "
                "--dp."
            )

    def promise(self, run: str, t: int, question: str, price: Price) -> str:
        """Spend what an answer costs; raise if it must not be given.

        Args:
            question: A digest of all that decides the answer.

        Returns:
            The digest of the answer, if it was given before; else "".
        """
        with self._changed() as book:
            spent = book.runs.get(run, Spent())
            if (spent.round, spent.question) == (t, question):
                return spent.reply
            self._check(book, run, t, price)
            if price.rho:
                spent.rho += price.rho
            else:
                spent.epsilon, spent.delta = price.epsilon, price.delta
            spent.answers, spent.round, spent.question, spent.reply = spent.answers + 1, t, question, ""
            spent.terms = price.terms
            book.runs[run] = spent
            return ""

    def settle(self, run: str, t: int, question: str, reply: str) -> str:
        """Return the digest of the answer that may leave: this one, or one that another process had first."""
        with self._changed() as book:
            spent = book.runs.get(run, Spent())
            if (spent.round, spent.question) != (t, question):
                raise UsageError(f"Client {self.client} was asked another question meanwhile; it answers that one.")
            spent.reply = spent.reply or reply
            return spent.reply

    def spent(self) -> float | None:
        """Return ε of everything so far; None where nothing was answered under differential privacy."""
        book = self.read()
        return book.spent() if book.runs else None

    def allow(self, epsilon: float, delta: float) -> None:
        """Set the owner's total."""
        if not epsilon >= 0:
            raise UsageError(f"budget-epsilon={epsilon:g} must be 0, which answers nothing, or more.")
        if not 0 < delta < 1:
            raise UsageError(
                f"budget-delta={delta:g} must be between 0 and 1, both excluded; choose a small one, as 1e-5."
            )
        with self._changed() as book:
            book.epsilon, book.delta, book.owned = epsilon, delta, True

    def require(self, local: bool) -> None:
        """Set whether noise must be added on this node."""
        with self._changed() as book:
            book.local = local

    def read(self) -> Book:
        """Return what is in the file; an empty book where there is none."""
        path = self.place / BUDGET
        with explain_os_errors(f"{path} cannot be read", ", so nothing is answered; make it readable"):
            raw = read_bytes(path) if path.exists() else b"{}"
        try:
            table: JsonDict = parse_json(raw)
            runs = {name: _spent(line) for name, line in table.pop("runs", {}).items()}
            book = Book(**table, runs=runs)
            numbers = isinstance(book.delta, float) and isinstance(book.epsilon, float | None)
            if not (numbers and isinstance(book.owned, bool) and isinstance(book.local, bool)):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(
                f"{path} is damaged, so nothing is answered; put a copy of it back, or delete it, after which the "
                "amount spent is lost."
            ) from None
        return book

    def _check(self, book: Book, run: str, t: int, price: Price) -> None:
        """Raise unless an answer fits the run's claim and the total; without a total, the run's claim becomes it."""
        spent, me = book.runs.get(run, Spent(terms=price.terms)), f"client {self.client}"
        if spent.terms != price.terms:
            raise UsageError(f"{me.capitalize()} knows run {run} with another app or other settings; start a new run.")
        if not math.isfinite(price.epsilon):
            raise UsageError(f"This app claims no finite ε for {me}; make one with more noise or fewer rounds.")
        if not t < price.rounds:
            raise UsageError(f"Round {t} is beyond the {price.rounds} that the privacy of {me} allows.")
        if t <= spent.round:
            raise UsageError(
                f"{me.capitalize()} has answered round {spent.round} and its privacy allows one answer a round; "
                "start a new run, if the owner's budget has room for one."
            )
        if spent.answers >= price.answers:
            raise UsageError(
                f"{me.capitalize()} has given {spent.answers} answers in this run, all that its claim of "
                f"ε = {price.epsilon:.4g} counts."
            )
        if book.epsilon is None:
            book.epsilon, book.delta = price.epsilon, price.delta
        if price.rho:  # the rest of the run, so that none begins that cannot end
            after = book.spent(rho=price.rho * (price.answers - spent.answers))
        else:
            after = book.spent() if spent.answers else book.spent(epsilon=price.epsilon, delta=price.delta)
        if not after <= book.epsilon * (1 + ROUNDING):
            whose = "its owner allows" if book.owned else "the first run claimed, and its owner has set no other"
            raise UsageError(
                f"{me.capitalize()} has spent ε = {book.spent():.4g} and would spend {after:.4g} by the end of this "
                f"run, above the {book.epsilon:.4g} that {whose}; the owner raises it with `priory flower budget`."
            )

    @contextmanager
    def _changed(self) -> Iterator[Book]:
        """Hold the file, and write what was changed unless there was an error."""
        path = self.place / BUDGET
        with explain_os_errors(f"{path} cannot be written", ", so nothing is answered"):
            private_directory(self.place)
            with locked(self.place / LOCK):
                book = self.read()
                before = asdict(book)
                yield book
                if asdict(book) != before:
                    write_atomically(path, json.dumps(asdict(book), indent=1) + "\n")


def _spent(line: JsonDict) -> Spent:
    """Return a line of the file; raise ValueError if it is none."""
    spent = Spent(**line)
    numbers, texts = (spent.rho, spent.epsilon, spent.delta), (spent.question, spent.reply, spent.terms)
    whole = all(type(number) is int for number in (spent.answers, spent.round))
    if not (whole and all(isinstance(one, float) and one >= 0 for one in numbers) and all(map(str.isascii, texts))):
        raise ValueError
    return spent
