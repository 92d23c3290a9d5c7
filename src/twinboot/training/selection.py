"""Which state of a run `fit` keeps, and the history of the run.

After each epoch the mean of the twins is averaged over the epochs, and its loss on the out-of-bag samples is computed.
The epoch with the lowest loss is kept. Where the twins see every sample there is no such loss, and the last epoch is
kept.

A sampling reset moves the mean of the twins at random, by a variance of sigma^2 / 2 each time; the mean over several
resets moves less. After t epochs the weight of epoch s is about proportional to s^power, so the length of the run need
not be known beforehand (polynomial decay, Shamir and Zhang 2013, section 4):

    average_t = average_{t-1} + (power + 1) / (power + t) * (mean_t - average_{t-1})
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.copies import Places
from .._core.tensors import wide
from ..estimate.estimate import Estimate
from .epoch import Training


# `invert` and the seismic experiment choose their own best states (`_EarlyStopping`, `_Snapshots`). The three have
# nothing to say once: here the lower of two losses wins, and the choice is part of a checkpoint; there a state must be
# better by a standard error, over a vector of losses; and the experiment chooses for many problems at once, by masks.
class Selection:
    """The estimate to keep, and how the run went."""

    def __init__(self, run: Training, average: Average) -> None:
        self.run, self.average = run, average
        names = ("epoch", "train", "unseen", "accuracy", "sigma_least", "sigma_most", "lr", "seconds")
        shown = {"unseen": run.validates, "accuracy": run.validates and run.classifies}
        self.history: dict[str, list[float]] = {name: [] for name in names if shown.get(name, True)}
        self.epoch, self.lowest = 0, math.inf
        self.estimate = run.estimate()

    def look(self, epoch: int, train: float, lr: float, began: float) -> Estimate:
        """Validate the current twins, and keep their estimate if it is the best so far."""
        estimate = self.run.estimate()
        self.average.take(Places(estimate.module, list(estimate.partition.parameter_shapes)).read())
        validates = self.run.validates
        unseen, accuracy = self.run.validate(estimate) if validates else (math.nan, math.nan)
        seconds = time.perf_counter() - began
        if validates and not math.isfinite(unseen):
            raise FloatingPointError(
                f"the out-of-bag loss of the mean model is not finite in epoch {epoch}: check the samples of "
                "bootstrap.unseen, or lower the learning rate."
            )
        sigma = self.run.twins.partition.sigma
        row = {"epoch": epoch, "train": train, "unseen": unseen, "accuracy": accuracy, "lr": lr, "seconds": seconds}
        row |= {"sigma_least": sigma.min().item(), "sigma_most": sigma.max().item()}
        for name, values in self.history.items():
            values.append(row[name])
        if not validates or unseen < self.lowest:
            self.estimate, self.epoch, self.lowest = estimate, epoch, unseen
        return estimate

    def last(self) -> dict[str, float]:
        return {name: values[-1] for name, values in self.history.items()}

    def state_dict(self) -> dict[str, Any]:
        best = {"epoch": self.epoch, "estimate": self.estimate.state_dict()}
        return {"history": self.history, "best": best, "average": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = state["history"]
        self.average.load_state_dict(state["average"])
        self.epoch = state["best"]["epoch"]
        self.lowest = min(self.history.get("unseen", [math.inf]))
        self.estimate.load_state_dict(state["best"]["estimate"])


class Average:
    """An average of weights. With `power` 0 all count alike; with infinity it is the last one.

    >>> average, found = Average(power=1), []
    >>> for value in (0.0, 1.0, 2.0):
    ...     weight = torch.tensor(value)
    ...     average.take([weight])
    ...     found.append(weight.item())
    >>> found  # 0; (0 + 2 * 1) / 3; (0 + 2 * 1 + 3 * 2) / 6
    [0.0, 0.666..., 1.333...]
    """

    def __init__(self, power: float) -> None:
        self.power, self.count = power, 0
        self.weights: list[Tensor] = []

    @torch.no_grad()
    def take(self, weights: Sequence[Tensor]) -> None:
        """Add weights to the average, and replace them by it."""
        self.count += 1
        if self.count == 1:
            self.weights = [wide(w).clone() for w in weights]
        newest = (self.power + 1) / (self.power + self.count) if self.power < math.inf else 1.0
        for average, weight in zip(self.weights, weights, strict=True):
            average.lerp_(wide(weight), newest)
            weight.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.weights = state["count"], list(state["weights"])
