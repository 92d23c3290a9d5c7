"""The epoch of `fit` that is kept, and the history of the run.

After each epoch the mean of the twins, averaged over the epochs, is judged by the samples that no twin saw. Where the
twins see everything nothing is judged, and the last epoch is kept.
"""

from __future__ import annotations

import math
import time
from typing import Any

from .._core.copies import Places
from ..estimate.estimate import Estimate
from .averaging import Average
from .epoch import Training


class Best:
    """The estimate to keep, and how the run went."""

    def __init__(self, run: Training, average: Average) -> None:
        self.run, self.average = run, average
        names = ("epoch", "train", "unseen", "accuracy", "sigma_least", "sigma_most", "rate", "seconds")
        shown = {"unseen": run.judges, "accuracy": run.judges and run.classifies}
        self.history: dict[str, list[float]] = {name: [] for name in names if shown.get(name, True)}
        self.epoch, self.lowest = 0, math.inf
        self.estimate = run.estimate()

    def look(self, epoch: int, train: float, rate: float, began: float) -> Estimate:
        """Judge the twins as they are, and keep their estimate if it is the best so far."""
        estimate = self.run.estimate()
        self.average.take(Places(estimate.module, list(estimate.partition.parameter_shapes)).read())
        judges = self.run.judges
        unseen, accuracy = self.run.judge(estimate) if judges else (math.nan, math.nan)
        seconds = time.perf_counter() - began
        if judges and not math.isfinite(unseen):
            raise FloatingPointError(
                f"the mean model's loss on unseen samples is not finite in epoch {epoch}: look for bad ones among "
                "those of bootstrap.unseen, or lower the learning rate."
            )
        sigma = self.run.twins.partition.sigma
        row = {"epoch": epoch, "train": train, "unseen": unseen, "accuracy": accuracy, "rate": rate, "seconds": seconds}
        row |= {"sigma_least": sigma.min().item(), "sigma_most": sigma.max().item()}
        for name, values in self.history.items():
            values.append(row[name])
        if not judges or unseen < self.lowest:
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
