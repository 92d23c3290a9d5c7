"""Intervals that hold a new value with a probability of their own choice, whatever the distribution of the errors.

Split conformal prediction. For rows i = 1 ... n that nothing was fitted to, with predictions m_i of scale s_i:

    score_i = |y_i - m_i| / s_i
    q = the ceil((n + 1) level)-th smallest score, or infinity if n is too small for it
    interval = m +- q s

If those rows and a new one are exchangeable, the interval holds the new value with a probability of at least `level`,
and of at most level + 1 / (n + 1) if no scores are equal. That is an average over all rows that may come, not for each.
"""

from __future__ import annotations

import math
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._core.checks import shown

Floats = NDArray[np.float64]


def quantile(scores: Floats, level: float, weight: Floats | None = None) -> float:
    """The score that a new one exceeds with a probability of at most 1 - level. Weights may make some rows count more;
    the new one then counts as a row of mean weight, and the guarantee is approximate.

    >>> quantile(np.arange(1.0, 20.0), 0.9)  # 19 scores: the 18th
    18.0
    >>> quantile(np.arange(1.0, 9.0), 0.9)  # 8 scores say nothing of 90 %
    inf
    """
    if isinstance(level, bool) or not isinstance(level, Real) or not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, such as 0.9, not {shown(level)}.")
    scores = _numbers("scores", scores)
    if not len(scores):
        return math.inf
    weight = np.ones(len(scores)) if weight is None else _numbers("weight", weight)
    if weight.shape != scores.shape or not 0 < weight.max() < math.inf or weight.min() < 0:
        raise ValueError(
            f"there must be a finite weight of at least 0 for each of the {len(scores)} scores, and one above 0."
        )
    weight = weight / weight.max()  # only ratios matter, and sums of large ones would be infinite
    order = np.argsort(scores, kind="stable")
    below = np.cumsum(weight[order])
    needed = level * (below[-1] + weight.mean()) * (1 - 1e-12)  # 0.9 * 10 is to be 9 whatever rounding makes of it
    place = int(np.searchsorted(below, needed))
    return float(scores[order[place]]) if place < len(scores) else math.inf


def _numbers(name: str, values: Any) -> Floats:
    with suppress(TypeError, ValueError, RuntimeError):  # of what cannot be an array
        found = np.asarray(values)
        if found.dtype.kind in "buif" and found.ndim == 1 and not np.isnan(found).any():
            return found.astype(np.float64)
    raise ValueError(f"{name} must be a row of real numbers, without NaN.")
