"""A single model in training, and the states of it that contenders need: the last, the best on a hold-out, means.

Its optimizer, its rate and the size of its batches are those of the twins, whose images come in an order of their own.
What it draws by itself depends on the step alone. After each epoch all of it is kept, so that a run that was stopped
goes on.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ..._core import seeds
from ..._core.randomness import own_randomness
from ...training.checkpoints import Checkpoints
from ...training.optimizers import adam
from ...training.selection import Average
from ...training.validation import ENOUGH
from ..runner.experiment import Tick

MakeOptimizer = Callable[[nn.Module], tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]]
STATEFUL = ("model", "average", "optimizer", "scheduler")
LOOK = 1000  # training images by which the accuracy in training is told


def plain(rate: float) -> MakeOptimizer:
    return lambda model: (adam(model.parameters(), rate), None)


@dataclass(frozen=True, eq=False)
class Split:
    """Images and labels for a model, and which of them it may not train on."""

    x: Tensor
    y: Tensor
    held_out: Tensor | None = None

    @property
    def trained_on(self) -> Tensor:
        used = torch.ones(len(self.y), dtype=torch.bool)
        if self.held_out is not None:
            used[self.held_out] = False
        return used.nonzero().squeeze(1)


class Single:
    """Trains `model`; `states` holds what is kept of it: "last", and with a hold-out "loss" and "accuracy".

    `keep` names epochs after which the state is kept too, as "after N". `average` takes in the weights after each of
    the epochs `averaged`: what it is after the last of them is "average", after those to keep "average after N", and
    with a hold-out what it is where its loss is lowest is "average, loss".
    """

    def __init__(
        self,
        model: nn.Module,
        images: Split,
        make: MakeOptimizer,
        batch: int,
        seed: int,
        average: Average | None = None,
        averaged: Container[int] = (),
        keep: Container[int] = (),
    ) -> None:
        self.model, self.images, self.batch, self.seed, self.keep = model, images, batch, seed, keep
        self.average, self.averaged = average, averaged
        self.optimizer, self.scheduler = make(model)
        self.device = next(model.parameters()).device
        self.states: dict[str, dict[str, Tensor]] = {}
        self.lowest = {"loss": math.inf, "average, loss": math.inf}
        self.curve: dict[str, list[float]] = {"epoch": [], "train": [], "validation": [], "loss": [], "seconds": []}

    def train(self, epochs: int, scratch: Path | None = None, tick: Tick = lambda: None) -> None:
        saved = Checkpoints(scratch, keep=1) if scratch else None
        if saved and (state := saved.latest(self.device)):
            self._restore(state)
            for _ in self.curve["epoch"]:
                tick()
        for epoch in range(len(self.curve["epoch"]) + 1, epochs + 1):
            self._train_and_judge(epoch)
            if epoch in self.keep:
                self.states[f"after {epoch}"] = _copied(self.model)
            if epoch in self.averaged:
                self._average(epoch, last=epoch + 1 not in self.averaged)
            if saved:
                saved.save(epoch, self._state())
            tick()
        self.states["last"] = _copied(self.model)

    def of(self, state: str) -> nn.Module:
        """A model in one of the states that were kept."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.states[state])
        return model.eval()

    def _train_and_judge(self, epoch: int) -> None:
        began = time.perf_counter()
        self._epoch(epoch)
        held, right, loss = self.images.held_out, math.nan, math.nan
        if held is not None:
            right, loss = accuracy(self.model, self.images, held)
            if right > max(self.curve["validation"], default=-math.inf):
                self.states["accuracy"] = _copied(self.model)
            self._keep_lowest("loss", loss, self.model)
        seconds = time.perf_counter() - began
        shown, _ = accuracy(self.model, self.images, self.images.trained_on[:LOOK])  # for a figure alone
        row = {"epoch": epoch, "train": shown, "validation": right, "loss": loss, "seconds": seconds}
        for name, value in row.items():
            self.curve[name].append(value)

    def _epoch(self, epoch: int) -> None:
        self.model.train()
        for step, index in enumerate(self._order(epoch), start=1):
            x, y = self.images.x[index].to(self.device), self.images.y[index].to(self.device)
            self.optimizer.zero_grad()
            with own_randomness(self.device, self.seed, epoch, step), noisy(self.optimizer):
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"the loss is not finite in epoch {epoch}, step {step}.")
            self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()

    def _order(self, epoch: int) -> Iterator[Tensor]:
        rows = self.images.trained_on
        order = torch.Generator().manual_seed(seeds.derive(self.seed, "order", epoch))
        batches = rows[torch.randperm(len(rows), generator=order)].split(self.batch)
        return (batch for batch in batches if len(batch) > 1)  # BatchNorm has no statistics of one sample

    def _average(self, epoch: int, last: bool) -> None:
        assert self.average is not None
        mean = copy.deepcopy(self.model)
        self.average.take(list(mean.parameters()))
        held = self.images.held_out
        if held is not None:
            self._give_statistics(mean, ENOUGH)
            if self._keep_lowest("average, loss", accuracy(mean, self.images, held)[1], mean):
                self._give_statistics(mean)
                self.states["average, loss"] = _copied(mean)
        if last or epoch in self.keep:
            self._give_statistics(mean)
            self.states |= {f"average after {epoch}": _copied(mean)} if epoch in self.keep else {}
            self.states |= {"average": _copied(mean)} if last else {}

    def _give_statistics(self, model: nn.Module, at_most: int | None = None) -> None:
        """BatchNorm statistics of its own, from all training images or from some."""
        some = None if at_most is None else -(-at_most // self.batch)
        with own_randomness(self.device, self.seed, "statistics"):
            update_bn((self.images.x[index] for index in list(self._order(0))[:some]), model, self.device)

    def _keep_lowest(self, state: str, loss: float, model: nn.Module) -> bool:
        if not loss < self.lowest[state]:
            return False
        self.lowest[state], self.states[state] = loss, _copied(model)
        return True

    def _state(self) -> dict[str, Any]:
        parts = [name for name in STATEFUL if getattr(self, name) is not None]
        kept = {name: getattr(self, name).state_dict() for name in parts}
        rest = {"states": self.states, "curve": self.curve, "lowest": self.lowest}
        return kept | rest | {"step": getattr(self.optimizer, "current_step", 0)}

    def _restore(self, state: dict[str, Any]) -> None:
        for name in STATEFUL:
            if name in state:
                getattr(self, name).load_state_dict(state[name])
        self.states, self.curve, self.lowest = state["states"], state["curve"], state["lowest"]
        if hasattr(self.optimizer, "current_step"):  # IVON's own count, which is not in its state
            self.optimizer.current_step = state["step"]


@contextmanager
def noisy(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """IVON takes its gradients at a draw of the weights; other optimizers take them where the weights are."""
    with optimizer.sampled_params(train=True) if hasattr(optimizer, "sampled_params") else nullcontext():
        yield


@torch.no_grad()
def accuracy(model: nn.Module, images: Split, rows: Tensor) -> tuple[float, float]:
    """Accuracy and mean cross entropy of a model on some of the images."""
    logits, labels = logits_of(model, images.x[rows]), images.y[rows]
    return (logits.argmax(1) == labels).double().mean().item(), F.cross_entropy(logits, labels).item()


@torch.no_grad()
def logits_of(model: nn.Module, x: Tensor, dropping: bool = False) -> Tensor:
    """In evaluation, but for dropout where `dropping` is asked for; in parts, and back on the CPU."""
    device = next(model.parameters()).device
    model.eval()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.train(dropping)
    return torch.cat([model(part.to(device)).float().cpu() for part in x.split(250)])


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
