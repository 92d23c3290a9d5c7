"""Intervals that contain a new value with a chosen probability, whatever the distribution of the errors.

Split conformal prediction. For samples i = 1 ... n that nothing was fitted to, with predictions m_i of scale s_i:

    score_i = |y_i - m_i| / s_i
    q = the ceil((n + 1) level)-th smallest score, or infinity if n is too small for it
    interval = m +- q s

If those samples and a new one are exchangeable, the interval contains the new value with a probability of at least
`level`, and of at most level + 1 / (n + 1) if no scores are equal. This holds on average over samples, not for each.
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
    """The score that a new one exceeds with a probability of at most 1 - level. With weights, some samples count more;
    the new one has their mean weight, and the guarantee is approximate.

    >>> quantile(np.arange(1.0, 20.0), 0.9)  # 19 scores: the 18th
    18.0
    >>> quantile(np.arange(1.0, 9.0), 0.9)  # 8 scores are too few for 90 %
    inf
    """
    if isinstance(level, bool) or not isinstance(level, Real) or not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, such as 0.9, not {shown(level)}.")
    scores = _numbers("scores", scores)
    if not len(scores):
        return math.inf
    weight = np.ones(len(scores)) if weight is None else _numbers("weight", weight)
    if weight.shape != scores.shape or not 0 < weight.max() < math.inf or weight.min() < 0:
        raise ValueError(f"weight must have {len(scores)} finite numbers, one per score: none below 0, and one above.")
    weight = weight / weight.max()  # only ratios matter, and sums of large weights would overflow
    scores, weight = np.append(scores, math.inf), np.append(weight, weight.mean())  # the new sample, as the worst case
    order = np.argsort(scores, kind="stable")
    below = np.cumsum(weight[order])
    needed = level * below[-1] * (1 - 1e-12)  # so that rounding does not make 0.9 * 10 more than 9
    return float(scores[order[np.searchsorted(below, needed)]])


def _numbers(name: str, values: Any) -> Floats:
    with suppress(TypeError, ValueError, RuntimeError):  # for values that cannot become an array
        found = np.asarray(values)
        if found.dtype.kind in "buif" and found.ndim == 1 and not np.isnan(found).any():
            return found.astype(np.float64)
    raise ValueError(f"{name} must be a one-dimensional array of real numbers without NaN.")
