"""What the scikit-learn estimators share: parameters, checks, and the training of the twins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from ..._core.checks import require_number, require_whole, shown
from ..._core.copies import replicate
from ..._core.randomness import own_randomness, seeded
from ..._core.seeds import derive
from ...estimate.prediction import Prediction, Task
from ...groups import Grouping
from ...resets import Mode
from ...training import losses
from ...training.fit import fit
from ...training.optimizers import adam
from ...training.protocol import Protocol
from .rows import Rows, Shares, moments, ordered, shared

Network = Callable[[int, int], nn.Module]
TOO_FAR = "X has values so far from those that the twins saw that their prediction is no finite number."
LARGE, BATCH, LARGE_BATCH = 2000, 32, 256  # rows of a large table, and of a step on tables that are small and large


class TwinBoot(BaseEstimator):  # type: ignore[misc]
    """A network that is trained as twins. `_sets_aside`: half of the unseen rows are left alone, to calibrate by."""

    _task: Task
    _sets_aside: bool

    def __init__(
        self,
        hidden: Sequence[int] = (50,),
        *,
        network: Network | None = None,
        epochs: int = 200,
        patience: int | None = 20,
        batch_size: int | Literal["auto"] = "auto",
        learning_rate: float = 0.01,
        groups: str | Grouping = "unit",
        mode: Mode = "centered",
        samples: int = 32,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        """
        Args:
            hidden: units of the hidden layers of the default network, which has ReLU between its layers.
            network: a function of the numbers of inputs and of outputs that makes another one. It gives one value for
                regression, and logits for classification.
            epochs: at most so many passes over the rows.
            patience: stop when so many epochs have brought no better one for unseen rows. None runs all epochs; the
                best one is kept in either case.
            batch_size: rows of a step; by default 32, or 256 if there are 2000 rows or more.
            learning_rate: of Adam.
            groups: which weights share one sigma, as in `twinboot.Twins`.
            mode: how the twins are reset after each epoch, as in `twinboot.fit`.
            samples: draws of the weights for a prediction; 0 for the mean of the twins alone.
            random_state: of everything random. None draws a seed.
            verbose: a line for each epoch on standard error.
        """
        self.hidden = hidden
        self.network = network
        self.epochs = epochs
        self.patience = patience
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.groups = groups
        self.mode = mode
        self.samples = samples
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @property
    def partial_fit(self) -> Any:
        """Not there, so that scikit-learn does not look for it, but with a reason for people."""
        raise AttributeError(
            f"{type(self).__name__} has no partial_fit: which rows a twin sees is drawn once, from all rows, and the "
            "unseen ones must stay unseen. Use fit with all rows."
        )

    def _check(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        """Inputs, targets and weights of the rows that count."""
        self._check_parameters()
        numeric = self._task == "regression"
        if any(getattr(getattr(given, "dtype", None), "kind", None) == "c" for given in (X, y)):
            raise ValueError("Complex data not supported: X and y must be real.")
        y = _real(y) if numeric and y is not None else y
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=numeric, ensure_min_samples=2)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
        if (weight < 0).any():
            raise ValueError("sample_weight must not be negative.")
        counts = weight > 0
        if counts.sum() < 2:
            raise ValueError(f"sample_weight leaves {counts.sum()} sample(s), but two twins need at least 2.")
        X, y, weight = _dense(X[counts]), y[counts], weight[counts]
        if weight.min() / weight.max() < np.finfo(np.float32).tiny:  # in which losses are computed
            raise ValueError("sample_weight has ratios that are too small for float32: give 0 for the small weights.")
        with np.errstate(over="ignore"):
            ranges = {"a column of X": np.ptp(X, axis=0)} | ({"y": np.ptp(y)} if numeric else {})
        for what, found in ranges.items():
            if not np.isfinite(found).all():
                raise ValueError(f"the range of {what} is too large for float64: use other units.")
        return X, y, weight

    def _check_parameters(self) -> None:
        if self.network is not None and (isinstance(self.network, nn.Module) or not callable(self.network)):
            raise TypeError(f"network must be a function that makes one, such as nn.Linear, not {shown(self.network)}.")
        samples = _plain(self.samples)
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0 or samples == 1:
            raise ValueError(f"samples must be 0, for the mean model, or at least 2, not {shown(samples)}.")
        require_whole("epochs", _plain(self.epochs), 1)
        if self.patience is not None:
            require_whole("patience", _plain(self.patience), 1)
        if not isinstance(self.batch_size, str) or self.batch_size != "auto":
            require_whole("batch_size", _plain(self.batch_size), 1, '; "auto" chooses one')
        require_number("learning_rate", self.learning_rate, positive=True)
        if not isinstance(self.verbose, (bool, np.bool_, Integral)):
            raise TypeError(f"verbose must be True or False, not {shown(self.verbose)}.")

    def _seed(self) -> int:
        try:
            return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        except (TypeError, ValueError):
            raise ValueError(
                "random_state must be None, a whole number from 0 to 2**32 - 1 or a RandomState, not "
                f"{shown(self.random_state)}."
            ) from None

    def _fit(self, x: Any, y: Any, weight: Any, outputs: int) -> tuple[Rows, Shares]:
        """Train twins; `estimate_` and what else `fit` leaves are set."""
        seed = self._seed()
        rows = ordered(x, y, weight, seed)
        shares = shared(len(rows.x), seed, self._sets_aside)
        # From seen rows alone: what stops and what calibrates must know nothing of the others, nor they of it.
        seen = shares.seen.numpy()
        self.center_, self.spread_ = moments(rows.x[seen], rows.weight[seen])
        if self._task == "regression":
            self.target_center_, self.target_spread_ = map(float, moments(rows.y[seen], rows.weight[seen]))
        with seeded(derive(seed, "network")):
            made = (self.network or self._mlp)(rows.x.shape[1], outputs)
        data, loss = self._data(rows)
        _check_network(made, data.tensors[0][:2], outputs)
        batch = (BATCH if len(rows.x) < LARGE else LARGE_BATCH) if self.batch_size == "auto" else self.batch_size
        found = fit(
            made,
            Subset(data, shares.train.tolist()),
            loss,
            optimizer=lambda parameters: adam(parameters, float(self.learning_rate)),
            epochs=self.epochs,
            patience=self.patience,
            batch_size=min(batch, 2**31),  # all rows in any case, and small enough to compute with
            protocol=Protocol(groups=self.groups, mode=self.mode),
            bootstrap=shares.bootstrap,
            seed=seed,
            progress=bool(self.verbose),
        )
        self.seed_, self.estimate_ = seed, found.estimate
        self.estimate_.task = self._task  # which `fit` can't tell from a loss with weights
        self.history_, self.best_epoch_ = found.history, found.best_epoch
        return rows, shares

    def _mlp(self, inputs: int, outputs: int) -> nn.Module:
        given = self.hidden.tolist() if isinstance(self.hidden, np.ndarray) else self.hidden
        several = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
        widths = list(map(_plain, given)) if several else [0]
        if not all(isinstance(units, int) and not isinstance(units, bool) and units >= 1 for units in widths):
            raise ValueError(f"hidden must be a sequence of widths, such as (50,), not {shown(self.hidden)}.")
        sizes = [inputs, *widths]
        try:
            layers = [[nn.Linear(before, after), nn.ReLU()] for before, after in pairwise(sizes)]
        except (RuntimeError, TypeError, OverflowError):
            raise ValueError(f"a network with hidden={shown(self.hidden)} does not fit into memory.") from None
        return nn.Sequential(*chain.from_iterable(layers), nn.Linear(sizes[-1], outputs))

    def _data(self, rows: Rows) -> tuple[TensorDataset, Task | losses.Loss]:
        """What `fit` trains on. Weights travel beside the target, since a loss is a function of output and target."""
        x = self._standardised(rows.x).float()
        y = torch.from_numpy(rows.y)
        target = y.long() if self._task == "classification" else self._of_target(y).float()[:, None]
        if (rows.weight == 1).all():
            return TensorDataset(x, target), self._task
        own = losses.loss_function(self._task)
        both = torch.stack([target.double().flatten(), torch.from_numpy(rows.weight)], 1)
        kind, shape = target.dtype, target.shape[1:]

        def weighted(output: Tensor, both: Tensor) -> Tensor:
            return both[:, 1].to(output) * own(output, both[:, 0].to(kind).reshape(-1, *shape))

        return TensorDataset(x, both), weighted

    def _standardised(self, x: NDArray[np.float64]) -> Tensor:
        with np.errstate(over="ignore"):
            found = (x - self.center_) / self.spread_
        if not np.isfinite(found).all():
            raise ValueError(TOO_FAR)
        return torch.from_numpy(found)

    def _of_target(self, y: Tensor) -> Tensor:
        return (y - self.target_center_) / self.target_spread_

    def _checked_input(self, X: Any) -> NDArray[np.float64]:
        check_is_fitted(self)
        return _dense(validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False))

    def _prediction(self, x: NDArray[np.float64]) -> Prediction:
        # In double precision a row's prediction does not depend on which rows are asked for with it.
        estimate = copy.deepcopy(self.estimate_).double()
        # A handful of rows may leave twins that are the same: the mean says all that its draws would.
        samples = int(self.samples) if estimate.partition.sigma.any() else 0
        found = estimate.predict(self._standardised(x), samples, self._task, seed=self.seed_)
        if not (found.mean.isfinite() & found.std.isfinite()).all():
            raise ValueError(TOO_FAR)
        return found


def _check_network(made: object, x: Tensor, outputs: int) -> None:
    """Refuse what is no network for these inputs, before it is trained. A copy runs, in evaluation mode, so that the
    training that follows is the same."""
    if not isinstance(made, nn.Module):
        raise TypeError(f"network must make an nn.Module, not {shown(made)}.")
    device = next((p.device for p in made.parameters()), x.device)
    try:
        [copied] = replicate(made)
        with torch.no_grad(), own_randomness(device, "network"):
            given = copied.eval()(x.to(device))
    except Exception as error:  # whatever the network raises
        said = " ".join(str(error).split())
        raise ValueError(f"the network does not run on {x.shape[1]} inputs in float32: {said}") from error
    if not isinstance(given, Tensor):
        raise TypeError(f"the network must give a tensor, not {type(given).__name__}.")
    if given.shape != (len(x), outputs):
        raise ValueError(
            f"the network must give an output of shape {(len(x), outputs)} for {len(x)} rows, not {tuple(given.shape)}."
        )


def _real(y: Any) -> NDArray[np.float64]:
    with suppress(TypeError, ValueError, RuntimeError):  # of what cannot be an array of numbers
        found = np.asarray(y)
        if found.dtype.kind != "c":
            return found.astype(np.float64)
    raise ValueError(f"y must be a real number for each row, not {shown(y)}.")


def _plain(number: Any) -> Any:
    """A number of numpy as one of Python."""
    return number.item() if isinstance(number, np.generic) else number


def _dense(x: Any) -> NDArray[np.float64]:
    """Row by row in memory, as products of matrices round otherwise where a table lies column by column."""
    return np.ascontiguousarray(x.toarray() if hasattr(x, "toarray") else x, np.float64)
