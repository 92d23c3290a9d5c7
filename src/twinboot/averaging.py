"""The mean over the epochs of the twins' mean, with more weight on later ones.

A sampling reset moves the mean of the twins at random, by sigma^2 / 2 each time; the mean over several resets moves
less. After t of them the weight of number s is about proportional to s^power, so no length of a run has to be known
before (polynomial decay, Shamir and Zhang 2013, section 4):

    average_t = average_{t-1} + (power + 1) / (power + t) * (mean_t - average_{t-1})
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .estimate import Estimate
from .replicate import Places, wide


class Average:
    """Means of twins, averaged; `power` 0 weighs all alike, and infinity keeps the last alone.

    >>> average = Average(power=1)
    >>> models = [torch.nn.Linear(1, 1, bias=False) for _ in range(3)]
    >>> for value, model in enumerate(models):
    ...     _ = torch.nn.init.constant_(model.weight, value)
    >>> from twinboot import Twins
    >>> [average.add(Twins(model).estimate()).module.weight.item() for model in models]  # 0; (0 + 2*1) / 3; ...
    [0.0, 0.666..., 1.333...]
    """

    def __init__(self, power: float) -> None:
        if not power >= 0:
            raise ValueError(f"the power of the average must be at least 0, or infinity for none, not {power!r}.")
        self.power, self.count = power, 0
        self.weights: list[Tensor] = []

    @torch.no_grad()
    def add(self, estimate: Estimate) -> Estimate:
        """Take in the mean of the twins, and put the average in its place; sigma stays as it is."""
        places = Places(estimate.module, list(estimate.partition.parameter_shapes)).read()
        self.count += 1
        share = (self.power + 1) / (self.power + self.count) if self.power < float("inf") else 1.0
        if self.count == 1:
            self.weights = [wide(w).clone() for w in places]
        else:
            torch._foreach_lerp_(self.weights, [wide(w) for w in places], share)
        for weight, average in zip(places, self.weights, strict=True):
            weight.copy_(average)
        return estimate

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.weights = state["count"], list(state["weights"])
