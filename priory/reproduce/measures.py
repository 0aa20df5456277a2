"""Figures of a finished run that no summary has, by the name that a definition gives."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from functools import cache

import numpy as np
import scipy

from priory import data
from priory.bayes import spike_slab
from priory.core.errors import UsageError
from priory.engine.evaluator import summarised
from priory.engine.run import Run
from priory.fed import schedule
from priory.fed.capabilities import AdviceWarning
from priory.metrics import Scores
from priory.stats import standard_error

STRANGERS = 500  # images of Fashion-MNIST that every client is shown


def of(name: str, run: Run) -> dict[str, float]:
    """The figures that the measure of that name takes of a run."""
    if name not in MEASURES:
        raise UsageError(f"measure={name!r} is unknown; choose from {', '.join(MEASURES)}.")
    return MEASURES[name](run)


def distances(run: Run) -> dict[str, float]:
    """Sine of the largest principal angle between estimated and true representation, and mean ‖φz_k − its estimate‖.

    A personal model is linear here, so its predictions at the unit vectors are its estimate of φz_k.
    """
    truth = run.federation.truth
    weights = run.server.phi if hasattr(run.server, "phi") else run.server.weights
    basis = np.linalg.qr(np.asarray(weights["Dense_0"]["kernel"]))[0]
    true_basis = np.linalg.qr(truth["representation"][0])[0]
    angle = np.linalg.norm(true_basis - basis @ (basis.T @ true_basis), 2)
    units = np.eye(len(basis), dtype=np.float32)
    found = np.stack([np.asarray(run.predict(k, units, scale=1.0).mean) for k in range(run.federation.num_clients)])
    return {"angle": float(angle), "error": float(np.linalg.norm(found - truth["weights"], axis=1).mean())}


def told_apart(run: Run) -> dict[str, float]:
    """How well the entropy of a client's predictions tells Fashion-MNIST from its own test images: area under the ROC.

    The mean over clients and the least of them; as one test image can be in many clients' parts they are not
    independent.
    """
    from sklearn.metrics import roc_auc_score

    strangers = _strangers()
    areas = []
    for client in range(run.federation.num_clients):
        own = run.federation.x[run.federation.rows(client, "test")]
        probabilities = np.asarray(run.predict(client, np.concatenate([own, strangers])).probabilities)
        scores = -np.sum(probabilities * np.log(np.maximum(probabilities, 1e-12)), axis=-1)
        areas.append(roc_auc_score(np.arange(len(scores)) >= len(own), scores))
    return {"auroc": float(np.mean(areas)), "worst_auroc": float(np.min(areas))}


def covered(run: Run) -> dict[str, float]:
    """The share of the clients whose true effect lies in its 90 % interval, and the same of exact full Bayes.

    Exact are the posteriors of a random intercept under the prior of `prior_draws`, flat in μ and in σ.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdviceWarning)  # of short chains; the tables say how many draws there are
        found = run.effects(level=0.9)
    federation = run.federation
    truth = federation.truth["weights"][: len(found.low)]
    assert federation.scale is not None
    means, variances = np.zeros((2, len(truth)))
    for client in range(len(truth)):
        rows = federation.rows(client, "train")
        precision = np.float64(federation.scale[rows]) ** -2
        means[client], variances[client] = np.average(federation.y[rows], weights=precision), 1 / precision.sum()
    below, sigma = exact_effects(means, variances, truth.ravel())
    return {
        "coverage": float(np.mean((found.low < truth) & (truth < found.high))),
        "sigma": float(found.population.sd.mean()),
        "exact_coverage": float(np.mean((below > 0.05) & (below < 0.95))),
        "exact_sigma": sigma,
    }


def exact_effects(means: np.ndarray, variances: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, float]:
    """P(z_k < at_k | all data) of every client and E(σ | all data), where ȳ_k ~ N(z_k, v_k) and z_k ~ N(μ, σ²).

    The prior is flat in μ, which is integrated out, and in σ, which is summed over a grid of equal steps of log σ.
    """
    sigma = np.geomspace(1e-3, 1e6, 4001)  # between the bounds that fedpop's draws have
    total = np.square(sigma)[:, None] + variances  # of ȳ_k, given μ and σ
    precision = np.sum(1 / total, axis=1)
    mu = np.sum(means / total, axis=1) / precision
    misfit = np.sum(np.log(total) + np.square(means - mu[:, None]) / total, axis=1) + np.log(precision)
    log_weight = np.log(sigma) - misfit / 2  # the first is dσ/d log σ
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    own = np.square(sigma)[:, None] / total  # the share of a client's own mean in its estimate
    centre = own * means + (1 - own) * mu[:, None]
    width = np.sqrt(own * variances + np.square(1 - own) / precision[:, None])
    return weight @ scipy.special.ndtr((at - centre) / width), float(weight @ sigma)


def density(run: Run) -> dict[str, float]:
    """The mean probability that a weight is not zero, of the clients' posteriors in the last round and of the prior."""
    prior = spike_slab.of(run.server.weights)
    return {"personal": run.history[-1]["info"]["density"], "global": float(spike_slab.density(prior))}


def without_labels(run: Run) -> dict[str, float]:
    """What a method has for clients whose labels it does not read, and how participants are served against newcomers.

    That is the posterior from inputs alone, or else the global model. The gap is of mean accuracies over clients.
    """
    inside, outside = run.population, run.newcomers_global
    if run.newcomers_unlabelled is not None:
        ready = run.evaluator.ready
        inputs = dataclasses.replace(ready.inputs, method=schedule.put(run.method, ("refine_epochs",), 0))
        plain = dataclasses.replace(run.evaluator, ready=dataclasses.replace(ready, inputs=inputs))
        total = plain.tallies(np.arange(run.federation.num_clients), onboard_visits=0)
        inside, outside = summarised(total.unlabelled), run.newcomers_unlabelled
    if not isinstance(inside, Scores) or not isinstance(outside, Scores):
        return {}
    ours, theirs = (each.per_client["accuracy"][np.isfinite(each.per_client["accuracy"])] for each in (inside, outside))
    errors = [standard_error(one.tolist()) for one in (ours, theirs)]
    return {
        "participating_no_labels": float(inside.accuracy),
        "newcomers_no_labels": float(outside.accuracy),
        "gap": float(ours.mean() - theirs.mean()),
        "gap_error": math.hypot(*(math.nan if error is None else error for error in errors)),
    }


@cache
def _strangers() -> np.ndarray:
    """Some of Fashion-MNIST's test images."""
    federation = data.load("fashion_mnist").partition("iid", clients=1, seed=0)
    return federation.x[federation.rows(0, "test")][:STRANGERS]


MEASURES: dict[str, Callable[[Run], dict[str, float]]] = {
    "distances": distances,
    "told-apart": told_apart,
    "covered": covered,
    "density": density,
    "without-labels": without_labels,
}
