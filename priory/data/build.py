"""From a data set to a federation: deal, split, hold out, then sort the pool once."""

import math
from dataclasses import dataclass, replace

import numpy as np

from priory.core.errors import UsageError
from priory.data import alignment, partition, transforms
from priory.data.alignment import PublicRows
from priory.data.dataset import Dataset
from priory.data.encoder import Encoder, fit_encoder
from priory.data.federation import Federation, Origin, Split, checksum
from priory.data.options import PartitionOptions
from priory.data.plan import Plan, parse_per_class, parse_sizes, plan
from priory.data.splits import Purpose, draw, hold_out_units, majority, stream

__all__ = ["build"]

TRAIN, VALIDATION, TEST = 0, 1, 2
ALIGNMENT = 64  # bytes


@dataclass(frozen=True, eq=False)
class Deal:
    """Who owns each row, and what for."""

    owner: np.ndarray  # (rows,) int32, -1 for nobody
    part: np.ndarray  # (rows,) int8: TRAIN, VALIDATION, TEST
    unit: np.ndarray | None  # (rows,) what must stay on one side; None: each row by itself
    clients: tuple[str, ...]
    truth: dict[str, np.ndarray]  # first axis clients


def build(dataset: Dataset, options: PartitionOptions) -> Federation:
    """Return the federation that the options make of the data set."""
    wanted = plan(dataset, options)
    steps = transforms.parse(wanted.transform, dataset)
    dataset, public = _hold_out_public(dataset, steps, wanted)
    deal = _deal_and_split(dataset, wanted)
    clustered = next((step for step in steps if step.makes_clusters), None)
    if clustered is not None:
        cluster = transforms.halves(len(deal.clients), wanted.seed)
        deal = replace(deal, truth={**deal.truth, "cluster": cluster})
        if clustered.name == "mix":
            dataset, deal = _mix(dataset, deal, clustered.argument, wanted)
    order, num_newcomers = _arrange(deal, wanted)
    return _assemble(dataset, deal, order, num_newcomers, steps, public, wanted)


def _hold_out_public(
    dataset: Dataset, steps: tuple[transforms.Transform, ...], wanted: Plan
) -> tuple[Dataset, PublicRows | None]:
    """Return the rows that are left to deal, and the alignment set, where one is wanted."""
    if wanted.align is None:
        return dataset, None
    mixed = next((step.argument for step in steps if step.name == "mix"), None)
    public = alignment.draw(alignment.parse(wanted.align), dataset, wanted.seed, mixed)
    return (alignment.without(dataset, public.held) if public.spec.own else dataset), public


def _deal_and_split(dataset: Dataset, wanted: Plan) -> Deal:
    deal = _take_sizes(dataset, _deal_out(dataset, wanted), wanted)
    return _take_validation(dataset, deal, wanted)


def _deal_out(dataset: Dataset, wanted: Plan) -> Deal:
    """Return every row's client and side, training or test, before sizes and validation."""
    natural = wanted.dealing.kind == "natural"
    deal = _natural(dataset, wanted) if natural else _dealt(dataset, wanted)
    count = np.bincount(deal.owner[(deal.part == TRAIN) & (deal.owner >= 0)], minlength=len(deal.clients))
    enough = count >= wanted.min_examples
    if enough.all():
        return deal
    if natural:
        return _keep_clients(deal, enough, wanted)
    worst = int(count.argmin())
    raise UsageError(
        f"client {worst} has {count[worst]} training examples under '{wanted.partition}' with {len(count)} clients, "
        f"and each needs {wanted.min_examples}; choose fewer clients or another partition."
    )


def _natural(dataset: Dataset, wanted: Plan) -> Deal:
    assert dataset.client is not None
    owner, unit = dataset.client, dataset.group
    if unit is not None:
        first = np.unique(unit, return_index=True)[1]
        strays = np.flatnonzero(owner[first][unit] != owner)
        if len(strays):
            name, here, there = unit[strays[0]], owner[first[unit[strays[0]]]], owner[strays[0]]
            raise UsageError(
                f"group {dataset.groups[name]!r} has rows at the clients {dataset.clients[here]!r} and "
                f"{dataset.clients[there]!r}, and a group lives at one client; make group names unique to a client."
            )
    deal = Deal(owner, _test_part(dataset, owner, unit, wanted), unit, dataset.clients, dataset.truth)
    if wanted.clients is None or wanted.clients == len(dataset.clients):
        return deal
    keep = np.zeros(len(dataset.clients), bool)
    keep[stream(wanted.seed, Purpose.NATURAL).permutation(len(keep))[: wanted.clients]] = True
    return _keep_clients(deal, keep, wanted)


def _dealt(dataset: Dataset, wanted: Plan) -> Deal:
    assert wanted.clients is not None
    label, num_classes = _dealt_by(dataset, wanted)
    official, rng = dataset.official_test, stream(wanted.seed, Purpose.DEAL)
    if wanted.per_class is not None:
        _check_enough(dataset, wanted.clients, len(label), 1)
        owner, is_test = partition.deal_per_class(
            wanted.dealing, label, wanted.clients, dataset.classes, parse_per_class(wanted.per_class), rng
        )
        return Deal(owner, np.where(is_test, TEST, TRAIN).astype(np.int8), None, _numbered(wanted.clients), {})
    if official is not None:
        _check_enough(dataset, wanted.clients, int((~official).sum()), wanted.min_examples)
        owner = np.empty(len(label), np.int32)
        owner[~official] = partition.deal(
            wanted.dealing, label[~official], wanted.clients, num_classes, wanted.min_examples, rng
        )
        rng = stream(wanted.seed, Purpose.DEAL_TEST)
        owner[official] = partition.deal_alike(
            wanted.dealing, owner[~official], label[~official], label[official], wanted.clients, rng
        )
    elif dataset.group is not None:
        of_unit = majority(dataset.group, label)
        _check_enough(dataset, wanted.clients, len(of_unit), wanted.least_rows, "groups")
        dealt = partition.deal(wanted.dealing, of_unit, wanted.clients, num_classes, wanted.least_rows, rng)
        owner = dealt[dataset.group]
    else:
        _check_enough(dataset, wanted.clients, len(label), wanted.least_rows)
        owner = partition.deal(wanted.dealing, label, wanted.clients, num_classes, wanted.least_rows, rng)
    names = _numbered(wanted.clients)
    return Deal(owner, _test_part(dataset, owner, dataset.group, wanted), dataset.group, names, {})


def _numbered(num_clients: int) -> tuple[str, ...]:
    return tuple(map(str, range(num_clients)))


def _dealt_by(dataset: Dataset, wanted: Plan) -> tuple[np.ndarray, int]:
    """Return the class that each row is dealt by, and how many there are."""
    if not wanted.dealing.coarse:
        return _label(dataset), dataset.num_classes or 1
    if dataset.coarse is None:
        fine = str(wanted.partition).removesuffix(":coarse")
        raise UsageError(
            f"partition '{wanted.partition}' deals coarse classes, and {dataset.name} has none; write '{fine}'."
        )
    return dataset.coarse, int(dataset.coarse.max()) + 1


def _check_enough(dataset: Dataset, clients: int, available: int, least: int, what: str = "examples") -> None:
    if clients * least > available:
        each = "" if least == 1 else f", {least} for each client,"
        raise UsageError(
            f"clients={clients} exceeds what the {available} {what} of {dataset.name}{each} allow; "
            f"choose at most {available // least} clients."
        )


def _label(dataset: Dataset) -> np.ndarray:
    return dataset.y if dataset.num_classes is not None else np.zeros(len(dataset.y), np.int32)


def _test_part(dataset: Dataset, owner: np.ndarray, unit: np.ndarray | None, wanted: Plan) -> np.ndarray:
    """Return TRAIN or TEST for each row: the official test part if there is one, else a stratified split by client."""
    part = np.full(len(owner), TRAIN, np.int8)
    if dataset.official_test is not None:
        part[dataset.official_test] = TEST
        return part
    rows = np.flatnonzero(owner >= 0)
    units = None if unit is None else unit[rows]
    rng = stream(wanted.seed, Purpose.TEST)
    part[rows[hold_out_units(owner[rows], _label(dataset)[rows], units, wanted.test, rng)]] = TEST
    return part


def _keep_clients(deal: Deal, keep: np.ndarray, wanted: Plan) -> Deal:
    if not keep.any():
        raise UsageError(f"min_examples={wanted.min_examples} leaves no client; lower min_examples.")
    place = np.where(keep, np.cumsum(keep) - 1, -1).astype(np.int32)
    names = tuple(name for name, kept in zip(deal.clients, keep, strict=True) if kept)
    truth = {key: value[keep] for key, value in deal.truth.items()}
    return replace(deal, owner=np.where(deal.owner >= 0, place[deal.owner], -1), clients=names, truth=truth)


def _mix(dataset: Dataset, deal: Deal, other_name: str, wanted: Plan) -> tuple[Dataset, Deal]:
    """Return both data sets end to end; the clients of cluster 1 own their rows of the second instead of the first."""
    other = transforms.partner(dataset, other_name, wanted.dealing)
    second = _deal_and_split(other, wanted)
    cluster = deal.truth["cluster"]
    owners = [
        np.where((each.owner >= 0) & (cluster[each.owner] == index), each.owner, -1)
        for index, each in enumerate((deal, second))
    ]
    both = replace(
        dataset,
        x=np.concatenate([dataset.x, other.x]),
        y=np.concatenate([dataset.y, other.y]),
        name=f"{dataset.name}+{other.name}",
    )
    unit = None if deal.unit is None else np.r_[deal.unit, deal.unit.max() + 1 + np.arange(len(other.y))]
    return both, replace(deal, owner=np.concatenate(owners), part=np.r_[deal.part, second.part], unit=unit)


def _take_sizes(dataset: Dataset, deal: Deal, wanted: Plan) -> Deal:
    """Return the deal with each client's training part cut down to the size it was drawn."""
    if wanted.sizes is None:
        return deal
    rng = stream(wanted.seed, Purpose.SIZES)
    num_clients = len(deal.clients)
    shares, counts = zip(*parse_sizes(wanted.sizes), strict=True)
    edges = np.round(np.cumsum(shares) / sum(shares) * num_clients).astype(int)
    size = np.empty(num_clients, np.int64)
    size[rng.permutation(num_clients)] = np.repeat(counts, np.diff(edges, prepend=0))
    rows = np.flatnonzero((deal.owner >= 0) & (deal.part == TRAIN))
    have = np.bincount(deal.owner[rows], minlength=num_clients)
    if (have < size).any():
        short = int((have - size).argmin())
        raise UsageError(
            f"sizes asks client {deal.clients[short]!r} for {size[short]} training examples, and it has {have[short]}; "
            f"ask for fewer, choose fewer clients, or set min_examples={max(counts)}."
        )
    keep = draw(deal.owner[rows], _label(dataset)[rows], size, rng)
    owner = deal.owner.copy()
    owner[rows[~keep]] = -1
    return replace(deal, owner=owner)


def _take_validation(dataset: Dataset, deal: Deal, wanted: Plan) -> Deal:
    """Return the deal with a stratified fraction of each training part set aside; the test part is not touched."""
    if wanted.validation == 0.0:
        return deal
    rows = np.flatnonzero((deal.owner >= 0) & (deal.part == TRAIN))
    unit = None if deal.unit is None else deal.unit[rows]
    rng = stream(wanted.seed, Purpose.VALIDATION)
    mask = hold_out_units(deal.owner[rows], _label(dataset)[rows], unit, wanted.validation, rng)
    part = deal.part.copy()
    part[rows[mask]] = VALIDATION
    return replace(deal, part=part)


def _arrange(deal: Deal, wanted: Plan) -> tuple[np.ndarray, int]:
    """Return the clients in their final order, newcomers last, and how many newcomers there are."""
    num_clients = len(deal.clients)
    if wanted.newcomers == 0.0:
        return np.arange(num_clients), 0
    number = max(1, round(wanted.newcomers * num_clients))
    if number >= num_clients:
        raise UsageError(
            f"newcomers={wanted.newcomers:g} holds out {number} of {num_clients} clients, and one must take part; "
            "hold out fewer or use more clients."
        )
    order = stream(wanted.seed, Purpose.NEWCOMERS).permutation(num_clients)
    cluster = deal.truth.get("cluster")
    if cluster is not None:  # take newcomers from the clusters in turn, so that none is left without one
        turn = np.empty(num_clients, np.int64)
        for value in np.unique(cluster):
            members = np.flatnonzero(cluster[order] == value)
            turn[members] = np.arange(len(members))
        order = order[np.argsort(turn, kind="stable")]
    return np.r_[np.sort(order[number:]), np.sort(order[:number])], number


def _assemble(
    dataset: Dataset,
    deal: Deal,
    order: np.ndarray,
    num_newcomers: int,
    steps: tuple[transforms.Transform, ...],
    public: PublicRows | None,
    wanted: Plan,
) -> Federation:
    """Return the pool sorted by client and part, encoded, transformed and summed up."""
    num_clients = len(order)
    place = np.empty(num_clients, np.int64)
    place[order] = np.arange(num_clients)
    rows = np.flatnonzero(deal.owner >= 0)
    run = place[deal.owner[rows]] * 3 + deal.part[rows]
    rows = rows[np.argsort(run, kind="stable")]
    count = np.bincount(run, minlength=3 * num_clients)
    start = np.cumsum(count) - count
    train, validation, test = (
        Split(start[part::3].astype(np.int32), count[part::3].astype(np.int32)) for part in (TRAIN, VALIDATION, TEST)
    )
    trains = np.arange(3 * num_clients) % 3 == TRAIN
    trains[3 * (num_clients - num_newcomers) :] = False
    training = np.repeat(trains, count)
    x, shift, factor, encoder = _encode(dataset, aligned(dataset.x, rows), training)
    shown = None if public is None else alignment.encoded(public, x[training], factor, encoder)
    truth = {key: value[order] for key, value in deal.truth.items()}
    bounds = np.r_[start[::3], len(rows)]
    x, drawn = transforms.apply(steps, x, bounds, order, num_newcomers, dataset.pixel_max, wanted.seed)
    y, scale = aligned(dataset.y, rows), None if dataset.scale is None else dataset.scale[rows]
    splits = [array for split in (train, validation, test) for array in (split.start, split.count)]
    return Federation(
        name=dataset.name,
        x=aligned(x),
        y=y,
        scale=scale,
        shift=shift,
        factor=factor,
        train=train,
        validation=validation,
        test=test,
        clients=tuple(deal.clients[index] for index in order),
        num_newcomers=num_newcomers,
        num_classes=dataset.num_classes,
        classes=dataset.classes,
        truth={**truth, **drawn},
        spec={**dataset.source, **wanted.given},
        checksum=checksum(x, y, scale, *splits, shown),
        encoder=encoder,
        public=shown,
        public_rows=None if public is None else Origin(public.source, public.index),
        group=None if deal.unit is None else deal.unit[rows],
    )


def aligned(array: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
    """Return the array, or the given rows of it, from an address that is a multiple of 64.

    Host devices of JAX read such an array where it is; any other they copy, each of them once.
    """
    if rows is None and array.ctypes.data % ALIGNMENT == 0:
        return array
    shape = array.shape if rows is None else (len(rows), *array.shape[1:])
    size = math.prod(shape) * array.dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    made = raw[first : first + size].view(array.dtype).reshape(shape)
    if rows is None:
        made[...] = array
    else:
        np.take(array, rows, axis=0, out=made, mode="clip")  # "raise" would buffer the whole
    return made


def _encode(
    dataset: Dataset, x: np.ndarray, training: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Encoder | None]:
    """Return the rows as model inputs, with shift and factor; statistics come from the training rows or are stated."""
    encoder = dataset.encoder
    if dataset.features is not None:
        encoder = encoder or fit_encoder(dataset.features, x[training])
        x = encoder.encode(x)
    if dataset.shift is not None and dataset.factor is not None:
        return x, dataset.shift, dataset.factor, encoder
    axes = tuple(range(x.ndim - 1))
    deviation = x[training].std(axis=axes, dtype=np.float64)
    factor = 1.0 / np.where(deviation > 1e-12, deviation, 1.0)
    return x, x[training].mean(axis=axes, dtype=np.float64).astype(np.float32), factor.astype(np.float32), encoder
