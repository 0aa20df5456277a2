"""Transforms that make clients differ on purpose, with the truth kept.

    invert-half           half of the clients see negatives; truth: cluster
    mix:DATASET           half of the clients have the other data set instead; truth: cluster
    rotate-by-client      each client's images turned by its own multiple of 90 degrees; truth: rotation
    corrupt-by-client     each client's images corrupted in its own way; truth: corruption, severity
        [:SEVERITY]       1 to 5 for everyone, instead of drawn per client
        [:KINDS/KINDS]    kinds for participants / for newcomers, joined by commas; by default
                          none,noise,blur,contrast/brightness,pixelate,jpeg, so newcomers meet kinds nobody trained on

They apply to uint8 images, which stay uint8. A client's draw follows from the seed and its number alone.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from priory.core.errors import UsageError
from priory.data import checks
from priory.data.corruptions import CORRUPTIONS
from priory.data.dataset import Dataset
from priory.data.partition import Partition
from priory.data.splits import Purpose, stream

__all__ = ["NAMES", "Transform", "apply", "halves", "parse", "partner"]

NAMES = ("invert-half", "mix:DATASET", "rotate-by-client", "corrupt-by-client")
SEEN: tuple[str, ...] = ("none", "noise", "blur", "contrast")
UNSEEN: tuple[str, ...] = ("brightness", "pixelate", "jpeg")


@dataclass(frozen=True)
class Transform:
    """A transform as the user wrote it, taken apart."""

    name: str
    argument: str = ""

    @property
    def makes_clusters(self) -> bool:
        """Whether it divides the clients into two clusters."""
        return self.name in ("invert-half", "mix")


def parse(texts: tuple[str, ...], dataset: Dataset) -> tuple[Transform, ...]:
    """Return the transforms that the texts name, checked against the data set."""
    steps = tuple(_parse(text) for text in texts)
    if not steps:
        return ()
    if dataset.x.dtype != np.uint8 or dataset.x.ndim != 4 or dataset.pixel_max is None:
        raise UsageError(f"transform {texts[0]!r} needs uint8 images, and {dataset.name} has none; leave it out.")
    height, width = dataset.x.shape[1:3]
    names = [step.name for step in steps]
    if "rotate-by-client" in names and height != width:
        raise UsageError(
            f"transform 'rotate-by-client' needs square images, and these are {height}x{width}; leave it out."
        )
    if len(set(names)) < len(names) or sum(step.makes_clusters for step in steps) > 1:
        raise UsageError(f"transforms {checks.listing(texts)} clash; give each once, and one of invert-half and mix.")
    return steps


def halves(num_clients: int, seed: int) -> np.ndarray:
    """Return 0 or 1 for each client: a random half of the clients is cluster 1."""
    return (stream(seed, Purpose.CLUSTER).permutation(num_clients) < num_clients // 2).astype(np.int32)


def partner(dataset: Dataset, name: str, partition: Partition) -> Dataset:
    """Return the data set to mix in: same shape, type and number of classes."""
    from priory.data.datasets import load

    if partition.kind == "natural":
        raise UsageError(f"transform 'mix:{name}' needs dealt clients; use iid, dirichlet:A, shards:S or classes:K.")
    other = load(name)
    ours = (dataset.x.shape[1:], dataset.num_classes, dataset.pixel_max)
    theirs = (other.x.shape[1:], other.num_classes, other.pixel_max)
    if ours != theirs or other.x.dtype != np.uint8 or dataset.num_classes is None:
        raise UsageError(
            f"transform 'mix:{name}' joins {dataset.name} (shape, classes, brightest pixel {ours}) with {theirs}; "
            "choose a classification data set that agrees in all three."
        )
    return other


def apply(
    steps: tuple[Transform, ...],
    x: np.ndarray,
    bounds: np.ndarray,
    number: np.ndarray,
    num_newcomers: int,
    pixel_max: int | None,
    seed: int,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the pool after all transforms, and what was drawn for each client.

    Args:
        x: (rows, height, width, channels) the pool.
        bounds: (clients + 1,) where each client's rows start.
        number: (clients,) each client's number before newcomers were set last; draws go by it.
    """
    drawn: dict[str, np.ndarray] = {}
    rows = np.diff(bounds)
    for step in steps:
        if step.name == "invert-half":
            assert pixel_max is not None
            inverted = np.repeat(halves(len(number), seed)[number] == 1, rows)[:, None, None, None]
            x = np.where(inverted, np.uint8(pixel_max) - x, x)
        elif step.name == "rotate-by-client":
            turns = stream(seed, Purpose.ROTATE).integers(0, 4, size=len(number))[number]
            x, drawn["rotation"] = _rotate(x, np.repeat(turns, rows)), (90 * turns).astype(np.int32)
        elif step.name == "corrupt-by-client":
            assert pixel_max is not None
            kind, severity = _draw_corruptions(step.argument, number, num_newcomers, seed)
            x = _corrupt(x, bounds, number, kind, severity, pixel_max, seed)
            drawn |= {"corruption": kind, "severity": severity}
    return x, drawn


def _parse(text: str) -> Transform:
    name, colon, argument = str(text).partition(":")
    if name not in {known.split(":")[0] for known in NAMES}:
        raise checks.unknown("transform", str(text), NAMES)
    if name == "mix" and not argument:
        raise UsageError(
            f"transform {text!r} does not say with what; write mix:DATASET, for example mix:fashion_mnist."
        )
    if colon and name in ("invert-half", "rotate-by-client"):
        raise UsageError(f"transform {text!r} has an argument, and {name} takes none; write {name!r}.")
    if name == "corrupt-by-client":
        _parse_corruptions(argument)
    return Transform(name, argument)


def _parse_corruptions(argument: str) -> tuple[int | None, tuple[str, ...], tuple[str, ...]]:
    """Return severity (None: drawn), kinds for participants and kinds for newcomers."""
    severity, seen, unseen = None, SEEN, UNSEEN
    for item in argument.split(":") if argument else ():
        if item.lstrip("-").isdigit():
            severity = int(item)
            if not 1 <= severity <= 5:
                raise UsageError(f"severity {item} of corrupt-by-client is out of range; choose 1 to 5.")
            continue
        first, slash, second = item.partition("/")
        seen = tuple(first.split(","))
        unseen = tuple(second.split(",")) if slash else seen
        for kind in (*seen, *unseen):
            if kind not in CORRUPTIONS:
                raise checks.unknown("corruption", kind, CORRUPTIONS)
    return severity, seen, unseen


def _draw_corruptions(
    argument: str, number: np.ndarray, num_newcomers: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kind and the severity of each client's corruption; 0 for none."""
    fixed, seen, unseen = _parse_corruptions(argument)
    rng = stream(seed, Purpose.CORRUPT)
    point, severity = rng.random(len(number))[number], rng.integers(1, 6, size=len(number))[number]
    newcomer = np.arange(len(number)) >= len(number) - num_newcomers
    first = np.array(seen)[(point * len(seen)).astype(int)]
    kind = np.where(newcomer, np.array(unseen)[(point * len(unseen)).astype(int)], first)
    severity = np.full(len(number), fixed) if fixed is not None else severity
    return kind, np.where(kind == "none", 0, severity).astype(np.int32)


def _corrupt(
    x: np.ndarray,
    bounds: np.ndarray,
    number: np.ndarray,
    kind: np.ndarray,
    severity: np.ndarray,
    pixel_max: int,
    seed: int,
) -> np.ndarray:
    result = x.copy()
    for client, (start, stop) in enumerate(pairwise(bounds.tolist())):
        if severity[client] == 0 or start == stop:
            continue
        rng = stream(seed, Purpose.PIXELS, int(number[client]))
        image = x[start:stop].astype(np.float32) / pixel_max
        changed = CORRUPTIONS[str(kind[client])](image, int(severity[client]) - 1, rng)
        result[start:stop] = np.round(np.clip(changed, 0.0, 1.0) * pixel_max).astype(np.uint8)
    return result


def _rotate(x: np.ndarray, turns: np.ndarray) -> np.ndarray:
    result = x.copy()
    for turn in (1, 2, 3):
        rows = turns == turn
        result[rows] = np.rot90(x[rows], turn, axes=(1, 2))
    return result
