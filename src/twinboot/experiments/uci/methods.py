"""Ways to predict a number and how far off that may be: a single network, and twins of it.

Each knows the level of the noise in the targets from rows that it did not train on, except where it trained on all:

    noise^2 = mean of (residual^2 - variance over draws of the weights), but at least a small share of the residual^2

so that what is predicted varies on those rows as much as it is wrong there.
"""

from __future__ import annotations

import copy
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ... import resets
from ..._core.randomness import seeded
from ..._core.seeds import derive
from ...estimate.prediction import Prediction
from ...training import losses
from ...training.fit import fit
from ...training.protocol import Protocol
from .config import Config
from .data import Split

LEVEL = 0.9  # of central intervals
TINY = 1e-12  # the least noise^2 of a standardised target: a perfect fit has a likelihood, too
METHODS = {
    "single": "single, stopped by a hold-out",
    "all": "single, all rows, as many epochs",
    "mean": "Twin-Boot, mean",
    "draws": "Twin-Boot, draws",
}


@dataclass(frozen=True, eq=False)
class Predicted:
    """What is predicted for the test rows, standardised, the noise of the targets, and how it was trained."""

    prediction: Prediction
    noise: float
    epoch: int
    seconds: float  # of one core: a clock on the wall would also count what else the machine does
    used: int  # distinct rows that entered a loss


def network(inputs: int, hidden: int, seed: int) -> nn.Module:
    """One hidden layer of ReLU units, with PyTorch's own start. No global generator moves."""
    with seeded(derive(seed, "weights")):
        layers = {"hidden": nn.Linear(inputs, hidden), "relu": nn.ReLU(), "output": nn.Linear(hidden, 1)}
    return nn.Sequential(OrderedDict(layers))


def held_out(config: Config, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Training rows for the single network, and those that stop it."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(derive(seed, "hold-out")))
    return order[(aside := round(config.hold_out * rows)) :], order[:aside]


def single(config: Config, split: Split, seed: int) -> Predicted:
    """A network on the rows that are not held out, as it was when it predicted the others best."""
    began = time.process_time()
    used, held = held_out(config, len(split.train_x), seed)
    model, epoch = descend(config, split, seed, used, held, config.epochs_of(len(split.train_x)))
    noise = noise_of(certain(model, split.train_x[held]), split.train_y[held], config.floor)
    return Predicted(certain(model, split.test_x), noise, epoch, time.process_time() - began, len(used))


def on_all(config: Config, split: Split, seed: int, epochs: int) -> Predicted:
    """A network on all rows for so many epochs; its noise can only be known from the rows that it was fitted to."""
    began = time.process_time()
    rows = torch.arange(len(split.train_x))
    model, epoch = descend(config, split, seed, rows, None, epochs)
    noise = noise_of(certain(model, split.train_x), split.train_y, config.floor)
    return Predicted(certain(model, split.test_x), noise, epoch, time.process_time() - began, len(rows))


def twins(config: Config, split: Split, seed: int) -> dict[str, Predicted]:
    """The mean of twins, and draws around it, both of the epoch that predicts best what no twin saw."""
    began = time.process_time()
    rows = len(split.train_x)
    found = fit(
        network(split.train_x.shape[1], config.hidden, seed),
        TensorDataset(split.train_x, split.train_y),
        "regression",
        optimizer=lambda parameters: torch.optim.Adam(parameters, config.rate),
        epochs=config.epochs_of(rows),
        batch_size=config.batch_of(rows),
        protocol=Protocol(groups=config.groups, reset=resets.every(1), mode=config.mode),
        # in epochs of any length, as in the paper
        seed=seed,
        progress=False,
    )
    seconds = time.process_time() - began
    unseen, used = found.bootstrap.unseen, len(found.bootstrap.seen)

    def by(samples: int) -> Predicted:
        def predict(x: Tensor) -> Prediction:
            return found.estimate.predict(x, samples, "regression", seed=seed)

        noise = noise_of(predict(split.train_x[unseen]), split.train_y[unseen], config.floor)
        return Predicted(predict(split.test_x), noise, found.best_epoch, seconds, used)

    return {"mean": by(0), "draws": by(config.samples)}


def descend(
    config: Config, split: Split, seed: int, rows: Tensor, held: Tensor | None, epochs: int
) -> tuple[nn.Module, int]:
    """Train a network on some rows as `fit` trains twins: optimizer, rate, batches. Gives it as it was after the epoch
    with the least loss on the rows held out, if there are any, or after the last one, and the epoch."""
    x, y = split.train_x, split.train_y
    model = network(x.shape[1], config.hidden, seed)
    optimizer = torch.optim.Adam(model.parameters(), config.rate)
    order = torch.Generator().manual_seed(derive(seed, "order"))
    kept, best, lowest = model, epochs, math.inf
    for epoch in range(1, epochs + 1):
        for batch in rows[torch.randperm(len(rows), generator=order)].split(config.batch_of(len(x))):
            optimizer.zero_grad()
            losses.regression(model(x[batch]), y[batch]).mean().backward()
            optimizer.step()
        if held is not None:
            with torch.no_grad():
                loss = losses.regression(model(x[held]), y[held]).mean().item()
            if loss < lowest:
                kept, best, lowest = copy.deepcopy(model), epoch, loss
    return kept, best


def certain(model: Callable[[Tensor], Tensor], x: Tensor) -> Prediction:
    """The prediction of one model, which has no spread."""
    with torch.no_grad():
        mean = model(x)
    return Prediction("regression", mean, torch.zeros_like(mean))


def noise_of(prediction: Prediction, target: Tensor, floor: float) -> float:
    """Standard deviation of the noise with which all of the variance is the mean squared residual.

    >>> exact = Prediction("regression", torch.zeros(4), torch.ones(4))
    >>> round(noise_of(exact, torch.tensor([2.0, -2.0, 2.0, -2.0]), floor=0.05) ** 2, 6)
    3.0
    """
    residual = (target - prediction.mean).double().square().mean().item()
    spread = prediction.std.double().square().mean().item()
    return math.sqrt(max(residual - spread, floor * residual, TINY))


def score(predicted: Predicted, target: Tensor, scale: float) -> dict[str, float]:
    """How good the prediction of standardised targets is, in their own units, of which 1 is `scale`."""
    prediction, noise = predicted.prediction, predicted.noise
    low, high = prediction.interval(LEVEL, noise)
    return {
        "rmse": scale * (target - prediction.mean).square().mean().sqrt().item(),
        "nll": prediction.nll(target, noise).mean().item() + math.log(scale),
        "covered": ((low <= target) & (target <= high)).float().mean().item(),
        "noise": scale * noise,
        "spread": scale * prediction.std.square().mean().sqrt().item(),
        "epoch": predicted.epoch,
        "used": predicted.used,
        "seconds": predicted.seconds,
    }
