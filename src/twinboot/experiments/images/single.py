"""What is to be learned, what a method returns, and the training of a single model.

A single model has the optimizer, the learning rate and the batch size of the twins. Its own randomness, such as
dropout, depends only on the epoch and the step. Everything is saved after each epoch, so that a stopped run resumes.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from ..._core import seeds
from ..._core.seeds import own_randomness
from ...training import checkpoints
from ..runner.experiment import Tick

Predict = Callable[[Tensor], Tensor]  # images -> probabilities [images, classes]
MakeOptimizer = Callable[[nn.Module], tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]]
STATEFUL = ("model", "average", "optimizer", "scheduler")
SHOWN = 1000  # training images for the training accuracy of an epoch
ENOUGH = 1024  # images for the BatchNorm statistics of an average: as `fit` has, whose number is not public


@dataclass(frozen=True, eq=False)
class Problem:
    """Training images, a network for them, and how to train it."""

    x: Tensor
    y: Tensor
    network: Callable[..., nn.Module]  # takes dropout and seed
    epochs: int  # of a single model
    batch: int
    lr: float
    samples: int  # draws for a prediction
    seed: int


@dataclass(frozen=True, eq=False)
class Trained:
    """What a method returns."""

    rows: dict[str, Predict]  # row of the table -> how it predicts
    trained_on: Tensor  # indices of the images
    curve: pd.DataFrame  # epoch, train (accuracy), validation (accuracy), loss (on unseen images), seconds
    sigma: pd.DataFrame = field(default_factory=pd.DataFrame)
    epochs: dict[str, float] = field(default_factory=dict)  # row -> epochs relative to a single model's; default 1
    unseen: Tensor | None = None  # the images that chose the epoch


def adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=lr, fused=True)  # on a CPU a sixth of the time of the default


class Single:
    """Trains one model and keeps states of it by name.

    "last" and, for the epochs in `keep`, "after N". With the images `held` out, "loss" and "accuracy": the epochs that
    are best on those. With `power`, the weights after the epochs `averaged` enter a weighted average, as in `fit`; 0
    weights all alike. Its states are "average" at the end, "average after N", and "average, loss" with a hold-out.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        dropout: float = 0.0,
        make: MakeOptimizer | None = None,
        held: Tensor | None = None,
        seed: int | None = None,
        power: float | None = None,
        averaged: range = range(0),
        keep: Container[int] = (),
    ) -> None:
        self.problem, self.held, self.averaged, self.keep = problem, held, averaged, keep
        self.seed = problem.seed if seed is None else seed
        self.model = problem.network(dropout=dropout, seed=self.seed)
        self.device = next(self.model.parameters()).device
        self.optimizer, self.scheduler = make(self.model) if make else (adam(self.model.parameters(), problem.lr), None)
        self.average = None if power is None else _weighted_average(self.model, power)
        images = torch.arange(len(problem.y))
        self.trained_on = images if held is None else images[~torch.isin(images, held)]
        self.states: dict[str, dict[str, Tensor]] = {}
        self.lowest = {"loss": math.inf, "average, loss": math.inf}
        self.curve: dict[str, list[float]] = {"epoch": [], "train": [], "validation": [], "loss": [], "seconds": []}

    def train(self, epochs: int, scratch: Path | None = None, tick: Tick = lambda: None) -> None:
        """Train up to an epoch. With a directory, resume from the state that is there."""
        file = scratch / "single.pt" if scratch else None
        if file and file.exists():
            self._restore(checkpoints.read(file, self.device))
            for _ in self.curve["epoch"]:
                tick()
        for epoch in range(len(self.curve["epoch"]) + 1, epochs + 1):
            self._train_and_evaluate(epoch)
            if epoch in self.keep:
                self.states[f"after {epoch}"] = copy.deepcopy(self.model.state_dict())
            if epoch in self.averaged:
                self._average(epoch)
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                checkpoints.write(self._state(), file)
            tick()
        self.states["last"] = copy.deepcopy(self.model.state_dict())

    def of(self, state: str) -> nn.Module:
        """A model in one of the states."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.states[state])
        return model.eval()

    def result(self, rows: dict[str, Predict], epochs: dict[str, float] | None = None) -> Trained:
        return Trained(rows, self.trained_on, pd.DataFrame(self.curve), epochs=epochs or {}, unseen=self.held)

    def _train_and_evaluate(self, epoch: int) -> None:
        began = time.perf_counter()
        self._epoch(epoch)
        validation, loss = math.nan, math.nan
        if self.held is not None:
            validation, loss = self._scores(self.model, self.held)
            if validation > max(self.curve["validation"], default=-math.inf):
                self.states["accuracy"] = copy.deepcopy(self.model.state_dict())
            if self._is_lowest("loss", loss):
                self.states["loss"] = copy.deepcopy(self.model.state_dict())
        seconds = time.perf_counter() - began
        train, _ = self._scores(self.model, self.trained_on[:SHOWN])  # for the figure, so it is not timed
        for name, value in zip(self.curve, (epoch, train, validation, loss, seconds), strict=True):
            self.curve[name].append(value)

    def _epoch(self, epoch: int) -> None:
        """A loop of its own, which no other experiment could use: each step has its own seed, so that dropout is the
        same in a run that was stopped, and IVON takes its gradients at a draw of the weights."""
        self.model.train()
        for step, index in enumerate(self._batches(epoch), start=1):
            x, y = self.problem.x[index].to(self.device), self.problem.y[index].to(self.device)
            self.optimizer.zero_grad()
            draws = getattr(self.optimizer, "sampled_params", None)
            with own_randomness(self.device, self.seed, epoch, step), draws(train=True) if draws else nullcontext():
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"the loss is not finite in epoch {epoch}, step {step}.")
            self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()

    def _batches(self, epoch: int) -> Iterator[Tensor]:
        order = torch.Generator().manual_seed(seeds.derive(self.seed, "order", epoch))
        shuffled = self.trained_on[torch.randperm(len(self.trained_on), generator=order)]
        return (batch for batch in shuffled.split(self.problem.batch) if len(batch) > 1)  # BatchNorm needs two images

    def _average(self, epoch: int) -> None:
        assert self.average is not None
        self.average.update_parameters(self.model)
        mean: nn.Module = self.average.module
        wanted = {f"average after {epoch}": epoch in self.keep, "average": epoch == self.averaged[-1]}
        if self.held is not None:
            self._update_batchnorm(mean, ENOUGH)
            wanted["average, loss"] = self._is_lowest("average, loss", self._scores(mean, self.held)[1])
        if any(wanted.values()):
            self._update_batchnorm(mean)
            self.states |= {name: copy.deepcopy(mean.state_dict()) for name, is_wanted in wanted.items() if is_wanted}

    def _update_batchnorm(self, model: nn.Module, at_most: int | None = None) -> None:
        """Statistics from all training images, or from some."""
        some = None if at_most is None else math.ceil(at_most / self.problem.batch)
        with own_randomness(self.device, self.seed, "statistics"):
            update_bn((self.problem.x[index] for index in list(self._batches(0))[:some]), model, self.device)

    def _scores(self, model: nn.Module, images: Tensor) -> tuple[float, float]:
        return accuracy_and_loss(model, self.problem.x[images], self.problem.y[images])

    def _is_lowest(self, state: str, loss: float) -> bool:
        before, self.lowest[state] = self.lowest[state], min(self.lowest[state], loss)  # of a NaN, the one before
        return loss < before

    def _state(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in STATEFUL if getattr(self, name) is not None}
        results = {"states": self.states, "curve": self.curve, "lowest": self.lowest}
        return parts | results | {"step": getattr(self.optimizer, "current_step", 0)}

    def _restore(self, state: dict[str, Any]) -> None:
        for name in STATEFUL:
            if name in state:
                getattr(self, name).load_state_dict(state[name])
        self.states, self.curve, self.lowest = state["states"], state["curve"], state["lowest"]
        if hasattr(self.optimizer, "current_step"):  # IVON's step counter, which its state dict lacks
            self.optimizer.current_step = state["step"]


def _weighted_average(model: nn.Module, power: float) -> AveragedModel:
    """Epoch s gets a weight of about s^power, as in `fit`. 0 weights all alike. The average of `fit` is not public, and
    is of twins; a test compares the two."""

    def step(average: Tensor, weight: Tensor, count: Tensor | int) -> Tensor:
        return average.lerp(weight, (power + 1) / (power + int(count) + 1))

    return AveragedModel(model, avg_fn=step)


@torch.no_grad()
def accuracy_and_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    logits = logits_of(model, x)
    return (logits.argmax(1) == y).double().mean().item(), F.cross_entropy(logits, y).item()


@torch.no_grad()
def logits_of(model: nn.Module, x: Tensor, dropout: bool = False) -> Tensor:
    """Logits in evaluation mode, on the CPU. With `dropout`, dropout layers stay active."""
    device = next(model.parameters()).device
    model.eval()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.train(dropout)
    return torch.cat([model(part.to(device)).float().cpu() for part in x.split(250)])


def by_one_model(model: nn.Module, temperature: float = 1.0) -> Predict:
    """Predict with one model, without draws."""
    return lambda x: (logits_of(model, x) / temperature).softmax(1)
