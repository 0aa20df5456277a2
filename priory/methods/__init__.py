"""The registry: a name for every method. Registering a method holds it to all the laws of the contract test."""

import difflib
from typing import Any

from priory.core.errors import UsageError
from priory.fed.method import Method
from priory.methods.apfl import APFL
from priory.methods.cfedbayes import CFedBayes
from priory.methods.ditto import Ditto
from priory.methods.ensemble import Ensemble
from priory.methods.fedadam import FedAdam
from priory.methods.fedavg import FedAvg
from priory.methods.fedbabu import FedBABU
from priory.methods.fedbe import FedBE
from priory.methods.fedbnn import FedBNN
from priory.methods.fedem import FedEM
from priory.methods.fedhb_mixture import FedHBMixture
from priory.methods.fedhb_niw import FedHBNIW
from priory.methods.fedpa import FedPA
from priory.methods.fedpop import FedPop
from priory.methods.fedprox import FedProx
from priory.methods.fedrep import FedRep
from priory.methods.fedvi import FedVI
from priory.methods.fedyogi import FedYogi
from priory.methods.fesem import FeSEM
from priory.methods.ifca import IFCA
from priory.methods.knn_per import KNNPer
from priory.methods.lg_fedavg import LGFedAvg
from priory.methods.local import Local
from priory.methods.per_fedavg import PerFedAvg
from priory.methods.pfedbayes import PFedBayes
from priory.methods.pfedme import PFedMe
from priory.methods.pooled import Pooled
from priory.methods.preset import Preset
from priory.methods.scaffold import Scaffold
from priory.methods.sfedbayes import SFedBayes

REGISTRY: dict[str, type[Any]] = {
    "local": Local,
    "pooled": Pooled,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedbabu": FedBABU,
    "fedrep": FedRep,
    "ditto": Ditto,
    "pfedme": PFedMe,
    "per-fedavg": PerFedAvg,
    "scaffold": Scaffold,
    "apfl": APFL,
    "lg-fedavg": LGFedAvg,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedpa": FedPA,
    "fedem": FedEM,
    "ifca": IFCA,
    "fesem": FeSEM,
    "preset": Preset,
    "ensemble": Ensemble,
    "fedbe": FedBE,
    "knn-per": KNNPer,
    "fedhb-niw": FedHBNIW,
    "fedhb-mixture": FedHBMixture,
    "pfedbayes": PFedBayes,
    "sfedbayes": SFedBayes,
    "cfedbayes": CFedBayes,
    "fedpop": FedPop,
    "fedvi": FedVI,
    "fedbnn": FedBNN,
}


def get(name: str) -> type[Any]:
    """The method class of that name."""
    if name in REGISTRY:
        return REGISTRY[name]
    close = difflib.get_close_matches(name, REGISTRY, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(REGISTRY)}."
    raise UsageError(f"method={name!r} is not registered; {hint}")


def is_registered(method: Method) -> bool:
    """Whether a name alone gives this method's class back."""
    return type(method) in REGISTRY.values()


def name_of(method: Method) -> str:
    """The registered name of a method, or its class name in small letters for one that is not."""
    cls = method if isinstance(method, type) else type(method)
    return next((name for name, known in REGISTRY.items() if known is cls), cls.__name__.lower())
