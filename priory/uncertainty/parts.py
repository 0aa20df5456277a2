"""What classification and regression have in common: means by client, groups by size, histograms, foreign inputs."""

from collections.abc import Callable, Sequence

import numpy as np

from priory.metrics import Spread, spread_over
from priory.uncertainty.answers import Answers, ForeignInputs
from priory.uncertainty.bootstrap import Units, bootstrap, units_of
from priory.uncertainty.scores import accepted, placement
from priory.uncertainty.tables import Band, Foreign, Histogram, Metric

NUM_GROUPS = 4
NUM_BARS = 30
UP = frozenset({"accuracy", "coverage_90"})  # scores that are better when they are higher

Doubts = tuple[np.ndarray, np.ndarray]  # all of the uncertainty and its epistemic part, of each example


def by_client(columns: dict[str, np.ndarray], client: np.ndarray, num: int) -> dict[str, np.ndarray]:
    """The mean of each column over the examples of each of `num` clients, NaN for one without."""
    count = np.bincount(client, minlength=num)
    with np.errstate(invalid="ignore"):
        return {name: np.bincount(client, values, num) / count for name, values in columns.items()}


def client_table(answers: Answers, *columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the columns of each client behind its name and its training and test examples."""
    test = np.bincount(answers.test.client, minlength=len(answers.clients))
    table = {"client": np.array(answers.clients), "train": answers.train, "test": test}
    return {name: values for some in (table, *columns) for name, values in some.items()}


def covered(
    answers: Answers, columns: dict[str, np.ndarray], rows: np.ndarray, replicates: int
) -> tuple[list[Metric], dict[str, np.ndarray]]:
    """Return the mean of each column over the test rows under a mask where it is finite, and that of each client."""
    client, pooled = answers.test.client, []
    for values in columns.values():
        mask = rows & np.isfinite(values)
        units = units_of(client[mask])
        means = mean_figures({"mean": values[mask]}, units)
        pooled.append(bootstrap(means, units.num, replicates)["mean"] if mask.any() else Metric(np.nan, np.nan))
    some = {name: values[rows] for name, values in columns.items()}
    return pooled, by_client(some, client[rows], len(answers.clients))


def mean_figures(columns: dict[str, np.ndarray], units: Units) -> Callable[[np.ndarray], dict[str, float]]:
    """Return the function from the weights of the units to the mean of each column."""
    count = np.bincount(units.of, minlength=units.num).astype(float)
    sums = np.stack([np.bincount(units.of, values, units.num) for values in columns.values()], axis=1)

    def figures(weights: np.ndarray) -> dict[str, float]:
        means = (weights @ sums) / (weights @ count)
        return dict(zip(columns, means.tolist(), strict=True))

    return figures


def spread_of(columns: dict[str, np.ndarray]) -> dict[str, Spread]:
    """How each column differs between the clients, those without test examples left out."""
    return {
        name: spread_over(values[~np.isnan(values)], higher_is_better=name in UP)
        if not np.isnan(values).all()
        else Spread(np.nan, np.nan, np.nan)
        for name, values in columns.items()
    }


def by_size(
    train: np.ndarray, client: np.ndarray, score: Callable[[np.ndarray], dict[str, Metric]]
) -> tuple[Band, ...]:
    """Scores of at most four groups of about equally many clients by training examples; equals are together.

    Args:
        train: Training examples of each client.
        client: Client of each test example.
        score: Gives the scores of the examples under a mask.
    """
    present = np.unique(client)
    size = train[present]
    edges = np.quantile(size, np.arange(1, NUM_GROUPS) / NUM_GROUPS, method="inverted_cdf")
    group = np.searchsorted(edges, size, side="left")
    bands = []
    for number in np.unique(group):
        members = present[group == number]
        mask = np.isin(client, members)
        least, most = int(train[members].min()), int(train[members].max())
        bands.append(Band(least, most, len(members), int(mask.sum()), score(mask)))
    return tuple(bands)


def histogram(values: np.ndarray, top: float) -> Histogram:
    """Finite values in 30 bars from 0 to `top`; what rounding puts above it is in the last."""
    count, edges = np.histogram(np.clip(values[np.isfinite(values)], 0.0, top), bins=NUM_BARS, range=(0.0, top))
    return Histogram(edges, count)


def top_of(values: Sequence[np.ndarray], otherwise: float) -> float:
    """The largest finite value of all, or the other where there is none above 0."""
    most = max((float(some[np.isfinite(some)].max(initial=0.0)) for some in values), default=0.0)
    return most if most > 0 else otherwise


def foreign_of(
    answers: Answers, own: Doubts, inputs: ForeignInputs, tops: tuple[float, float], replicates: int
) -> Foreign:
    """How well each personal model tells foreign inputs from its client's test inputs.

    Args:
        own: Of the test examples.
        tops: Upper ends of the two histograms.
        replicates: Of the bootstrap; foreign inputs are not resampled.
    """
    assert answers.foreign is not None
    client, units = answers.test.client, units_of(answers.test.client)
    present = np.unique(client)
    columns = {"auroc": np.zeros(len(client)), "fpr95": np.zeros(len(client)), "auroc_epistemic": np.zeros(len(client))}
    for one in present:
        here, (both, epistemic) = answers.test.of(one), answers.foreign[one].astype(np.float64)
        columns["auroc"][here] = placement(own[0][here], both)
        columns["auroc_epistemic"][here] = placement(own[1][here], epistemic)
        columns["fpr95"][here] = accepted(own[0][here], both, np.ones(here.stop - here.start))
    means = mean_figures(columns, units)

    def figures(weights: np.ndarray) -> dict[str, float]:
        found = means(weights)
        if len(present) > 1:
            return found
        return found | {"fpr95": accepted(own[0], answers.foreign[present[0]][0].astype(np.float64), weights)}  # type: ignore[index]

    found = bootstrap(figures, units.num, replicates)
    both, epistemic = answers.foreign[present].astype(np.float64).swapaxes(0, 1)
    return Foreign(
        data=inputs.data,
        examples=len(inputs.x),
        checksum=inputs.checksum,
        **found,
        epistemic=histogram(epistemic, tops[1]),
        entropy=histogram(both, tops[0]),
    )
