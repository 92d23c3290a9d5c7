"""The settings, and ways to predict a number with its uncertainty: a single network, and twins of it.

Each method estimates the noise of the targets from training rows that it did not train on, if there are any:

    noise^2 = mean of (residual^2 - variance over draws of the weights), but at least a small share of residual^2
"""

from __future__ import annotations

import copy
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ... import Prediction, Protocol, fit, resets
from ..._core.seeds import derive, seeded
from ..datasets.array_files import checksum
from ..runner.experiment import require_at_least
from .data import Split

LEVEL = 0.9  # of central intervals
TINY = 1e-12  # the least noise^2 of a standardised target, so that a perfect fit has a likelihood
METHODS = {
    "single": "single, stopped by a hold-out",
    "all": "single, all rows, as many epochs",
    "mean": "Twin-Boot, mean",
    "draws": "Twin-Boot, draws",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Nine UCI regression sets with their standard splits: Twin-Boot against a single network, from a file of yours."""

    data: str | None = None
    """FILE.npz with [rows, inputs + target] as NAME and [splits, test rows] as NAME__test_idx for each set."""
    checksum: str = ""
    """SHA-256 of that file, computed when it is first read. A run does not resume with another file of that name."""
    sets: tuple[str, ...] = ()
    """Names of the sets to use. By default all of the file."""
    splits: int = 20
    """Splits of each set, or as many as the file has: 20 are the standard, 5 for protein."""
    hidden: int = 50
    """ReLU units of the hidden layer. The literature has 50 for all sets except the largest."""
    batch: int = 32
    """Batch size, as in the seismic task of Appendix A.6."""
    large: int = 2000
    """A set with this many training rows is large. This is between the five small sets and the four others."""
    large_batch: int = 256
    """Batch size for large sets, so that they take no more steps than small ones."""
    updates: int = 2000
    """Steps on all rows, which set the epochs of all methods. The run takes 45 minutes of one core."""
    epochs: int = 40
    """Least number of epochs, for large sets: that of the first comparison in the literature."""
    lr: float = 0.01
    """Learning rate of Adam. The best of 0.003, 0.01 and 0.03 for most of four sets, by rows held out."""
    groups: Literal["layer", "tensor", "unit"] = "unit"
    """Weights that share one sigma. By out-of-bag rows, far better than "layer" for energy, a bit worse for 2 of 5."""
    mode: resets.Mode = "centered"
    """How twins are reset after each epoch. By out-of-bag rows, better than "sample" for 3 sets of 4."""
    hold_out: float = 0.135
    """Share of the training rows that stops the single network: e^-2, what two bootstrap samples leave out."""
    samples: int = 32
    """Draws of the weights for a prediction: the default of `predict`."""
    min_noise: float = 0.05
    """Least share of the squared residuals that counts as noise, if the draws vary more than the residuals."""
    seed: int = 0
    """Seed of everything random. The splits are those of the file."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "splits", "hidden", "batch", "large", "large_batch", "updates", "epochs")
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2, for a spread, not {self.samples}.")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be greater than 0, not {self.lr}.")
        if not 0.02 <= self.hold_out <= 0.5:
            raise ValueError(f"hold_out must lie between 0.02 and 0.5, not {self.hold_out}.")
        if not 0 < self.min_noise <= 1:
            raise ValueError(f"min_noise must be above 0 and at most 1, not {self.min_noise}.")
        if len(set(self.sets)) < len(self.sets):
            raise ValueError(f"sets must have no name twice, not {self.sets}.")
        if self.data is not None and not self.checksum:
            object.__setattr__(self, "checksum", checksum(self.data))

    def batch_of(self, rows: int) -> int:
        """The batch size for a set with this many training rows."""
        return self.batch if rows < self.large else self.large_batch

    def epochs_of(self, rows: int) -> int:
        """The epochs for a set with this many training rows."""
        return max(self.epochs, round(self.updates / math.ceil(rows / self.batch_of(rows))))


@dataclass(frozen=True, eq=False)
class Predicted:
    """The prediction for the standardised test rows, and how it was obtained."""

    prediction: Prediction
    noise: float  # of the targets
    epoch: int
    seconds: float  # of one core, so that other processes do not count
    used: int  # distinct rows that were trained on


def network(inputs: int, hidden: int, seed: int) -> nn.Module:
    """One hidden layer of ReLU units, with PyTorch's initialisation. Global generators are left alone."""
    with seeded(derive(seed, "weights")):
        layers = {"hidden": nn.Linear(inputs, hidden), "relu": nn.ReLU(), "output": nn.Linear(hidden, 1)}
    return nn.Sequential(OrderedDict(layers))


def held_out(config: Config, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Training rows for the single network, and those that stop it."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(derive(seed, "hold-out")))
    aside = round(config.hold_out * rows)
    return order[aside:], order[:aside]


def single(config: Config, split: Split, seed: int, epochs: int | None = None) -> Predicted:
    """A network that a hold-out stops; or one on all rows, for a number of epochs. The noise of that one is estimated
    from the rows that it was fitted to."""
    began, rows = time.process_time(), len(split.train_x)
    used, held = held_out(config, rows, seed) if epochs is None else (torch.arange(rows), None)
    model, epoch = train(config, split, seed, used, held, epochs or config.epochs_of(rows))
    judged = used if held is None else held
    noise = noise_of(certain(model, split.train_x[judged]), split.train_y[judged], config.min_noise)
    return Predicted(certain(model, split.test_x), noise, epoch, time.process_time() - began, len(used))


def twins(config: Config, split: Split, seed: int, stacked: bool = True) -> dict[str, Predicted]:
    """The mean of twins and draws around it, at the epoch that is best on the out-of-bag rows."""
    began = time.process_time()
    rows = len(split.train_x)
    result = fit(
        network(split.train_x.shape[1], config.hidden, seed),
        TensorDataset(split.train_x, split.train_y),
        "regression",
        optimizer=lambda parameters: torch.optim.Adam(parameters, config.lr),
        epochs=config.epochs_of(rows),
        batch_size=config.batch_of(rows),
        # A reset after each epoch, whatever its length, as in the paper.
        protocol=Protocol(groups=config.groups, reset=resets.every(1), mode=config.mode),
        spread=0.0,  # draws at the sigma of the training, as in the paper
        stacked=stacked,
        seed=seed,
        progress=False,
    )
    seconds = time.process_time() - began
    unseen, used = result.bootstrap.unseen, len(result.bootstrap.seen)

    def by(samples: int) -> Predicted:
        predict = partial(result.estimate.predict, samples=samples, task="regression", seed=seed)
        noise = noise_of(predict(split.train_x[unseen]), split.train_y[unseen], config.min_noise)
        return Predicted(predict(split.test_x), noise, result.best_epoch, seconds, used)

    return {"mean": by(0), "draws": by(config.samples)}


def train(
    config: Config, split: Split, seed: int, rows: Tensor, held: Tensor | None, epochs: int
) -> tuple[nn.Module, int]:
    """Train a network on some rows with the optimizer, learning rate and batch size of the twins. Returns it after the
    epoch with the lowest loss on the held-out rows, or after the last epoch, and that epoch.

    These three lines of a step are not worth sharing with the loop of the image experiment, which also needs seeds for
    each step, IVON and checkpoints. One generator shuffles all epochs here; there each epoch has its own, to resume.
    """
    x, y = split.train_x, split.train_y
    model = network(x.shape[1], config.hidden, seed)
    optimizer = torch.optim.Adam(model.parameters(), config.lr)
    order = torch.Generator().manual_seed(derive(seed, "order"))
    lowest, state, chosen = math.inf, model, epochs
    for epoch in range(1, epochs + 1):
        for batch in rows[torch.randperm(len(rows), generator=order)].split(config.batch_of(len(x))):
            optimizer.zero_grad()
            F.mse_loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
        if held is not None:
            with torch.no_grad():
                loss = F.mse_loss(model(x[held]), y[held]).item()
            if loss < lowest:
                lowest, state, chosen = loss, copy.deepcopy(model), epoch
    return state, chosen


def certain(model: Callable[[Tensor], Tensor], x: Tensor) -> Prediction:
    """The prediction of one model, without spread."""
    with torch.no_grad():
        mean = model(x)
    return Prediction("regression", mean, torch.zeros_like(mean))


def noise_of(prediction: Prediction, target: Tensor, least: float) -> float:
    """The standard deviation of the noise that, with the spread of the draws, explains the mean squared residual.

    >>> exact = Prediction("regression", torch.zeros(4), torch.ones(4))
    >>> round(noise_of(exact, torch.tensor([2.0, -2.0, 2.0, -2.0]), least=0.05) ** 2, 6)
    3.0
    """
    residual = (target - prediction.mean).double().square().mean().item()
    spread = prediction.std.double().square().mean().item()
    return math.sqrt(max(residual - spread, least * residual, TINY))


def score(predicted: Predicted, target: Tensor, unit: float) -> dict[str, float]:
    """Scores in the units of the target; `unit` is that of the standardised one."""
    prediction, noise = predicted.prediction, predicted.noise
    low, high = prediction.interval(LEVEL, noise)
    return {
        "rmse": unit * (target - prediction.mean).square().mean().sqrt().item(),
        "nll": prediction.nll(target, noise).mean().item() + math.log(unit),
        "covered": ((low <= target) & (target <= high)).float().mean().item(),
        "noise": unit * noise,
        "spread": unit * prediction.std.square().mean().sqrt().item(),
        "epoch": predicted.epoch,
        "used": predicted.used,
        "seconds": predicted.seconds,
    }
