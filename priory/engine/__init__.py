"""Compiled rounds and what runs them: `simulate`, `check`, `resume`, `load`."""

from priory.engine.export import load_model, save_model
from priory.engine.personal import PersonalModel
from priory.engine.prediction import Prediction
from priory.engine.run import Elbo, Run
from priory.engine.runner import Listener
from priory.engine.settings import Settings
from priory.engine.simulate import check, load, resume, simulate

__all__ = [
    "Elbo",
    "Listener",
    "PersonalModel",
    "Prediction",
    "Run",
    "Settings",
    "check",
    "load",
    "load_model",
    "resume",
    "save_model",
    "simulate",
]
