"""Sentences that the figures of a run suggest to its user, each kind once."""

import warnings
from dataclasses import dataclass, field

from priory.fed.capabilities import AdviceWarning, Advises
from priory.fed.method import Method, Task


@dataclass
class Adviser:
    """Warns of what the figures of a run suggest.

    Attributes:
        given: The newest sentence of each kind, which commits and the summary keep.
        warned: Kinds that this process has warned of.
    """

    method: Method
    task: Task
    given: dict[str, str] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def of_figures(self, info: dict[str, float], progress: float) -> dict[str, str]:
        """The sentences that the method has for the figures of a round, with this share of the rounds done."""
        return self.method.advice(self.task, info | {"progress": progress}) if isinstance(self.method, Advises) else {}

    def add(self, advice: dict[str, str]) -> None:
        """Keep the advice, and warn of each kind that is new."""
        self.warn({kind: sentence for kind, sentence in advice.items() if kind not in self.given})
        self.given.update(advice)

    def warn(self, advice: dict[str, str]) -> None:
        """Warn of the advice."""
        for sentence in advice.values():
            warnings.warn(sentence, AdviceWarning, stacklevel=3)
        self.warned |= advice.keys()
