"""One client's personal model as a scikit-learn estimator.

`fit` makes a client that joins a finished run: it gets a posterior from the federation's prior and its own rows, and
the run stays as it is. Without a run the client learns alone, which is what the federation is to be compared with:

    cross_val_score(PersonalClassifier("runs/hospitals"), X, y)
    cross_val_score(PersonalClassifier(), X, y)

This module imports scikit-learn, so `import priory` does not import it.
"""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_is_fitted, validate_data

from priory.core.errors import UsageError
from priory.data import from_arrays
from priory.data.form import Form
from priory.engine import PersonalModel, Prediction, Run, load, simulate
from priory.methods.local import Local

__all__ = ["PersonalClassifier", "PersonalRegressor"]


class _Personal(BaseEstimator):
    """What classifier and regressor share.

    Attributes:
        run: The run that the client joins, or the path of its directory; None to learn alone.
        model: Network of a client that learns alone, by name.
        rounds: Passes over its rows of a client that learns alone.
        seed: Of a client that learns alone; a run has its own.
    """

    def __init__(
        self, run: Run | Path | str | None = None, *, model: str = "linear", rounds: int = 100, seed: int = 0
    ) -> None:
        self.run = run
        self.model = model
        self.rounds = rounds
        self.seed = seed

    @classmethod
    def from_model(cls, model: PersonalModel) -> Self:
        """Return the fitted estimator of a model: `run.client(name)`, `run.onboard(x, y)`, `load_model(path)`."""
        fitted = cls()
        fitted._keep(model)
        return fitted

    def _join(self, X: Any, y: Any) -> PersonalModel:
        """Return the model of a client that joins the run with these rows."""
        run = self.run if isinstance(self.run, Run) else load(self.run)  # type: ignore[arg-type]
        self._check_kind(run.federation.form)
        return run.onboard(_shaped(X, run.federation.form), y)

    def _alone(self, X: np.ndarray, y: np.ndarray, task: str) -> PersonalModel:
        """Return the model of a client that has nothing but these rows."""
        federation = from_arrays(X, y, np.zeros(len(X), int), task=task, scaling="standard", test=0.0)
        options: dict[str, Any] = {"model": self.model, "rounds": self.rounds, "seed": self.seed, "eval_every": 0}
        return simulate(Local(), federation, **options).client(0)

    def _keep(self, model: PersonalModel) -> None:
        """Become fitted."""
        self._check_kind(model.form)
        self.model_ = model
        self.n_features_in_ = len(model.form.columns) or math.prod(model.form.input_shape)
        if model.form.columns:
            self.feature_names_in_ = np.array(model.form.columns, object)

    def _said(self, X: Any) -> Prediction:
        """Return the prediction for the rows."""
        check_is_fitted(self)
        if self.model_.form.encoder is None and getattr(X, "ndim", 2) <= 2:  # flat, as scikit-learn has it
            X = validate_data(self, X, reset=False)
        return self.model_.predict(_shaped(X, self.model_.form))

    def _check_kind(self, form: Form) -> None:
        if (form.num_classes is not None) != isinstance(self, ClassifierMixin):
            kind, other = (
                ("numbers", "PersonalRegressor") if form.num_classes is None else ("classes", "PersonalClassifier")
            )
            raise UsageError(f"the targets of {form.name} are {kind}; use {other}.")


class PersonalClassifier(ClassifierMixin, _Personal):
    """A client's personal model of classes; see the module for `run`, `model`, `rounds` and `seed`.

    `classes_` are all classes of the run, in its order, whether or not the client's own rows have them.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Fit by joining the run with these rows, or alone."""
        if self.run is not None:
            y = np.asarray(y)
            model = self._join(X, y)
            self._keep(model)
            self.classes_ = _labels(model.form, y)
            return self
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        classes = unique_labels(y)
        if len(classes) < 2:
            raise UsageError(f"y has one class, {classes[0]!r}, and a classifier needs two; give rows of another.")
        self._keep(self._alone(X, np.searchsorted(classes, y), "classification"))
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (rows, classes), in the order of `classes_`."""
        probabilities = self._said(X).probabilities
        assert probabilities is not None
        return probabilities.astype(np.float64)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row."""
        chosen = self.predict_proba(X).argmax(axis=1)
        return self.classes_[chosen]

    def _keep(self, model: PersonalModel) -> None:
        super()._keep(model)
        self.classes_ = np.array(model.form.classes)


class PersonalRegressor(RegressorMixin, _Personal):
    """A client's personal model of a number; see the module for `run`, `model`, `rounds` and `seed`."""

    def fit(self, X: Any, y: Any) -> Self:
        """Fit by joining the run with these rows, or alone."""
        if self.run is not None:
            self._keep(self._join(X, np.asarray(y)))
            return self
        X, y = validate_data(self, X, y, y_numeric=True)
        # Whoever makes a federation chooses the units of its target; here they are unknown, and step sizes need some.
        centre, spread = float(np.mean(y)), float(np.std(y)) or 1.0
        self._keep(self._alone(X, (y - centre) / spread, "regression"))
        self.centre_, self.spread_ = centre, spread
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of the target for each row; with `return_std` its standard deviation too."""
        said = self._said(X)
        assert said.mean is not None
        assert said.sd is not None
        mean = self.centre_ + self.spread_ * said.mean.astype(np.float64)
        return (mean, self.spread_ * said.sd.astype(np.float64)) if return_std else mean

    def _keep(self, model: PersonalModel) -> None:
        super()._keep(model)
        self.centre_, self.spread_ = 0.0, 1.0


def _shaped(X: Any, form: Form) -> Any:
    """Return rows as examples of the form's shape, where scikit-learn has them flat; a table stays as it is."""
    if form.encoder is not None:
        return X
    rows, shape = np.asarray(X), form.input_shape
    is_flat = rows.ndim == 2 and len(shape) != 1 and rows.shape[1] == math.prod(shape)
    return rows.reshape(-1, *shape) if is_flat else rows


def _labels(form: Form, y: np.ndarray) -> np.ndarray:
    """Return the classes as labels like those of `y`: names, numbers, truth values, or indices."""
    names, codes = np.array(form.classes), form.read_labels(y)
    if y.dtype.kind == "b":
        return np.array([name == str(True) for name in names])
    if y.dtype.kind in "iuf":
        with suppress(ValueError):
            numbers = names.astype(y.dtype)
            if np.array_equal(numbers[codes], y):
                return numbers
        return np.arange(len(names), dtype=y.dtype)
    return names
