"""Twin-Boot as scikit-learn estimators.

from twinboot.integrations.sklearn import TwinBootRegressor

model = TwinBootRegressor(random_state=0).fit(X, y)
low, high = model.predict_interval(X_new, level=0.9)
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from hashlib import blake2b
from numbers import Integral
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from .._core import ranks
from .._core.extras import how_to_install

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(f"these estimators need scikit-learn 1.6 or newer: {how_to_install('sklearn')}") from error

from .. import Bootstrap, Prediction, Protocol, fit
from .._core.checks import is_whole, one_line, require_number, require_samples, require_whole, shown
from .._core.copies import replicate
from .._core.seeds import derive, own_randomness, seeded
from .._core.threads import one_thread
from ..data.bootstrap import UNSEEN
from ..estimate import conformal
from ..estimate.prediction import Task
from ..training import losses
from ..training.optimizers import adam
from ..training.protocol import SCIKIT_LEARN, complete

__all__ = ["TwinBootClassifier", "TwinBootRegressor"]

Floats = NDArray[np.float64]
TRIES = 100  # bootstraps to try until two rows of a small table are out-of-bag
MAX_REPEATS = 10  # larger weights multiply the loss instead: each repetition costs as much as a row
TOO_FAR = "X has values so far from the training data that the prediction is not a finite number."
LARGE, BATCH, LARGE_BATCH = 2000, 32, 256  # rows of a large table; batch sizes for small and large tables
# Multiplications of a forward pass up to which the default network runs on one thread. A step then takes at most half a
# millisecond, and a second thread does not shorten it: it waits at the end of each layer and of each tensor of Adam.
# Where other processes want that core, too, it waits for them each time, and a training takes ten times as long.
ONE_THREAD = 2**22
ENOUGH = 50  # out-of-bag rows to calibrate a classifier: with fewer, the temperature is too uncertain


class _TwinBoot(BaseEstimator):  # type: ignore[misc]
    """What the two estimators share: parameters, checks and training."""

    _task: Task
    _spread: float  # the default share of the epochs in which twins settle
    _sets_rows_aside: bool  # whether half of the out-of-bag rows are set aside for calibration
    _fit: Callable[..., None]

    def __init__(
        self,
        hidden: Sequence[int] = (50,),
        *,
        network: Callable[[int, int], nn.Module] | None = None,
        epochs: int = 200,
        patience: int | None = 20,
        batch_size: int | Literal["auto"] = "auto",
        learning_rate: float = 0.01,
        protocol: Protocol | None = None,
        spread: float | None = None,
        samples: int = 32,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        """
        Inputs, and targets of regression, are standardized inside, with mean and standard deviation of the rows that
        the twins train on. So their units do not matter. Sparse inputs are made dense.

        Args:
            hidden: Number of units in each hidden layer of the default network, which uses ReLU.
            network: A function of (number of inputs, number of outputs) that returns another network. The network
                must return logits for classification and one value for regression.
            epochs: Maximum number of epochs.
            patience: Stop after this many epochs without a better loss on the out-of-bag rows. None runs all epochs.
                Either way, the best epoch is used.
            batch_size: The batch size of the plain training that the twins replace, as in `PairedLoader`. `"auto"` is
                32, or 256 for 2000 rows or more.
            learning_rate: Learning rate of Adam.
            protocol: The settings of the method, as in `twinboot.fit`. By default `groups` is `"unit"` and `mode` is
                `"centered"`.
            spread: After training, twins settle around the estimate for this share of `epochs`, as in `twinboot.fit`.
                Draws of the weights then spread predictions as much as these twins do. 0 leaves it out. None is 0.3 for
                regression, and 0 for classification, where the mean over such draws is less sharp.
            samples: Number of draws of the weights for a prediction. 0 uses the mean of the twins.
            random_state: Seed of everything random. None draws a seed.
            verbose: Whether to print a line for each epoch to standard error.
        """
        self.hidden = hidden
        self.network = network
        self.epochs = epochs
        self.patience = patience
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.protocol = protocol
        self.spread = spread
        self.samples = samples
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @property
    def partial_fit(self) -> Any:
        """Missing for `hasattr`, which scikit-learn uses, with an explanation for people."""
        raise AttributeError(
            f"{type(self).__name__} has no partial_fit: the bootstrap samples are drawn once from all rows, and "
            "out-of-bag rows must stay unseen. Use fit with all rows."
        )

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the twins.

        After this, `estimate_` is the `twinboot.Estimate` for standardized inputs, (X - `center_`) / `spread_`;
        `history_` has the values of each epoch, as in `twinboot.fit`, and `best_epoch_` the epoch that is used;
        `seed_` is the seed that `random_state` gave.

        Args:
            X: The inputs [rows, features], dense or sparse.
            y: The classes or values [rows].
            sample_weight: Weights [rows]. If all are whole numbers up to 10, a weight of 2 equals a row that appears
                twice, bit for bit. Other weights multiply the loss, and only their ratios matter. A weight of 0 equals
                a missing row.
        """
        self._fit(*self._check(X, y, sample_weight))
        return self

    def _check(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        """Check all arguments. Returns inputs, targets and weights of the rows with a positive weight."""
        self._check_parameters()
        numeric = self._task == "regression"
        if any(getattr(getattr(given, "dtype", None), "kind", None) == "c" for given in (X, y)):
            raise ValueError("Complex data not supported: X and y must be real.")
        y = _real(y) if numeric and y is not None else y
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=numeric, ensure_min_samples=2)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
        if (weight < 0).any():
            raise ValueError("sample_weight must not be negative.")
        positive = weight > 0
        if positive.sum() < 2:
            raise ValueError(f"sample_weight leaves {positive.sum()} sample(s), but two twins need at least 2.")
        X, y, weight = _dense(X[positive]), y[positive], weight[positive]
        if weight.min() / weight.max() < np.finfo(np.float32).tiny:  # losses are float32
            raise ValueError("sample_weight has ratios that are too small for float32: use 0 for the small weights.")
        with np.errstate(over="ignore"):
            ranges = {"a column of X": np.ptp(X, axis=0)} | ({"y": np.ptp(y)} if numeric else {})
        for what, found in ranges.items():
            if not np.isfinite(found).all():
                raise ValueError(f"the range of {what} is too large for float64: use other units.")
        return X, y, weight

    def _check_parameters(self) -> None:
        complete(self.protocol, SCIKIT_LEARN, type(self).__name__)
        if self.network is not None and (isinstance(self.network, nn.Module) or not callable(self.network)):
            raise TypeError(f"network must be a function that makes one, such as nn.Linear, not {shown(self.network)}.")
        require_samples(self.samples)
        require_whole("epochs", self.epochs, 1)
        if self.patience is not None:
            require_whole("patience", self.patience, 1)
        if not isinstance(self.batch_size, str) or self.batch_size != "auto":
            require_whole("batch_size", self.batch_size, 1, '; "auto" chooses one')
        require_number("learning_rate", self.learning_rate, positive=True)
        if self.spread is not None:
            require_number("spread", self.spread)
        if not isinstance(self.verbose, (bool, np.bool_, Integral)):
            raise TypeError(f"verbose must be True or False, not {shown(self.verbose)}.")

    def _share(self) -> float:
        """Of the epochs in which twins settle."""
        return self._spread if self.spread is None else float(self.spread)

    def _seed(self) -> int:
        try:
            return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        except (TypeError, ValueError):
            raise ValueError(
                "random_state must be None, a whole number from 0 to 2**32 - 1 or a RandomState, not "
                f"{shown(self.random_state)}."
            ) from None

    def _train(self, x: Any, y: Any, weight: Any, outputs: int) -> tuple[Rows, RowSplit]:
        """Train the twins and set the attributes that both estimators have after `fit`."""
        seed = self._seed()
        rows = sort_rows(x, y, weight, seed)
        split = split_rows(len(rows.x), seed, self._sets_rows_aside)
        # Standardize by the rows seen in training only: out-of-bag rows must not influence the model.
        seen = split.seen.numpy()
        self.center_, self.spread_ = center_and_spread(rows.x[seen], rows.weight[seen])
        if self._task == "regression":
            self.target_center_, self.target_spread_ = map(float, center_and_spread(rows.y[seen], rows.weight[seen]))
        with seeded(derive(seed, "network")):
            network = (self.network or self._mlp)(rows.x.shape[1], outputs)
        data, loss = self._data_and_loss(rows)
        _check_network(network, data.tensors[0][:2], outputs)
        batch_size = (BATCH if len(rows.x) < LARGE else LARGE_BATCH) if self.batch_size == "auto" else self.batch_size
        with self._threads(network, min(batch_size, len(rows.x))):
            result = fit(
                network,
                Subset(data, split.train.tolist()),
                loss,
                optimizer=lambda parameters: adam(parameters, float(self.learning_rate)),
                epochs=self.epochs,
                patience=self.patience,
                batch_size=min(batch_size, 2**31),  # more than any table has, and small enough to compute with
                protocol=complete(self.protocol, SCIKIT_LEARN, type(self).__name__),
                bootstrap=split.bootstrap,
                spread=self._share() if self.samples and np.ptp(rows.y[seen]) else 0.0,  # else nothing spreads
                seed=seed,
                # The estimator's own network is a chain, which trains faster so. Ranks need separate twins.
                stacked=self.network is None and ranks.rank_and_size()[1] == 1,
                progress=bool(self.verbose),
            )
        self.seed_, self.estimate_ = seed, result.estimate
        self.estimate_.task = self._task  # `fit` does not know it if the loss is a function
        self.history_, self.best_epoch_ = result.history, result.best_epoch
        return rows, split

    def _mlp(self, inputs: int, outputs: int) -> nn.Module:
        hidden = self.hidden.tolist() if isinstance(self.hidden, np.ndarray) else self.hidden
        if not isinstance(hidden, (list, tuple)) or not all(is_whole(units) and units >= 1 for units in hidden):
            raise ValueError(f"hidden must be a sequence of widths, such as (50,), not {shown(self.hidden)}.")
        sizes = [inputs, *map(int, hidden)]
        try:
            layers = [[nn.Linear(before, after), nn.ReLU()] for before, after in itertools.pairwise(sizes)]
        except (RuntimeError, TypeError, OverflowError):
            raise ValueError(f"a network with hidden={shown(self.hidden)} does not fit into memory.") from None
        return nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(sizes[-1], outputs))

    def _threads(self, network: nn.Module, rows: int) -> AbstractContextManager[None]:
        """One thread for small networks, unless they are the user's own, which may use each weight many times."""
        small = sum(p.numel() for p in network.parameters()) * rows <= ONE_THREAD
        return one_thread() if small and self.network is None else nullcontext()

    def _data_and_loss(self, rows: Rows) -> tuple[TensorDataset, Task | losses.Loss]:
        """The dataset and the loss for `fit`. Weights are a second column of the target."""
        x = self._standardize(rows.x).float()
        y = torch.from_numpy(rows.y)
        if self._task == "regression":
            y = ((y - self.target_center_) / self.target_spread_).float()[:, None]
        else:
            y = y.long()
        if (rows.weight == 1).all():
            return TensorDataset(x, y), self._task
        plain_loss, dtype, shape = losses.loss_function(self._task), y.dtype, y.shape[1:]

        def weighted_loss(output: Tensor, target: Tensor) -> Tensor:
            return target[:, 1].to(output) * plain_loss(output, target[:, 0].to(dtype).reshape(-1, *shape))

        return TensorDataset(x, torch.stack([y.double().flatten(), torch.from_numpy(rows.weight)], 1)), weighted_loss

    def _standardize(self, x: Floats) -> Tensor:
        with np.errstate(over="ignore"):
            standardized = (x - self.center_) / self.spread_
        if not np.isfinite(standardized).all():
            raise ValueError(TOO_FAR)
        return torch.from_numpy(standardized)

    def _check_input(self, X: Any) -> Floats:
        check_is_fitted(self)
        return _dense(validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False))

    def _predict(self, x: Floats) -> Prediction:
        # In float64, the prediction for a row does not depend on the other rows.
        estimate = copy.deepcopy(self.estimate_).double()
        # Twins of a handful of rows may be equal: then all draws are the mean.
        samples = int(self.samples) if estimate.partition.sigma.any() else 0
        with self._threads(estimate.module, len(x) * max(1, samples)):
            found = estimate.predict(self._standardize(x), samples, self._task, seed=self.seed_)
        if not (found.mean.isfinite() & found.std.isfinite()).all():
            raise ValueError(TOO_FAR)
        return found


class TwinBootClassifier(ClassifierMixin, _TwinBoot):  # type: ignore[misc]
    """Neural network classifier with calibrated probabilities, trained with Twin-Boot.

    Two twins of a network train on bootstrap samples of the rows. About 13.5 % of the rows are out-of-bag: neither twin
    trains on them. They decide when training stops. If there are at least 50, and no weight multiplies a loss, they
    also calibrate the temperature of the probabilities and the scale of the weight noise.

    The constructor describes the parameters, and `fit` most attributes. `classes_` are the sorted classes.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = TwinBootClassifier(epochs=20, random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.9, model.predict_proba(X).shape
    (True, (150, 3))
    """

    _task = "classification"
    _spread = 0.0
    _sets_rows_aside = False

    def _fit(self, x: Floats, y: NDArray[Any], weight: Floats) -> None:
        try:
            check_classification_targets(y)
            self.classes_, codes = np.unique(y, return_inverse=True)
        except TypeError:
            raise ValueError("the classes in y cannot be sorted: use either numbers or strings.") from None
        if len(self.classes_) < 2:
            raise ValueError(f"y has only the class {self.classes_[0]!r}, but there must be at least two classes.")
        rows, split = self._train(x, codes.astype(np.float64), weight, len(self.classes_))
        unseen = split.stopping
        if len(unseen) >= ENOUGH and self.samples and (rows.weight == 1).all():  # `calibrate` takes no weights
            inputs, labels = self._standardize(rows.x).float()[unseen], torch.from_numpy(rows.y).long()[unseen]
            with warnings.catch_warnings(), self._threads(self.estimate_.module, len(unseen)):
                warnings.simplefilter("ignore")  # that the best scale is 0: the user did not ask for calibration
                unseen_rows, matched = TensorDataset(inputs, labels), self._share() > 0
                self.estimate_.calibrate(unseen_rows, samples=self.samples, keep_scale=matched, seed=self.seed_)

    def predict_proba(self, X: Any) -> Floats:
        """Predict class probabilities [rows, classes], in the order of `classes_`."""
        return np.asarray(self._predict(self._check_input(X)).probs.cpu())

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict the most probable class of each row."""
        labels = self.predict_proba(X).argmax(1)  # raises NotFittedError before `classes_` is read
        return np.asarray(self.classes_[labels])


class TwinBootRegressor(RegressorMixin, _TwinBoot):  # type: ignore[misc]
    """Neural network regressor with standard deviations and conformal intervals, trained with Twin-Boot.

    Two twins of a network train on bootstrap samples of the rows. About 13.5 % of the rows are out-of-bag: neither twin
    trains on them. Half of these decide when training stops and estimate the noise of the targets. The other half
    calibrate `predict_interval`. If rows are exchangeable with new ones, the coverage of the intervals is guaranteed on
    average over tables and new rows. With weights that multiply losses, the guarantee is approximate. It is void if
    rows appear several times in the table, or by their weights.

    The constructor describes the parameters, and `fit` most attributes. `noise_` is the standard deviation of the noise
    of the targets. Outputs of `estimate_` are standardized, too: (y - `target_center_`) / `target_spread_`.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = TwinBootRegressor(epochs=20, random_state=0).fit(X[:300], y[:300])
    >>> low, high = model.predict_interval(X[300:], level=0.9)
    >>> bool(((low <= y[300:]) & (y[300:] <= high)).mean() > 0.8)
    True
    """

    _task = "regression"
    _spread = 0.3
    _sets_rows_aside = True

    def _fit(self, x: Floats, y: NDArray[Any], weight: Floats) -> None:
        rows, split = self._train(x, y, weight, 1)
        # The noise comes from the rows that stop training, so the scores are independent of it.
        stop, calibration = split.stopping.numpy(), split.calibration.numpy()
        mean, spread = self._mean_and_spread(rows.x[stop])
        unit = power_of_two(np.r_[rows.y[stop], mean, spread, self.target_spread_])  # squares must not overflow
        noise = conformal.noise_variance(rows.y[stop] / unit - mean / unit, spread / unit, rows.weight[stop])
        least = 1e-6 * (self.target_spread_ / unit)  # above 0 even for a perfect fit
        self.noise_ = float(unit * math.sqrt(max(noise, float(least**2))))
        mean, std = self._mean_and_std(rows.x[calibration])
        with np.errstate(over="ignore"):  # a score may be infinite; the difference of halves is finite
            self.scores_ = np.abs(rows.y[calibration] / 2 - mean / 2) / (std / 2)
        self.scores_weight_ = rows.weight[calibration]

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predict the mean, and with `return_std` also the standard deviation of a new measurement.

        The standard deviation combines the uncertainty of the weights and the noise of the measurement (`noise_`).
        """
        if not isinstance(return_std, (bool, np.bool_)):
            raise TypeError(f"return_std must be True or False, not {shown(return_std)}.")
        mean, std = self._mean_and_std(self._check_input(X))
        return (mean, std) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Floats, Floats]:
        """Predict intervals that contain a new measurement with probability `level`.

        Args:
            X: The rows.
            level: The coverage, between 0 and 1.

        Returns:
            Lower and upper ends. They are infinite, with a warning, if fewer than level / (1 - level) rows calibrate
            the intervals: 9 for 90 %.
        """
        mean, std = self._mean_and_std(self._check_input(X))
        half = conformal.quantile(self.scores_, level, self.scores_weight_)
        if not math.isfinite(half):
            needed = conformal.needed_for(float(level))
            warnings.warn(
                f"intervals of level {float(level):g} are infinite: they need {needed} rows for calibration, but there "
                f"are {len(self.scores_)}. Use a table of about {math.ceil(needed / (UNSEEN / 2))} rows.",
                stacklevel=2,
            )
        return mean - half * std, mean + half * std

    def _mean_and_std(self, x: Floats) -> tuple[Floats, Floats]:
        mean, spread = self._mean_and_spread(x)
        return mean, np.hypot(spread, self.noise_)

    def _mean_and_spread(self, x: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation over the draws of the weights, in units of the target."""
        if not len(x):
            return np.empty(0), np.empty(0)
        found = self._predict(x)
        with np.errstate(over="ignore"):
            mean, spread = (np.asarray(v.cpu()).reshape(len(x)) * self.target_spread_ for v in (found.mean, found.std))
            mean = mean + self.target_center_
        if not np.isfinite([mean, spread]).all():
            raise ValueError(TOO_FAR)
        return mean, spread


def _check_network(network: object, x: Tensor, outputs: int) -> None:
    """Run a copy of the network on two rows, in evaluation mode, so that the network itself does not change."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"network must make an nn.Module, not {shown(network)}.")
    device = next((p.device for p in network.parameters()), x.device)
    try:
        [copied] = replicate(network)
        with torch.no_grad(), own_randomness(device, "network"):
            output = copied.eval()(x.to(device))
    except Exception as error:  # whatever the network raises
        raise ValueError(f"the network does not run on {x.shape[1]} inputs in float32: {one_line(error)}.") from error
    if not isinstance(output, Tensor):
        raise TypeError(f"the network must return a tensor, not {type(output).__name__}.")
    if output.shape != (len(x), outputs):
        raise ValueError(
            f"the network must return shape {(len(x), outputs)} for {len(x)} rows, not {tuple(output.shape)}."
        )


def _real(y: Any) -> Floats:
    with suppress(TypeError, ValueError, RuntimeError):  # from values that are not numbers
        found = np.asarray(y)
        if found.dtype.kind != "c":
            return found.astype(np.float64)
    raise ValueError(f"y must be a real number for each row, not {shown(y)}.")


def _dense(x: Any) -> Floats:
    """A dense table in row-major order: matrix products of column-major ones round differently."""
    return np.ascontiguousarray(x.toarray() if hasattr(x, "toarray") else x, np.float64)


# Table rows. What happens to a row depends on its numbers and a seed, not on its place in the table: rows are sorted by
# a hash of their numbers. So the training is the same, bit for bit, for the table in another order, for a missing row
# instead of a weight of 0, and for a row that appears twice instead of a weight of 2. If rows were sorted by their
# numbers, a seed would pick the same ranks in each table, which is not a fair sample. Weights are not hashed, so a
# common factor on them does not change the order. Other units of X or y do change it.


class Rows(NamedTuple):
    """Inputs [n, d], targets [n] and weights [n] with mean 1, sorted by the hashes of the rows."""

    x: Floats
    y: Floats
    weight: Floats


def sort_rows(x: Floats, y: Floats, weight: Floats, seed: int) -> Rows:
    """Sort rows by their hashes, and equal rows by weight. All weights must be positive.

    Equal weights become 1. Whole weights up to 10 repeat their rows. Of other weights, only the ratios matter.
    """
    repeats = np.ones(len(weight), np.int64)
    if weight.min() == weight.max():
        weight = np.ones(len(weight))
    elif weight.max() <= MAX_REPEATS and (weight == np.round(weight)).all():
        repeats, weight = weight.astype(np.int64), np.ones(len(weight))
    else:
        weight = weight / power_of_two(weight)
        weight = weight / weight.mean()
    x, y = x + 0.0, y + 0.0  # -0.0 equals 0.0, but has other bytes
    key = derive(seed, "order").to_bytes(8, "little")
    hashes = [
        blake2b(np.r_[target, row].tobytes(), digest_size=8, key=key).digest() for row, target in zip(x, y, strict=True)
    ]
    order = np.lexsort((weight, np.frombuffer(b"".join(hashes), np.uint64)))
    order = np.repeat(order, repeats[order])
    return Rows(x[order], y[order], weight[order])


class RowSplit(NamedTuple):
    """Indices of rows. A twin trains on each row in `seen`. The other ones are out-of-bag."""

    seen: Tensor
    stopping: Tensor
    calibration: Tensor
    train: Tensor  # for `fit`: the rows in seen and stopping
    bootstrap: Bootstrap  # of the rows in train


def split_rows(n: int, seed: int, calibrate: bool) -> RowSplit:
    """Draw bootstrap samples that leave some rows out-of-bag. With `calibrate`, set every second of these aside.

    If a small table has fewer than two out-of-bag rows, draw again, and after 100 times accept one. This does not look
    at the values in the rows.
    """
    for attempt in itertools.count():
        bootstrap = Bootstrap(n, seed=derive(seed, "bootstrap", attempt))
        unseen = bootstrap.unseen
        if len(unseen) >= (2 if attempt < TRIES and n > 2 else 1):
            break
    calibration = unseen[1::2] if calibrate else unseen[:0]
    is_train = torch.ones(n, dtype=torch.bool)
    is_train[calibration] = False
    train_bootstrap = copy.copy(bootstrap)
    train_bootstrap.n, train_bootstrap.counts = int(is_train.sum()), bootstrap.counts[:, is_train]
    train = is_train.nonzero().squeeze(1)
    return RowSplit(train[train_bootstrap.seen], train[train_bootstrap.unseen], calibration, train, train_bootstrap)


def power_of_two(values: Floats) -> Floats:
    """The largest power of two up to the largest absolute value of each column; 1 where all values are 0.

    After division by it, squares and sums neither overflow nor underflow. The division is exact, so results do not
    depend on the units, bit for bit.
    """
    largest = np.abs(values).max(axis=0)
    return np.where(largest > 0, np.ldexp(1.0, np.frexp(largest)[1] - 1), 1.0)


def center_and_spread(values: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of each column; for constant columns, `power_of_two` replaces the latter."""
    unit = power_of_two(values)
    values = values / unit
    mean = np.average(values, axis=0, weights=weight)
    std = unit * np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weight))
    # Rounding may give a constant column a tiny standard deviation.
    return unit * mean, np.where((np.ptp(values, axis=0) > 0) & (std > 0), std, unit)
