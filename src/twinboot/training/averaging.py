"""The mean over the epochs of the twins' mean, with more weight on later ones.

A sampling reset moves the mean of the twins at random, by sigma^2 / 2 each time; the mean over several resets moves
less. After t of them the weight of number s is about proportional to s^power, so no length of a run has to be known
before (polynomial decay, Shamir and Zhang 2013, section 4):

    average_t = average_{t-1} + (power + 1) / (power + t) * (mean_t - average_{t-1})
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.checks import require_types
from .._core.tensors import wide

POWER = 8.0  # half of the weight lies on the last 7 % of a run; 1 and 3 were behind where twins still learned


class Average:
    """An average of weights; `power` 0 counts all alike, and infinity keeps the last alone.

    >>> average, found = Average(power=1), []
    >>> for value in (0.0, 1.0, 2.0):
    ...     weight = torch.tensor(value)
    ...     average.take([weight])
    ...     found.append(weight.item())
    >>> found  # 0; (0 + 2 * 1) / 3; (0 + 2 * 1 + 3 * 2) / 6
    [0.0, 0.666..., 1.333...]
    """

    def __init__(self, power: float) -> None:
        require_types(Average.__init__, locals())
        if not power >= 0:
            raise ValueError(f"the power of the average must be at least 0, or infinity for none, not {power!r}.")
        self.power, self.count = power, 0
        self.weights: list[Tensor] = []

    @torch.no_grad()
    def take(self, weights: Sequence[Tensor]) -> None:
        """Take weights in, and put the average in their place."""
        self.count += 1
        if self.count == 1:
            self.weights = [wide(w).clone() for w in weights]
        share = (self.power + 1) / (self.power + self.count) if self.power < math.inf else 1.0
        for average, weight in zip(self.weights, weights, strict=True):
            average.lerp_(wide(weight), share)
            weight.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.weights = state["count"], list(state["weights"])
