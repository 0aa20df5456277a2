"""Compiled rounds and what runs them: `simulate`, `resume`, `load`."""

from priory.engine.run import Elbo, PersonalModel, Prediction, Run
from priory.engine.session import Listener
from priory.engine.settings import Settings
from priory.engine.simulate import load, resume, simulate

__all__ = ["Elbo", "Listener", "PersonalModel", "Prediction", "Run", "Settings", "load", "resume", "simulate"]
