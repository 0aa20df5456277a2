"""The numbers of a regression."""

import numpy as np

from priory.evaluate import LEVELS, TargetRows
from priory.metrics import target_scores
from priory.uncertainty import conformal
from priory.uncertainty.answers import Answers, Examples
from priory.uncertainty.bootstrap import bootstrap, units_of
from priory.uncertainty.parts import by_client, by_size, client_table, covered, histogram, mean_figures, spread_of
from priory.uncertainty.scores import interval_score
from priory.uncertainty.tables import Coverage, Intervals, Metric, TargetPart

OF_CLIENTS = ("squared_error", "nll", "coverage_90", "sharpness", "aleatoric", "epistemic")
OF_GROUPS = ("squared_error", "nll", "coverage_90", "epistemic")


def columns_of(examples: Examples) -> dict[str, np.ndarray]:
    """Quantities whose means are scores, (examples,) each; that of the squared error is the square of one."""
    rows, y = examples.rows, examples.y
    assert isinstance(rows, TargetRows)
    low, high = np.asarray(rows.low), np.asarray(rows.high)
    ninety = LEVELS.index(0.9)
    return {
        **target_scores(y, np.asarray(rows.mean), np.asarray(rows.cdf), LEVELS),
        "nll": np.asarray(rows.nll),
        "sharpness": examples.total,
        "aleatoric": np.asarray(rows.aleatoric),
        "epistemic": np.asarray(rows.epistemic),
        "interval_score_90": interval_score(y, low[:, ninety], high[:, ninety], 0.9),
    }


def target_part(answers: Answers, level: float, replicates: int, top: float, missing: str | None) -> TargetPart:
    """Return the numbers of one kind of model; arguments as for `class_part`."""
    test = answers.test
    columns = columns_of(test)
    pooled = _scores(columns, test.client, replicates)
    clients = by_client({name: columns[name] for name in OF_CLIENTS}, test.client, len(answers.clients))
    clients = {"rmse": np.sqrt(clients.pop("squared_error")), **clients}
    intervals, found, missing = _intervals(answers, level, replicates, missing)
    reached = [pooled[f"coverage_{round(100 * one)}"] for one in LEVELS]

    def scores(mask: np.ndarray) -> dict[str, Metric]:
        return _scores({name: columns[name][mask] for name in OF_GROUPS}, test.client[mask], replicates)

    return TargetPart(
        pooled=pooled,
        spread=spread_of({name: clients[name] for name in ("rmse", "nll", "coverage_90", "epistemic")}),
        clients=client_table(answers, clients, found),
        by_size=by_size(answers.train, test.client, scores),
        coverage=Coverage(
            level=np.array(LEVELS),
            reached=np.array([one.value for one in reached]),
            standard_error=np.array([one.standard_error for one in reached]),
        ),
        epistemic=histogram(columns["epistemic"], top),
        intervals=intervals,
        intervals_missing=missing,
    )


def _scores(columns: dict[str, np.ndarray], client: np.ndarray, replicates: int) -> dict[str, Metric]:
    """Return the means of the columns, with the root of the mean squared error in its place."""
    units = units_of(client)
    means = mean_figures(columns, units)

    def figures(weights: np.ndarray) -> dict[str, float]:
        found = means(weights)
        return {"rmse": float(np.sqrt(found.pop("squared_error"))), **found}

    return bootstrap(figures, units.num, replicates)


def _intervals(
    answers: Answers, level: float, replicates: int, missing: str | None
) -> tuple[Intervals | None, dict[str, np.ndarray], str | None]:
    """Return conformal intervals, their coverage and width by client, and why there are none."""
    test, found = answers.test, conformal.calibrated(answers, missing)
    if isinstance(found, str):
        return None, {}, found
    (mean, sd), (centre, spread) = _mean_and_sd(test), _mean_and_sd(found.validation)
    low, high = np.full((2, len(mean)), np.nan)
    for client in found.clients:
        here, there = test.of(client), found.validation.of(client)
        calibration = (found.validation.y[there], centre[there], spread[there])
        low[here], high[here] = conformal.intervals(mean[here], sd[here], calibration, level)
    columns = {"interval_coverage": ((low <= test.y) & (test.y <= high)) * 1.0, "interval_width": high - low}
    (coverage, width), clients = covered(answers, columns, found.test, replicates)
    return Intervals(coverage=coverage, width=width, **found.described(level)), clients, None


def _mean_and_sd(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    assert isinstance(examples.rows, TargetRows)
    return np.asarray(examples.rows.mean), examples.total
