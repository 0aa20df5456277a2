"""The public names of `priory`, imported at the first use of any of them: those that do not begin with `_`.

A type checker takes a name as public only if it is imported `as` itself, or with all others of its module.
"""

from priory import data as data
from priory.core.errors import UsageError as UsageError
from priory.engine import Elbo as Elbo
from priory.engine import Listener as Listener
from priory.engine import PersonalModel as PersonalModel
from priory.engine import Prediction as Prediction
from priory.engine import Run as Run
from priory.engine import Settings as Settings
from priory.engine import load as load
from priory.engine import load_model as load_model
from priory.engine import resume as resume
from priory.engine import save_model as save_model
from priory.engine import simulate as simulate
from priory.fed.local import Optimiser as Optimiser
from priory.fed.local import Work as Work
from priory.methods._builtin import *  # noqa: F403
