"""The numbers of a classification."""

from dataclasses import dataclass

import numpy as np

from priory.evaluate import ClassRows
from priory.metrics import NUM_BINS, calibration_errors, class_scores, confidence_bins, curve_of
from priory.uncertainty import conformal
from priory.uncertainty.answers import Answers, Examples
from priory.uncertainty.bootstrap import Units, bootstrap, units_of
from priory.uncertainty.parts import by_client, by_size, client_table, covered, histogram, mean_figures, spread_of
from priory.uncertainty.scores import Binned, Order, brier_parts, classwise_ece, equal_mass_bins
from priory.uncertainty.tables import ClassPart, Curve, Metric, Rejection, Sets

KEPT = np.arange(20, 0, -1) / 20
OF_CLIENTS = ("accuracy", "nll", "brier", "entropy", "aleatoric", "epistemic")


@dataclass(frozen=True, eq=False)
class Read:
    """Rows with what follows from them.

    Attributes:
        probs: (examples, classes).
        hit: Whether the label is each class, likewise.
        columns: Quantities whose means are scores, (examples,) each.
    """

    probs: np.ndarray
    hit: np.ndarray
    columns: dict[str, np.ndarray]

    @classmethod
    def of(cls, examples: Examples) -> "Read":
        """What the rows and the labels say."""
        rows, y = examples.rows, examples.y
        assert isinstance(rows, ClassRows)
        log_probs = np.asarray(rows.log_probs)
        columns = class_scores(log_probs, y)
        columns["sharpness"], columns["entropy"] = columns.pop("confidence"), examples.total
        columns |= {"aleatoric": np.asarray(rows.aleatoric), "epistemic": np.asarray(rows.epistemic)}
        return cls(np.exp(log_probs), np.arange(log_probs.shape[1]) == y[:, None], columns)


def class_part(answers: Answers, level: float, replicates: int, top: float, missing: str | None) -> ClassPart:
    """The numbers of one kind of model.

    Args:
        top: Upper end of the histogram of epistemic uncertainty.
        missing: Why there can be no prediction sets, where that is known.
    """
    test, num = answers.test, len(answers.clients)
    read = Read.of(test)
    columns, units = read.columns, units_of(test.client)
    own = _curve_sums(read, Units(test.client, num)).each()
    clients = by_client({name: columns[name] for name in OF_CLIENTS}, test.client, num)
    clients["ece"] = np.array([calibration_errors(curve_of(sums))[0] for sums in own])
    sets, found, missing = _sets(answers, read, level, replicates, missing)
    return ClassPart(
        pooled=_pooled(read, units, replicates),
        spread=spread_of({name: clients[name] for name in ("accuracy", "nll", "brier", "ece", "entropy", "epistemic")}),
        clients=client_table(answers, clients, found),
        by_size=by_size(answers.train, test.client, lambda mask: _scores(read, test.client, mask, replicates)),
        reliability=_curves(answers.clients, own, clients["accuracy"]),
        rejection=Rejection(KEPT, Order.by(columns["entropy"]).accuracy(columns["accuracy"], KEPT)),
        epistemic=histogram(columns["epistemic"], top),
        entropy=histogram(columns["entropy"], np.log(read.probs.shape[1])),
        sets=sets,
        sets_missing=missing,
    )


def _pooled(read: Read, units: Units, replicates: int) -> dict[str, Metric]:
    columns, correct = read.columns, read.columns["accuracy"]
    means = mean_figures(columns, units)
    plain = _curve_sums(read, units)
    mass = Binned.of(units, equal_mass_bins(columns["sharpness"]), _curve_columns(read), (NUM_BINS,))
    classwise = _classwise_sums(read, units)
    order = Order.by(columns["entropy"])

    def figures(weights: np.ndarray) -> dict[str, float]:
        ece, mce = calibration_errors(curve_of(plain.total(weights)))
        by_class = classwise.total(weights)
        reliability, resolution, uncertainty = brier_parts(by_class)
        return means(weights) | {
            "ece": ece,
            "mce": mce,
            "ece_mass": calibration_errors(curve_of(mass.total(weights)))[0],
            "ece_classwise": classwise_ece(by_class),
            "brier_reliability": reliability,
            "brier_resolution": resolution,
            "brier_uncertainty": uncertainty,
            "rejection_area": order.area(correct, weights[units.of]),
        }

    return bootstrap(figures, units.num, replicates)


def _scores(read: Read, client: np.ndarray, mask: np.ndarray, replicates: int) -> dict[str, Metric]:
    """Accuracy, NLL, ECE and epistemic uncertainty of the examples under a mask."""
    some = Read(read.probs[mask], read.hit[mask], {name: values[mask] for name, values in read.columns.items()})
    units = units_of(client[mask])
    means = mean_figures({name: some.columns[name] for name in ("accuracy", "nll", "epistemic")}, units)
    plain = _curve_sums(some, units)

    def figures(weights: np.ndarray) -> dict[str, float]:
        return means(weights) | {"ece": calibration_errors(curve_of(plain.total(weights)))[0]}

    return bootstrap(figures, units.num, replicates)


def _curve_columns(read: Read) -> list[np.ndarray]:
    confidence = read.columns["sharpness"]
    return [np.ones_like(confidence), confidence, read.columns["accuracy"]]


def _curve_sums(read: Read, units: Units) -> Binned:
    return Binned.of(units, confidence_bins(read.columns["sharpness"]), _curve_columns(read), (NUM_BINS,))


def _classwise_sums(read: Read, units: Units) -> Binned:
    """Sums of 1, p, o, p², p·o for each class and each bin of p."""
    probs, hit = read.probs, read.hit
    bins = NUM_BINS * np.arange(probs.shape[1]) + confidence_bins(probs)
    columns = [np.ones_like(probs), probs, hit, probs**2, probs * hit]
    return Binned.of(units, bins, columns, (probs.shape[1], NUM_BINS))


def _curves(names: tuple[str, ...], own: np.ndarray, accuracy: np.ndarray) -> dict[str, Curve]:
    """The curve of all clients together, and of those of the best, the median and the worst accuracy."""
    ranked = np.argsort(accuracy, kind="stable")[: int(np.sum(~np.isnan(accuracy)))]  # NaN comes last
    chosen = {"best": ranked[-1], "median": ranked[(len(ranked) - 1) // 2], "worst": ranked[0]}
    curves = {"pooled": _curve(own.sum(axis=0), None)}
    return curves | {name: _curve(own[one], names[one]) for name, one in chosen.items()}


def _curve(sums: np.ndarray, client: str | None) -> Curve:
    count, confidence, accuracy = curve_of(sums).T
    return Curve(count, confidence, accuracy, client)


def _sets(
    answers: Answers, read: Read, level: float, replicates: int, missing: str | None
) -> tuple[Sets | None, dict[str, np.ndarray], str | None]:
    """Return prediction sets, their coverage and size by client, and why there are none."""
    found = conformal.calibrated(answers, missing)
    if isinstance(found, str):
        return None, {}, found
    held, labels = Read.of(found.validation).probs, found.validation.y
    inside = np.zeros_like(read.hit)
    for client in found.clients:
        here, there = answers.test.of(client), found.validation.of(client)
        inside[here] = conformal.sets(read.probs[here], held[there], labels[there], level)
    columns = {"set_coverage": np.sum(inside & read.hit, axis=1) * 1.0, "set_size": inside.sum(axis=1) * 1.0}
    (coverage, size), clients = covered(answers, columns, found.test, replicates)
    return Sets(coverage=coverage, size=size, **found.described(level)), clients, None
