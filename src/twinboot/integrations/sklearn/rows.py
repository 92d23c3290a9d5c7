"""The rows of a table as twins train on them: an order that is the table's own, and who sees which row.

What is drawn for a row follows from the row itself and a seed, not from its place: each row gets a hash of its numbers,
and the hashes are the order. So a table in another order, a weight of 0 instead of a missing row, and a weight of 2
instead of a row that comes twice, all give the same training, bit for bit. (An order by the numbers themselves would do
that, too, but a seed would then always pick the same ranks, and what it sets aside would be no fair sample.) Weights
are not hashed, so that other units of them leave the order as it is. Other units of inputs or targets are other numbers
and give another order, as another seed does.
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

from ..._core.seeds import derive
from ...data.bootstrap import Bootstrap

Floats = NDArray[np.float64]
TRIES = 100  # bootstraps of a small table, until two rows are unseen
MOST = 10  # a weight that may still be a number of repetitions: each costs as much as a row


@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs [n, d], targets [n] and weights [n] with a mean of 1, in their own order."""

    x: Floats
    y: Floats
    weight: Floats


def ordered(x: Floats, y: Floats, weight: Floats, seed: int) -> Rows:
    """Rows by their hashes, equal ones by their weights. Rows with a weight of 0 are to be left out before.

    Weights that are all the same are as none. Whole numbers up to 10 repeat a row so many times. Others stay with their
    rows, and only their ratios matter.
    """
    repeats = np.ones(len(weight), np.int64)
    if weight.min() == weight.max():
        weight = np.ones(len(weight))
    elif weight.max() <= MOST and (weight == np.round(weight)).all():
        repeats, weight = weight.astype(np.int64), np.ones(len(weight))
    else:
        weight = weight / unit(weight)
        weight = weight / weight.mean()
    x, y = x + 0.0, y + 0.0  # -0.0 is 0.0: they are equal, but not their bytes
    key = derive(seed, "order").to_bytes(8, "little")
    hashes = [
        blake2b(np.r_[target, row].tobytes(), digest_size=8, key=key).digest() for row, target in zip(x, y, strict=True)
    ]
    places = np.lexsort((weight, np.frombuffer(b"".join(hashes), np.uint64)))
    places = np.repeat(places, repeats[places])
    return Rows(x[places], y[places], weight[places])


@dataclass(frozen=True, eq=False)
class Shares:
    """Who sees which rows: `train` are those of `bootstrap`, with the unseen ones that stop; `aside` is left alone."""

    train: Tensor
    aside: Tensor
    bootstrap: Bootstrap

    @property
    def seen(self) -> Tensor:
        return self.train[self.bootstrap.seen]

    @property
    def stopping(self) -> Tensor:
        return self.train[self.bootstrap.unseen]


def shared(n: int, seed: int, set_aside: bool) -> Shares:
    """Bootstrap samples that leave some rows unseen; every second one of those is set aside, if asked for.

    Small tables may have no unseen rows. Then other bootstrap samples are drawn until there are two, or one where two
    are too much to ask for. That looks at numbers of rows alone, never at the rows.
    """
    for attempt in itertools.count():
        drawn = Bootstrap(n, seed=derive(seed, "bootstrap", attempt))
        unseen = drawn.unseen
        if len(unseen) >= (2 if attempt < TRIES and n > 2 else 1):
            break
    aside = unseen[1::2] if set_aside else unseen[:0]
    kept = torch.ones(n, dtype=torch.bool)
    kept[aside] = False
    bootstrap = copy.copy(drawn)
    bootstrap.n, bootstrap.counts = int(kept.sum()), drawn.counts[:, kept]
    return Shares(kept.nonzero().squeeze(1), aside, bootstrap)


def unit(values: Floats) -> Floats:
    """The power of two at or below the largest absolute value along the rows; 1 where all values are 0.

    In these units squares and sums neither over- nor underflow, whatever the units of the values. Dividing by a power
    of two is exact: what is computed from the quotients is the same as from the values, bit for bit.
    """
    largest = np.abs(values).max(axis=0)
    return np.where(largest > 0, np.ldexp(1.0, np.frexp(largest)[1] - 1), 1.0)


def moments(values: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """The mean and the standard deviation along the rows; instead of the latter `unit` where all values are the
    same."""
    scale = unit(values)
    values = values / scale
    center = np.average(values, axis=0, weights=weight)
    spread = scale * np.sqrt(np.average((values - center) ** 2, axis=0, weights=weight))
    # Rounding may leave a spread that is tiny but not 0.
    return scale * center, np.where((np.ptp(values, axis=0) > 0) & (spread > 0), spread, scale)
