"""What is to be learned from images, and what a method leaves: each row of the table is a way to predict with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from torch import Tensor, nn

from ..runner.experiment import Tick
from .single import logits_of

Predict = Callable[[Tensor], Tensor]  # images -> probabilities [images, classes]


@dataclass(frozen=True, eq=False)
class Task:
    """Images for training, a network for them, and how to train it."""

    x: Tensor
    y: Tensor
    network: Callable[..., nn.Module]  # of dropout and seed
    epochs: int
    batch: int
    rate: float
    samples: int
    seed: int


@dataclass(frozen=True, eq=False)
class Trained:
    """Row of the table -> how it predicts, and how many epochs it took for one of a single model on all images; which
    images were trained on, and which were not and chose the epoch; how training went."""

    rows: dict[str, Predict]
    trained_on: Tensor
    curve: pd.DataFrame
    sigma: pd.DataFrame = field(default_factory=pd.DataFrame)
    epochs: dict[str, float] = field(default_factory=dict)  # 1 where nothing is said
    unseen: Tensor | None = None


Method = Callable[[Task, Path, Tick], Trained]


def of_mean(model: nn.Module, temperature: float = 1.0) -> Predict:
    """One model, without draws of anything."""
    return lambda x: (logits_of(model, x) / temperature).softmax(1)
