"""The settings of the regression benchmark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...data.bootstrap import UNSEEN
from ..datasets.array_files import checksum
from .data import LAYOUT


@dataclass(frozen=True, kw_only=True)
class Config:
    """Nine UCI regression sets with their standard splits: Twin-Boot against a single network, from a file of yours."""

    data: str | None = None
    """FILE.npz with [rows, inputs + target] as NAME and [splits, test rows] as NAME__test_idx for each set."""
    checksum: str = ""
    """SHA-256 of that file, found when it is first read: a run is not continued with another file under its name."""
    sets: tuple[str, ...] = ()
    """Names of the sets to take; without any, all of the file."""
    splits: int = 20
    """Of each set at most, or as many as the file has: 20 are the standard, 5 for protein."""
    hidden: int = 50
    """ReLU units of the one hidden layer: the literature's number, there for all sets but the largest."""
    batch: int = 32
    """Rows of a step. The seismic task of Appendix A.6 has 32, too."""
    large: int = 2000
    """From so many training rows on a set is large: between the five small sets and the four others."""
    large_batch: int = 256
    """Rows of a step for large sets, so that they take no more steps than small ones."""
    updates: int = 2000
    """Steps on all rows, of which the epochs of all methods follow. The run takes some 45 minutes of one core."""
    epochs: int = 40
    """At least, however large a set is: the passes that the literature's first comparison made."""
    rate: float = 0.01
    """Learning rate of Adam. Of 0.003, 0.01 and 0.03 by hold-out and by unseen the best for most of four sets."""
    groups: Literal["layer", "tensor", "unit"] = "unit"
    """Weights that share one sigma. By unseen rows far better than "layer" for energy, a little worse for 2 of 5."""
    mode: Literal["sample", "mean", "centered"] = "centered"
    """How twins are reset, after each epoch. By unseen rows better than "sample" for 3 sets of 4."""
    hold_out: float = round(UNSEEN, 3)
    """Share of the training rows that stops the single network: as many as two bootstrap samples leave out, e^-2."""
    samples: int = 32
    """Draws of the weights for a Monte Carlo prediction: the default of `predict`."""
    floor: float = 0.05
    """Least share of the squared residuals that is put down to noise, where the draws alone vary more than those."""
    seed: int = 0
    """Of everything random. Splits are those of the file."""

    def __post_init__(self) -> None:
        for name in ("splits", "hidden", "batch", "large", "large_batch", "updates", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2, for a spread, not {self.samples}.")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be greater than 0, not {self.rate}.")
        if not (0.02 <= self.hold_out <= 0.5 and 0 < self.floor <= 1):
            raise ValueError(
                f"hold_out must lie between 0.02 and 0.5, floor above 0 and up to 1, not {self.hold_out} and "
                f"{self.floor}."
            )
        if len(set(self.sets)) < len(self.sets):
            raise ValueError(f"sets must have no name twice, not {self.sets}.")
        if self.data is not None and not self.checksum:
            object.__setattr__(self, "checksum", checksum(self.data))

    def batch_of(self, rows: int) -> int:
        """Rows of a step on a set of so many training rows."""
        return self.batch if rows < self.large else self.large_batch

    def epochs_of(self, rows: int) -> int:
        """Passes over a set of so many training rows."""
        return max(self.epochs, round(self.updates / math.ceil(rows / self.batch_of(rows))))


QUICK = Config(splits=3, updates=1000, epochs=10)
NEEDED = f"uci needs its data, which are not part of this package: name them with --data FILE, {LAYOUT}."
