"""Facts that a method declares about itself, for the tables that list methods.

>>> str(Paper("Reddi et al.", "Adaptive Federated Optimization", 2021, venue="ICLR", arxiv="2003.00295"))
'Reddi et al. 2021, ICLR, arXiv:2003.00295'
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Paper:
    """The publication of a method.

    Attributes:
        authors: Both authors of two, the first author and "et al." of more.
        title: The title as printed.
        year: Year of the venue, or of the first version on arXiv.
        venue: Conference or journal; empty for a paper that is on arXiv only.
        arxiv: Number on arXiv; empty for a paper that is not there.
    """

    authors: str
    title: str
    year: int
    venue: str = ""
    arxiv: str = ""

    def __str__(self) -> str:
        parts = [f"{self.authors} {self.year}", self.venue, self.arxiv and f"arXiv:{self.arxiv}"]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class About:
    """A method in a few words.

    Attributes:
        paper: Its publication, or "baseline" for a method without one.
        keeps: What a client keeps between rounds, in a short phrase.
        sends: What a client sends in a round, in a short phrase.
    """

    paper: Paper | Literal["baseline"]
    keeps: str
    sends: str
