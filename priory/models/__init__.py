"""Networks and likelihoods."""

from priory.models.likelihood import Categorical, Gaussian, Likelihood, WithScale
from priory.models.linen import Linen
from priory.models.model import Head, Model, Params, as_model, default, parse
from priory.models.nets import CNN, MLP, Factor, Intercept, Reddi

__all__ = [
    "CNN",
    "MLP",
    "Categorical",
    "Factor",
    "Gaussian",
    "Head",
    "Intercept",
    "Likelihood",
    "Linen",
    "Model",
    "Params",
    "Reddi",
    "WithScale",
    "as_model",
    "default",
    "parse",
]
