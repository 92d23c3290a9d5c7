"""What the scikit-learn estimators share: parameters, checks, and the training of the twins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
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

from .. import losses
from ..fit import fit
from ..groups import Grouping
from ..optimizers import adam
from ..prediction import Prediction, Task
from ..randomness import seeded
from ..resets import Mode
from ..seeds import derive
from .rows import Rows, Shares, moments, ordered, shared

Network = Callable[[int, int], nn.Module]
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
        numeric = self._task == "regression"
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=numeric, ensure_min_samples=2)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
        if (weight < 0).any():
            raise ValueError("sample_weight must not be negative.")
        if self.samples == 1 or self.samples < 0:
            raise ValueError(f"samples must be 0, for the mean model, or at least 2, not {self.samples!r}.")
        counts = weight > 0
        if counts.sum() < 2:
            raise ValueError(f"sample_weight leaves {counts.sum()} sample(s), but two twins need at least 2.")
        return _dense(X[counts]), y[counts], weight[counts]

    def _fit(self, x: Any, y: Any, weight: Any, outputs: int) -> tuple[Rows, Shares]:
        """Train twins; `estimate_` and what else `fit` leaves are set."""
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
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
        batch = (BATCH if len(rows.x) < LARGE else LARGE_BATCH) if self.batch_size == "auto" else self.batch_size
        found = fit(
            made,
            Subset(data, shares.train.tolist()),
            loss,
            optimizer=lambda parameters: adam(parameters, self.learning_rate),
            epochs=self.epochs,
            patience=self.patience,
            batch_size=batch,
            groups=self.groups,
            mode=self.mode,
            bootstrap=shares.bootstrap,
            seed=seed,
            progress=bool(self.verbose),
        )
        self.seed_, self.estimate_ = seed, found.estimate
        self.estimate_.task = self._task  # which `fit` can't tell from a loss with weights
        self.history_, self.best_epoch_ = found.history, found.best_epoch
        return rows, shares

    def _mlp(self, inputs: int, outputs: int) -> nn.Module:
        widths = self.hidden if isinstance(self.hidden, Iterable) else [None]
        if not all(isinstance(units, Integral) and units >= 1 for units in widths):
            raise ValueError(f"hidden must be a sequence of widths, such as (50,), not {self.hidden!r}.")
        sizes = [inputs, *self.hidden]
        layers = [[nn.Linear(before, after), nn.ReLU()] for before, after in pairwise(sizes)]
        return nn.Sequential(*chain.from_iterable(layers), nn.Linear(sizes[-1], outputs))

    def _data(self, rows: Rows) -> tuple[TensorDataset, Task | losses.Loss]:
        """What `fit` trains on. Weights travel beside the target, since a loss is a function of output and target."""
        x = self._standardised(rows.x).float()
        y = torch.from_numpy(rows.y)
        target = y.long() if self._task == "classification" else self._of_target(y).float()[:, None]
        if (rows.weight == 1).all():
            return TensorDataset(x, target), self._task
        own = losses.named(self._task)
        both = torch.stack([target.double().flatten(), torch.from_numpy(rows.weight)], 1)
        kind, shape = target.dtype, target.shape[1:]

        def weighted(output: Tensor, both: Tensor) -> Tensor:
            return both[:, 1].to(output) * own(output, both[:, 0].to(kind).reshape(-1, *shape))

        return TensorDataset(x, both), weighted

    def _standardised(self, x: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy((x - self.center_) / self.spread_)

    def _of_target(self, y: Tensor) -> Tensor:
        return (y - self.target_center_) / self.target_spread_

    def _checked_input(self, X: Any) -> NDArray[np.float64]:
        check_is_fitted(self)
        return _dense(validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False))

    def _prediction(self, x: NDArray[np.float64]) -> Prediction:
        # In double precision a row's prediction does not depend on which rows are asked for with it.
        estimate = copy.deepcopy(self.estimate_).double()
        # A handful of rows may leave twins that are the same: the mean says all that its draws would.
        samples = self.samples if estimate.partition.sigma.any() else 0
        return estimate.predict(self._standardised(x), samples, self._task, seed=self.seed_)


def _dense(x: Any) -> NDArray[np.float64]:
    """Row by row in memory, as products of matrices round otherwise where a table lies column by column."""
    return np.ascontiguousarray(x.toarray() if hasattr(x, "toarray") else x, np.float64)
