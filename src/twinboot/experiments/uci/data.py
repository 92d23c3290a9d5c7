"""Data sets with their test rows: read from a file, and standardised by the training rows.

The file is an .npz with two arrays for each set: NAME, [rows, inputs + 1], the target in the last column, and
NAME__test_idx, [splits, test rows], the test rows of each split.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..datasets.array_files import arrays

TEST = "__test_idx"
LAYOUT = f"an .npz file with [rows, inputs + target] as NAME and [splits, test rows] as NAME{TEST} for each set"
LEAST = 50  # training rows: with fewer, two bootstrap samples may leave none out-of-bag


@dataclass(frozen=True, eq=False)
class Table:
    """A data set: its rows, the target in the last column, and the test rows of each split."""

    values: NDArray[np.float64]
    test: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Split:
    """Inputs and targets [n, 1] of one split, in units of the mean and the standard deviation of the training rows."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    unit: float  # standard deviation of the target before it was standardised


def read(path: str) -> dict[str, Table]:
    """All sets of a file by name, in its order."""
    found = arrays(path)
    names = [name for name in found if not name.endswith(TEST)]
    if not names:
        raise ValueError(f"{path} holds no data set: it must be {LAYOUT}.")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 _.-]*", name):  # it names files of the run
            raise ValueError(f"{path} names a set {name!r}: use letters, digits, spaces, dots, dashes, underscores.")
        if name + TEST not in found:
            raise ValueError(f"{path} has {name} but not {name}{TEST}, the test rows of each split.")
    return {name: _table(f"{name} in {path}", found[name], found[name + TEST]) for name in names}


def _table(where: str, values: NDArray[Any], test: NDArray[Any]) -> Table:
    if values.ndim != 2 or values.shape[1] < 2 or values.dtype.kind not in "fiu":
        raise ValueError(f"{where} must be numbers [rows, inputs + target], not {values.dtype} of {values.shape}.")
    if not np.isfinite(values).all():
        raise ValueError(f"{where} has values that are not finite.")
    if test.ndim != 2 or test.size == 0 or test.dtype.kind not in "iu":
        raise ValueError(
            f"the test rows of {where} must be whole numbers [splits, rows], not {test.dtype} of {test.shape}."
        )
    if test.min() < 0 or test.max() >= len(values):
        raise ValueError(
            f"the test rows of {where} must lie between 0 and {len(values) - 1}, not {test.min()} and {test.max()}."
        )
    if any(len(np.unique(rows)) < len(rows) for rows in test):
        raise ValueError(f"the test rows of {where} have the same row twice in one split.")
    if len(values) - test.shape[1] < LEAST:
        raise ValueError(f"{where} leaves {len(values) - test.shape[1]} rows to train on: at least {LEAST} are needed.")
    if np.ptp(values[:, -1]) == 0:
        raise ValueError(f"{where} has the same target in every row: there is nothing to predict.")
    return Table(values.astype(np.float64), test.astype(np.int64))


def split(table: Table, which: int) -> Split:
    """One split of a table, standardised by all of its training rows, whatever a method holds out of them. A constant
    column becomes 0.

    >>> data = split(Table(np.random.default_rng(0).normal(5, 3, (100, 3)), np.arange(10)[None]), 0)
    >>> data.train_x.shape, data.test_y.shape, data.train_x.mean().abs().item() < 1e-6
    (torch.Size([90, 2]), torch.Size([10, 1]), True)
    """
    tests = np.zeros(len(table.values), bool)
    tests[table.test[which]] = True
    train = table.values[~tests]
    center, spread = train.mean(0), train.std(0)
    spread[np.ptp(train, axis=0) == 0] = 1.0  # rounding may leave a tiny spread
    rows = torch.from_numpy((table.values - center) / spread).float()
    x, y = rows[:, :-1], rows[:, -1:]
    return Split(x[~tests], y[~tests], x[tests], y[tests], float(spread[-1]))
