"""The ways in which twins are trained on images, to find out what helps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ... import resets
from ...data.bootstrap import Bootstrap, Kind
from ...data.loader import Resample
from ...resets import Mode, Schedule
from .task import Task

DROPOUT = 0.2  # after each max-pooling, of the single model that has it; twins have half or a quarter of it
FIRST = 10  # steps until the first of the early resets


@dataclass(frozen=True)
class Recipe:
    """How twins are trained; the defaults are those of `fit`."""

    mode: Mode = "sample"
    resample: Resample = "counts"
    decay: bool = False  # of the learning rate, along a cosine
    noise: float = 1.0
    pooled: float = 0.0  # of the gradients
    scale: float = 1.0  # times sigma, of the draws for a prediction
    reset: int | None = None  # every so many epochs
    early: bool = False  # more resets at first: ten steps apart, each interval a tenth longer, up to a plain epoch
    groups: str = "layer"
    dropout: float = 0.0  # in training, and then in draws for a prediction, too
    kind: Kind = "multinomial"  # of bootstrap
    cover: bool = False  # all images are trained on, and none is left to choose by
    longer: float = 1.0  # times the epochs of a single model, after which twins are shown besides

    def bootstrap(self, n: int, seed: int) -> Bootstrap:
        return Bootstrap(n, seed=seed, kind=self.kind, cover=self.cover)

    def schedule(self, task: Task) -> Schedule | None:
        """When to reset the twins; None for the default of `fit`."""
        if self.early:
            steps = math.ceil(len(task.y) / task.batch)  # of an epoch of a single model
            return resets.steps(resets.growing(FIRST, 1.1, most=max(FIRST, steps)))
        return None if self.reset is None else resets.every(self.reset)

    def shown(self, of_single: int) -> int:
        """The epoch that is shown beside the last one of a single model."""
        return math.ceil(self.longer * of_single)

    def epochs(self, of_single: int) -> int:
        return max(self.shown(of_single), of_single)


# Twins that pool their gradients part more slowly, 2.4 times with Adam and noisy gradients (`pool_gradients`): draws
# for a prediction have so much more of sigma. For the noise in training 3, 3.3, 4 and 5.5 were tried with one seed,
# judged by images of the training files that nothing was trained on: at 3 the twins overfit, at 5.5 they learn slowly.
# Longer: 26 epochs instead of 24, to see what more time does.
# With some dropout, too: noise 1, 2 and 3.3 with dropout .1, and 3 with .05, were tried in the same way; the last was
# best. Masks take time: to stay below 1.4 times that of a single model, 23 epochs are shown beside 24.
POOLED = Recipe(kind="split", cover=True, pooled=0.7, noise=4.0, scale=2.4, longer=1.08)
POOLED_DROPOUT = replace(POOLED, noise=3.0, dropout=DROPOUT / 4, longer=0.958)

# Method -> its name in the table, and what it is.
TWINS = {
    "twins": ("Twin-Boot", Recipe()),
    "twins-draws": ("Twin-Boot with draws", Recipe(resample="draws")),
    "twins-all": ("Twin-Boot on all images", Recipe(cover=True)),
    "twins-split": ("Twin-Boot on divided images", Recipe(kind="split", cover=True, longer=1.125)),
    "twins-pooled": ("Twin-Boot with pooled gradients", POOLED),
    "twins-pooled-dropout": ("Twin-Boot with pooled gradients and dropout", POOLED_DROPOUT),
    "twins-pooled-quiet": ("Twin-Boot with pooled gradients, less noise", replace(POOLED, noise=3.0, longer=1.0)),
    "twins-pooled-loud": ("Twin-Boot with pooled gradients, more noise", replace(POOLED, noise=5.5, longer=1.0)),
    "twins-pooled-halves": ("Twin-Boot with pooled gradients on halves", replace(POOLED, cover=False, longer=1.0)),
    "twins-halves": ("Twin-Boot on halves", Recipe(kind="split")),
    "twins-early": ("Twin-Boot with early resets", Recipe(early=True)),
    "twins-halves-early": ("Twin-Boot on halves with early resets", Recipe(kind="split", early=True)),
    "twins-units": ("Twin-Boot with a sigma for each unit", Recipe(groups="unit")),
    "twins-centered": ("Twin-Boot with the centered reset", Recipe(mode="centered")),
    "twins-mean": ("Twin-Boot with the mean reset", Recipe(mode="mean")),
    "twins-rare": ("Twin-Boot with a reset every 4 epochs", Recipe(reset=4)),
    "twins-quiet": ("Twin-Boot with half of the noise", Recipe(noise=0.5)),
    "twins-loud": ("Twin-Boot with twice the noise", Recipe(noise=2.0)),
    "twins-decay": ("Twin-Boot with decay of the rate, centered reset", Recipe(mode="centered", decay=True)),
    "twins-dropout": ("Twin-Boot with dropout", Recipe(dropout=DROPOUT / 2)),
}
