"""The methods of Priory, one line each, in the order of `priory methods`.

A method is registered by its line here: its name is that of its file, with `-` for `_`, and `priory` has its class. The
contract test then holds it to all laws.
"""

# ruff: noqa: I001

from priory.methods.local import Local as Local
from priory.methods.pooled import Pooled as Pooled
from priory.methods.fedavg import FedAvg as FedAvg
from priory.methods.fedprox import FedProx as FedProx
from priory.methods.fedbabu import FedBABU as FedBABU
from priory.methods.fedrep import FedRep as FedRep
from priory.methods.ditto import Ditto as Ditto
from priory.methods.pfedme import PFedMe as PFedMe
from priory.methods.per_fedavg import PerFedAvg as PerFedAvg
from priory.methods.scaffold import Scaffold as Scaffold
from priory.methods.apfl import APFL as APFL
from priory.methods.lg_fedavg import LGFedAvg as LGFedAvg
from priory.methods.fedopt import FedOpt as FedOpt
from priory.methods.fedpa import FedPA as FedPA
from priory.methods.fedem import FedEM as FedEM
from priory.methods.ifca import IFCA as IFCA
from priory.methods.fesem import FeSEM as FeSEM
from priory.methods.random_groups import RandomGroups as RandomGroups
from priory.methods.fedbe import FedBE as FedBE
from priory.methods.knn_per import KNNPer as KNNPer
from priory.methods.fedhb_niw import FedHBNIW as FedHBNIW
from priory.methods.fedhb_mixture import FedHBMixture as FedHBMixture
from priory.methods.pfedbayes import PFedBayes as PFedBayes
from priory.methods.sfedbayes import SFedBayes as SFedBayes
from priory.methods.cfedbayes import CFedBayes as CFedBayes
from priory.methods.fedpop import FedPop as FedPop
from priory.methods.fedvi import FedVI as FedVI
from priory.methods.fedbnn import FedBNN as FedBNN
