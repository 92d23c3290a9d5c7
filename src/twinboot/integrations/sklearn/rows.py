"""Table rows in an order of their own, and which rows train the twins, stop the training or calibrate.

What happens to a row depends on its numbers and a seed, not on its place in the table: rows are sorted by a hash of
their numbers. So three pairs of tables give the same training, bit for bit: one and the same in another order; with a
row of weight 0 and without the row; with a row of weight 2 and with the row twice. Sorting by the numbers themselves
would do that, too, but then a seed would pick the same ranks in each table, which is no fair sample. Weights are not
hashed, so a common factor on them does not change the order. Other units of inputs or targets do change it.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import Bootstrap
from ..._core.seeds import derive

Floats = NDArray[np.float64]
TRIES = 100  # bootstraps to try until two rows of a small table are out-of-bag
MAX_REPEATS = 10  # larger weights multiply the loss instead: each repetition costs as much as a row


@dataclass(frozen=True, eq=False)
class Rows:
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


@dataclass(frozen=True, eq=False)
class RowSplit:
    """Indices of rows: `seen` by a twin, `stopping` (out-of-bag), and `calibration` (out-of-bag and set aside).

    `fit` gets the rows `train`, which are the first two kinds, and the bootstrap of these.
    """

    train: Tensor
    calibration: Tensor
    bootstrap: Bootstrap

    @property
    def seen(self) -> Tensor:
        return self.train[self.bootstrap.seen]

    @property
    def stopping(self) -> Tensor:
        return self.train[self.bootstrap.unseen]


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
    return RowSplit(is_train.nonzero().squeeze(1), calibration, train_bootstrap)


def power_of_two(values: Floats) -> Floats:
    """The largest power of two up to the largest absolute value of each column; 1 where all values are 0.

    After division by it, squares and sums neither overflow nor underflow. The division is exact, so results do not
    depend on the units, bit for bit.
    """
    largest = np.abs(values).max(axis=0)
    return np.where(largest > 0, np.ldexp(1.0, np.frexp(largest)[1] - 1), 1.0)


def mean_and_scale(values: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of each column; for constant columns, `power_of_two` replaces the latter."""
    unit = power_of_two(values)
    values = values / unit
    mean = np.average(values, axis=0, weights=weight)
    std = unit * np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weight))
    # Rounding may give a constant column a tiny standard deviation.
    return unit * mean, np.where((np.ptp(values, axis=0) > 0) & (std > 0), std, unit)
