"""A federation on the host: one pool of examples sorted by client, and who owns which run of it."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from priory.core.errors import UsageError
from priory.data import checks
from priory.data.encoder import Encoder
from priory.data.form import Form
from priory.data.options import ROLES

__all__ = ["PARTS", "Federation", "Origin", "Split", "checksum"]

PARTS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Split:
    """One contiguous run of pool rows per client, newcomers included; a client's run may be empty."""

    start: np.ndarray  # (clients,) int32
    count: np.ndarray  # (clients,) int32

    @property
    def total(self) -> int:
        """Rows over all clients."""
        return int(self.count.sum(dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Origin:
    """Where rows came from, by name and number: what would be sent instead of them."""

    source: str  # a data set or the path of a file
    index: np.ndarray  # (rows,) int64 row numbers in the source


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Clients and their examples; made by `Dataset.partition` or `from_arrays`.

    Attributes:
        x: (examples, ...) pool sorted by client, within a client train, then validation, then test; uint8 where the
            data came so, else float32.
        y: (examples,) int32 labels, or float32 targets.
        scale: (examples,) known standard error of each target, or None.
        shift: float32, one number or one per channel; a model sees (x - shift) * factor.
        factor: As `shift`.
        clients: Names; the first `num_clients` take part, the rest are newcomers.
        num_classes: None for regression.
        classes: Class names, in label order.
        group: (examples,) code of the group that a row belongs to; rows of a group share a part of a client. Or None.
        truth: What is known of each client (cluster, rotation, true weights ...); first axis all clients.
        spec: Everything needed to make it again, see `from_spec`.
        checksum: sha256 over pool and splits, and the alignment set where there is one.
        encoder: How the columns of a table became inputs; None for arrays and images.
        public: (rows, ...) unlabelled rows known to all, in the form of the pool: the alignment set; or None.
        public_rows: Where `public` came from.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    scale: np.ndarray | None
    shift: np.ndarray
    factor: np.ndarray
    train: Split
    validation: Split
    test: Split
    clients: tuple[str, ...]
    num_newcomers: int
    num_classes: int | None
    classes: tuple[str, ...]
    truth: dict[str, np.ndarray]
    spec: dict[str, Any]
    checksum: str
    encoder: Encoder | None = None
    public: np.ndarray | None = None
    public_rows: Origin | None = None
    group: np.ndarray | None = None

    @property
    def num_clients(self) -> int:
        """Clients that take part; newcomers are not counted."""
        return len(self.clients) - self.num_newcomers

    @property
    def num_examples(self) -> int:
        """Rows of the pool."""
        return len(self.y)

    @property
    def form(self) -> Form:
        """What the examples look like, without any of them."""
        named = {role: self.spec[role] for role in ROLES if self.spec.get(role)}
        if self.group is not None:
            named.setdefault("group", "group")  # the array of that name
        return Form(
            self.name,
            self.input_shape,
            self.shift,
            self.factor,
            self.num_classes,
            self.classes,
            self.encoder,
            {role: (names,) if isinstance(names, str) else tuple(names) for role, names in named.items()},
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return self.x.shape[1:]

    def index(self, client: int | str) -> int:
        """Return the position of a client, given by position or by name."""
        if isinstance(client, str):
            if client not in self.clients:
                raise checks.unknown("client", client, self.clients)
            return self.clients.index(client)
        if not 0 <= client < len(self.clients):
            raise UsageError(f"client={client} is not one of {len(self.clients)}; choose 0 to {len(self.clients) - 1}.")
        return int(client)

    def participant(self, client: int | str) -> int:
        """The position of a client that takes part; raises for any other."""
        index = self.index(client)
        if index >= self.num_clients:
            raise UsageError(f"client={client} was held out as a newcomer; give its data to `onboard`.")
        return index

    def rows(self, client: int | str, part: str = "train") -> slice:
        """Return the pool rows of one part ('train', 'validation' or 'test') of one client."""
        if part not in PARTS:
            raise checks.unknown("part", part, PARTS)
        split: Split = getattr(self, part)
        index = self.index(client)
        return slice(int(split.start[index]), int(split.start[index] + split.count[index]))

    def inputs(self, x: np.ndarray) -> np.ndarray:
        """Return what a model sees of raw examples: (x - shift) * factor in float32."""
        return (x.astype(np.float32) - self.shift) * self.factor

    def describe(self) -> str:
        """Return one line: name, clients, examples, shape, classes, split sizes and public rows."""
        newcomers = f" + {self.num_newcomers} newcomers" if self.num_newcomers else ""
        task = "regression" if self.num_classes is None else f"{self.num_classes} classes"
        shape = "x".join(map(str, self.input_shape))
        sizes = ", ".join(f"{getattr(self, part).total} {part}" for part in PARTS if getattr(self, part).total)
        public = "" if self.public is None else f", {len(self.public)} public"
        return f"{self.name}: {self.num_clients} clients{newcomers}, {shape} {self.x.dtype}, {task}, {sizes}{public}"

    def __repr__(self) -> str:
        return f"<Federation {self.describe()}>"


def checksum(*arrays: np.ndarray | None) -> str:
    """Return sha256 in hex over the types, shapes and bytes of the arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
