"""The public names of `priory`, imported at the first use of any of them."""

from priory import data
from priory.core.errors import UsageError
from priory.engine import (
    Elbo,
    Listener,
    PersonalModel,
    Prediction,
    Run,
    Settings,
    load,
    load_model,
    resume,
    save_model,
    simulate,
)
from priory.fed.local import Optimiser, Work
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

__all__ = [
    "APFL",
    "IFCA",
    "CFedBayes",
    "Ditto",
    "Elbo",
    "Ensemble",
    "FeSEM",
    "FedAdam",
    "FedAvg",
    "FedBABU",
    "FedBE",
    "FedBNN",
    "FedEM",
    "FedHBMixture",
    "FedHBNIW",
    "FedPA",
    "FedPop",
    "FedProx",
    "FedRep",
    "FedVI",
    "FedYogi",
    "KNNPer",
    "LGFedAvg",
    "Listener",
    "Local",
    "Optimiser",
    "PFedBayes",
    "PFedMe",
    "PerFedAvg",
    "PersonalModel",
    "Pooled",
    "Prediction",
    "Preset",
    "Run",
    "SFedBayes",
    "Scaffold",
    "Settings",
    "UsageError",
    "Work",
    "data",
    "load",
    "load_model",
    "resume",
    "save_model",
    "simulate",
]
