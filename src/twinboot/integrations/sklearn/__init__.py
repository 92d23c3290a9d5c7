"""Twin-Boot as scikit-learn estimators.

    from twinboot.integrations.sklearn import TwinBootRegressor

    model = TwinBootRegressor(random_state=0).fit(X, y)
    low, high = model.predict_interval(X_new, level=0.9)

The rows that no twin saw, about 13.5 % of them, stop the training and calibrate what is predicted (`rows.py`,
`estimate/conformal.py`). In small tables, where both twins may see every row, other bootstrap samples are drawn until
two rows are unseen (one, if two cannot be).

Inputs, and the targets of regression, are standardised inside, by the rows that the twins see, so that any units will
do; sparse inputs are made dense.

`fit` takes a `sample_weight`. A weight of 0 is a missing row, and the order of the rows does not matter. Weights that
are all the same are as none. Where all are whole numbers up to 10, a weight of 2 is a row that comes twice, bit for
bit. Other weights, large whole numbers too, multiply the loss of a row, and only their ratios matter.

After `fit` there are `estimate_`, the `twinboot.Estimate` of standardised inputs, (X - `center_`) / `spread_`, whose
`save` needs no pickle; `history_` with a value for each epoch; `best_epoch_` and `seed_`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from ..._core.extras import how_to_install

try:
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets

    from .estimator import TOO_FAR, TwinBoot
except ImportError as error:
    raise ImportError(f"these estimators need scikit-learn 1.6 or newer: {how_to_install('sklearn')}") from error

from ..._core.checks import shown
from ...data.bootstrap import UNSEEN
from ...estimate import conformal
from .rows import unit

ENOUGH = 50  # unseen rows for a temperature: fewer would leave it to chance
LEAST_NOISE = 0.05  # share of the squared errors, where the draws alone vary more than those


class TwinBootClassifier(ClassifierMixin, TwinBoot):  # type: ignore[misc]
    """A network of which two twins train on bootstrap samples of the rows, as a classifier.

    Where at least 50 rows are unseen, and no weight multiplies a loss, they also set the temperature of the
    probabilities and the scale of the weight noise (`estimate_.scale`; 0 takes it away).
    `twinboot.integrations.sklearn` says what both estimators share.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = TwinBootClassifier(epochs=20, random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.9, model.predict_proba(X).shape
    (True, (150, 3))
    """

    _task = "classification"
    _sets_aside = False

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> TwinBootClassifier:
        """Train twins on rows X and their classes y."""
        X, y, weight = self._check(X, y, sample_weight)
        try:
            check_classification_targets(y)
            self.classes_, codes = np.unique(y, return_inverse=True)
        except TypeError:
            raise ValueError("the classes in y have no order: use numbers or strings, and not both.") from None
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class only, {self.classes_[0]!r}, and there must be at least two classes.")
        rows, shares = self._fit(X, codes.astype(np.float64), weight, len(self.classes_))
        unseen = shares.stopping
        if len(unseen) >= ENOUGH and self.samples and (rows.weight == 1).all():  # `calibrate` knows no weights
            x, labels = self._standardised(rows.x).float()[unseen], torch.from_numpy(rows.y).long()[unseen]
            with warnings.catch_warnings():  # of no weight noise, for nobody asked for this step
                warnings.simplefilter("ignore")
                self.estimate_.calibrate(TensorDataset(x, labels), samples=self.samples, seed=self.seed_)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Class probabilities, in the order of `classes_`."""
        return np.asarray(self._prediction(self._checked_input(X)).probs.cpu())

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable classes."""
        labels = self.predict_proba(X).argmax(1)
        return np.asarray(self.classes_[labels])


class TwinBootRegressor(RegressorMixin, TwinBoot):  # type: ignore[misc]
    """A network of which two twins train on bootstrap samples of the rows, as a regressor with error bars.

    About 13.5 % of the rows are seen by neither twin. Half of those stop the training and tell the noise of the values;
    the other half is left alone until the end and calibrates `predict_interval`. For rows that are exchangeable with
    new ones its guarantee is therefore exact, on the average over tables and new rows. (It is approximate with weights
    that multiply losses, and void where rows were copied on purpose, or by weights that repeat them, so that the twins
    saw copies of what calibrates.)

    `noise_` is the standard deviation of that noise. `twinboot.integrations.sklearn` says what both estimators share.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = TwinBootRegressor(epochs=20, random_state=0).fit(X[:300], y[:300])
    >>> low, high = model.predict_interval(X[300:], level=0.9)
    >>> bool(((low <= y[300:]) & (y[300:] <= high)).mean() > 0.8)
    True
    """

    _task = "regression"
    _sets_aside = True

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> TwinBootRegressor:
        """Train twins on rows X and their values y."""
        X, y, weight = self._check(X, y, sample_weight)
        rows, shares = self._fit(X, y, weight, 1)
        # The noise is that of the rows that stopped, so that the scale of the scores knows nothing of those set aside.
        stop, aside = shares.stopping.numpy(), shares.aside.numpy()
        mean, spread = self._mean_and_spread(rows.x[stop])
        scale = unit(np.r_[rows.y[stop], mean, spread, self.target_spread_])  # in which squares are floats
        errors = np.average((rows.y[stop] / scale - mean / scale) ** 2, weights=rows.weight[stop])
        noise = max(errors - np.average((spread / scale) ** 2, weights=rows.weight[stop]), LEAST_NOISE * errors)
        least = 1e-6 * (self.target_spread_ / scale)  # a perfect fit has a scale, too
        self.noise_ = float(scale * math.sqrt(max(noise, least**2)))
        mean, std = self._mean_and_std(rows.x[aside])
        with np.errstate(over="ignore"):  # a score may be infinite; halves have a difference that is not
            self.scores_ = np.abs(rows.y[aside] / 2 - mean / 2) / (std / 2)
        self.scores_weight_ = rows.weight[aside]
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The expected values, and with `return_std` the standard deviation of a new measurement around them: what the
        data leave open about the weights, and the noise of the measurement itself (`noise_`)."""
        if not isinstance(return_std, (bool, np.bool_)):
            raise TypeError(f"return_std must be True or False, not {shown(return_std)}.")
        mean, std = self._mean_and_std(self._checked_input(X))
        return (mean, std) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Lower and upper ends of intervals, each of which holds a new measurement with a probability of `level`.

        Infinite, with a warning, where too few rows were set aside to say it: level / (1 - level) are needed, 9 for
        90 %.
        """
        mean, std = self._mean_and_std(self._checked_input(X))
        half = conformal.quantile(self.scores_, level, self.scores_weight_)
        if not math.isfinite(half):
            needed = math.ceil(level / (1 - level) - 1e-9)  # 0.9 / 0.1 is to be 9 whatever rounding makes of it
            warnings.warn(
                f"intervals of {float(level):g} are infinite: {len(self.scores_)} rows were set aside to calibrate "
                f"them, and {needed} are needed, which a table of some {math.ceil(needed / (UNSEEN / 2))} rows has.",
                stacklevel=2,
            )
        return mean - half * std, mean + half * std

    def _mean_and_std(self, x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        mean, spread = self._mean_and_spread(x)
        return mean, np.hypot(spread, self.noise_)

    def _mean_and_spread(self, x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """In the target's units: the mean over draws of the weights, and how far these spread."""
        if not len(x):
            return np.empty(0), np.empty(0)
        found = self._prediction(x)
        with np.errstate(over="ignore"):
            mean, spread = (np.asarray(v.cpu()).reshape(len(x)) * self.target_spread_ for v in (found.mean, found.std))
            mean = mean + self.target_center_
        if not np.isfinite([mean, spread]).all():
            raise ValueError(TOO_FAR)
        return mean, spread
