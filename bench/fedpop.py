"""FedPop beside FedRep and FedAvg on the problems of its paper's section 5; prints docs' tables.

    PRIORY_DATA=... python bench/fedpop.py                 runs what is missing, then prints
    PRIORY_DATA=... python bench/fedpop.py --estimate      only says what is missing and how long it would take
    PRIORY_DATA=... python bench/fedpop.py --only methods  one table

methods, states   y = x·(φ z_k) + N(0, 0.1), φ in R^{20x2}; of 100 clients 90 have 5 examples and 10 have 10 (figure 2)
images            CIFAR-10, 100 clients with 5 classes, a share of them with 5 or 10 images and the rest 25 (figure 3)
strangers         MNIST, 100 clients with 5 classes; then Fashion-MNIST is shown (figure 4)
coverage          y = z_k + N(0, 1), z_k ~ N(μ, ½²), 2 examples a client: do 90 % intervals cover z_k where (μ, σ) are
                  learned, at their most likely values or averaged over?

Seed s is that of the problem, of the split and of the run, so methods are paired within a seed. Settings were chosen on
seed 100, images' and strangers' on its validation rows. Every finished cell is a JSON file of its own with the command
that makes it again.
"""

import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

import numpy as np  # noqa: E402
from cells import SHOWN, Column  # noqa: E402
from sklearn.metrics import roc_auc_score  # noqa: E402
from tables import Table, main  # noqa: E402

import priory  # noqa: E402
from priory.fed.method import AdviceWarning  # noqa: E402

CELLS = Path(__file__).parents[1] / "docs" / "methods" / "fedpop"
STRANGERS = 500  # images of Fashion-MNIST that every client is shown


def distances(run: Any) -> dict[str, float]:
    """Sine of the largest principal angle between estimated and true representation, and mean ‖φz_k − its estimate‖.

    A personal model is linear here, so its predictions at the unit vectors are its estimate of φz_k.
    """
    truth = run.federation.truth
    weights = run.server.phi if hasattr(run.server, "phi") else run.server.weights
    basis = np.linalg.qr(np.asarray(weights["Dense_0"]["kernel"]))[0]
    true_basis = np.linalg.qr(truth["representation"][0])[0]
    angle = np.linalg.norm(true_basis - basis @ (basis.T @ true_basis), 2)
    units = np.eye(len(basis), dtype=np.float32)
    found = np.stack([run.predict(k, units, scale=1.0).mean for k in range(run.federation.num_clients)])
    return {"angle": float(angle), "error": float(np.linalg.norm(found - truth["weights"], axis=1).mean())}


def told_apart(run: Any) -> dict[str, float]:
    """How well the entropy of a client's predictions tells Fashion-MNIST from its own test images: area under the ROC.

    The mean over clients and the least of them; as one test image can be in many clients' parts they are not
    independent.
    """
    strangers = _strangers()
    areas = []
    for client in range(run.federation.num_clients):
        own = run.federation.x[run.federation.rows(client, "test")]
        scores = _entropy(run.predict(client, np.concatenate([own, strangers])).probabilities)
        areas.append(roc_auc_score(np.arange(len(scores)) >= len(own), scores))
    return {"auroc": float(np.mean(areas)), "worst_auroc": float(np.min(areas))}


def covered(run: Any) -> dict[str, float]:
    """The share of the clients whose true effect lies in its 90 % interval."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdviceWarning)  # of short chains; the tables say how many draws there are
        found = run.effects(level=0.9)
    truth = run.federation.truth["weights"][: len(found.low)]
    return {
        "coverage": float(np.mean((found.low < truth) & (truth < found.high))),
        "sigma": float(found.population.sd.mean()),
    }


@cache
def _strangers() -> np.ndarray:
    """Some of Fashion-MNIST's test images."""
    federation = priory.data.load("fashion_mnist").partition("iid", clients=1, seed=0)
    return federation.x[federation.rows(0, "test")][:STRANGERS]


def _entropy(probabilities: np.ndarray) -> np.ndarray:
    return -np.sum(probabilities * np.log(np.maximum(probabilities, 1e-12)), axis=-1)


DISTANCES = {
    "principal angle": Column(("measured", "angle"), 1, 3),
    "error of φz": Column(("measured", "error"), 1, 3),
    "personal RMSE": Column(("personal", "rmse"), 1, 3),
}
PERSONAL = {name: column for name, column in SHOWN.items() if column.path[0] == "personal"}
AREAS = {
    "AUROC": Column(("measured", "auroc"), 1, 3),
    "worst client's AUROC": Column(("measured", "worst_auroc"), 1, 3),
}
COVERAGE = {
    "clients covered, %": Column(("measured", "coverage"), 100, 1),
    "σ": Column(("measured", "sigma"), 1, 3),
}
COSINE = ("step-size=cosine", "prior-step-size=cosine")
SYNTHETIC: dict[str, Any] = {
    "data": "synthetic:representation:seed={seed}",
    "partition": {"spec": "natural", "sizes": "0.9=5,0.1=10"},
    "columns": DISTANCES,
    "seeds": (0, 1, 2, 3, 4),
    "seconds": 5,
    "measure": distances,
    "files": "synthetic",
}
FEDREP = "fedrep:step-size=0.003,finetune-step-size=0.003,batch-size=10"
ON_SYNTHETIC = "fedpop:step-size=0.01,prior-step-size=0.01"
IMAGES = {"fedrep": "fedrep:step-size=0.03,batch-size=10", "fedpop": "fedpop:step-size=0.001,prior-sd=0.1"}
TABLES = {
    "methods": Table(
        settings={"rounds": 1000, "model": "factor:2"},
        rows={
            "fedavg": "fedavg:step-size=0.003,batch-size=10",
            "fedrep": FEDREP,
            "fedrep-1": f"{FEDREP},head-epochs=1",
            "fedpop": ON_SYNTHETIC,
            "fedpop-mala": f"{ON_SYNTHETIC},kernel=mala",
        },
        own={row: {"schedule": COSINE} for row in ("fedpop", "fedpop-mala")},
        **SYNTHETIC,
    ),
    "states": Table(
        settings={"rounds": 300, "model": "factor:2", "schedule": COSINE},
        rows={
            f"{name}-{steps}": f"{ON_SYNTHETIC},kernel=mala,stateful={kept},steps={steps},burn-in={steps // 2}"
            for steps in (1, 2, 5, 10, 50)
            for name, kept in (("stateless", False), ("stateful", True))
        },
        **SYNTHETIC,
    ),
    **{
        f"images-{share}-{few}": Table(
            data="cifar10",
            partition={"spec": "classes:5", "clients": 100, "sizes": f"{share}={few},{1 - share:.1f}=25"},
            settings={"rounds": 100, "cohort": 10, "model": "cnn:16,32"},
            rows=IMAGES,
            columns=PERSONAL,
        )
        for few in (5, 10)
        for share in (0.1, 0.5, 0.9)
    },
    "strangers": Table(
        data="mnist",
        partition={"spec": "classes:5", "clients": 100},
        settings={"rounds": 300, "cohort": 10, "model": "mlp:256,64"},
        rows={
            "fedrep-100": "fedrep:step-size=0.1,batch-size=10",  # 100 rounds of it take the time of FedPop's 300
            "fedrep": "fedrep:step-size=0.1,batch-size=10",
            "fedpop": "fedpop:step-size=0.003,prior-sd=0.1",
        },
        own={"fedrep-100": {"rounds": 100}},
        columns=PERSONAL | AREAS,
        measure=told_apart,
    ),
    **{
        f"coverage-{clients}": Table(
            data=f"synthetic:quadratic:clients={clients},examples=2,tau=0.5,seed={{seed}}",
            partition={"spec": "natural", "test": 0.0},
            settings={"rounds": 500, "model": "intercept"},
            rows={
                "maximised": "fedpop:kernel=mala,score=mixed,prior-step-size=0.03,samples=500,thin=5",
                "averaged": "fedpop:kernel=mala,prior-draws=500",
            },
            columns=COVERAGE,
            seeds=tuple(range(10)),
            seconds=5,
            measure=covered,
        )
        for clients in (8, 40, 200)
    },
}


if __name__ == "__main__":
    main(TABLES, CELLS, __doc__)
