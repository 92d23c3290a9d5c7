"""Intervals and sets that contain a new value or class with a chosen probability, however wrong the model is.

Split conformal prediction. For samples i = 1 ... n that nothing was fitted to and that chose nothing, a score says how
badly the value or class was predicted:

    values     score_i = |y_i - m_i| / s_i, for the prediction m_i of scale s_i
    classes    score_i = the sum of the probabilities of all classes that are more probable than y_i
    q          = the ceil((n + 1) level)-th smallest score, or infinity if n is too small for it
    interval   = m +- q s
    set        = the classes whose score is at most q

If those samples and a new one are exchangeable, the interval or set contains the new one with a probability of at least
`level`, and of at most level + 1 / (n + 1) if no scores are equal. This holds on average over samples, not for each.

The sets are adaptive prediction sets (Romano, Sesia and Candes 2020) without randomization: the most probable class has
score 0, so it is in each set. If it is the right one more often than `level`, all sets have one class.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._core.checks import require_level

Floats = NDArray[np.float64]
MIN_NOISE = 0.05  # least share of the squared errors that counts as noise, where the draws vary more than that


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of calibration samples.

    Attributes:
        values: [samples, ...], float64 and ascending: one score for each sample, or for each value of each sample.
        noise: for `"regression"`, the standard deviation of a measurement, which the scale of the scores includes.
            Without it, the scale is 1.
        settings: how the samples were predicted. Other predictions have other scores.
    """

    values: Tensor
    noise: float | None
    settings: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.values)

    def quantile(self, level: float) -> Tensor:
        """The score that a new one exceeds with a probability of at most 1 - level. Warns if that is infinity.

        >>> Scores(torch.arange(1.0, 20.0), None, {}).quantile(0.9)  # 19 scores: the 18th
        tensor(18.)
        """
        require_level(level)
        rank = math.ceil((len(self) + 1) * float(level) * (1 - 1e-12))  # despite rounding, 0.9 * 10 is 9
        if rank <= len(self):
            return self.values[rank - 1]
        warnings.warn(
            f"sets of level {float(level):g} have all classes, and intervals are infinite: they need "
            f"{needed_for(float(level))} samples for calibration, but there are {len(self)}.",
            stacklevel=3,
        )
        return torch.full_like(self.values[:1].sum(0), math.inf)


def needed_for(level: float) -> int:
    """The least number of calibration samples with which a level has a finite quantile.

    >>> needed_for(0.9)
    9
    """
    return math.ceil(level / (1 - level) - 1e-9)  # 0.9 / 0.1 is 9, despite rounding


def of_classes(probs: Tensor) -> Tensor:
    """For each class, along dimension 1, the sum of the probabilities of the more probable ones, in float64.

    >>> of_classes(torch.tensor([[0.25, 0.625, 0.125]]))
    tensor([[0.6250, 0.0000, 0.8750]], dtype=torch.float64)
    """
    ranked, order = probs.double().sort(dim=1, descending=True, stable=True)
    return torch.zeros_like(ranked).scatter_(1, order, (ranked.cumsum(1) - ranked).clamp_(min=0))


def noise_variance(errors: Floats, spread: Floats, weight: Floats | None = None) -> float:
    """The variance of measurements that the spread of predictions leaves to explain, from their errors."""
    squares = np.average(errors**2, weights=weight)
    return float(np.maximum(squares - np.average(spread**2, weights=weight), MIN_NOISE * squares))


def quantile(scores: Floats, level: float, weight: Floats | None = None) -> float:
    """The score that a new one exceeds with a probability of at most 1 - level. With weights, some samples count more;
    the new one has their mean weight, and the guarantee is approximate.

    >>> quantile(np.arange(1.0, 20.0), 0.9)  # 19 scores: the 18th
    18.0
    >>> quantile(np.arange(1.0, 9.0), 0.9)  # 8 scores are too few for 90 %
    inf
    """
    require_level(level)
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
