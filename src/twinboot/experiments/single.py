"""A single model in training, and the states of it that contenders need: the last, the best on a hold-out, a mean.

It goes through its images as the twins go through theirs: the same batches, optimizer and rate, and what it draws by
itself depends on the step alone. After each epoch all of it is kept, so that a run that was stopped goes on.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from .. import seeds
from ..checkpoints import Checkpoints
from ..training import own_randomness
from .experiment import Tick

MakeOptimizer = Callable[[nn.Module], tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]]

STATEFUL = ("model", "average", "optimizer", "scheduler")
LOOK = 1000  # training images by which the accuracy in training is told


@dataclass(frozen=True, eq=False)
class Images:
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
    """Trains `model`; `states` holds what is to be kept of it."""

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        make: MakeOptimizer,
        batch: int,
        seed: int,
        average_from: int | None = None,
    ) -> None:
        self.model, self.images, self.batch, self.seed, self.average_from = model, images, batch, seed, average_from
        self.optimizer, self.scheduler = make(model)
        self.device = next(model.parameters()).device
        self.average = AveragedModel(model)
        self.states: dict[str, dict[str, Tensor]] = {}
        self.curve: dict[str, list[float]] = {"epoch": [], "train": [], "validation": [], "loss": [], "seconds": []}

    def train(self, epochs: int, scratch: Path | None = None, tick: Tick = lambda: None) -> None:
        saved = Checkpoints(scratch, keep=1) if scratch else None
        if saved and (state := saved.latest(self.device)):
            self._restore(state)
        for epoch in range(len(self.curve["epoch"]) + 1, epochs + 1):
            began = time.perf_counter()
            self._epoch(epoch)
            if self.average_from is not None and epoch >= self.average_from:
                self.average.update_parameters(self.model)
            self._look(epoch, time.perf_counter() - began)
            if saved:
                saved.save(epoch, self._state())
            tick()
        self.states["last"] = _copied(self.model)
        if self.average_from is not None:
            update_bn(self._shuffled(0), self.average, self.device)
            self.states["average"] = _copied(self.average.module)

    def of(self, state: str) -> nn.Module:
        """A model in one of the states that were kept."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.states[state])
        return model.eval()

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

    def _shuffled(self, epoch: int) -> list[Tensor]:
        return [self.images.x[index] for index in self._order(epoch)]

    def _look(self, epoch: int, seconds: float) -> None:
        held = self.images.held_out
        shown = accuracy(self.model, self.images, self.images.trained_on[:LOOK])[0]
        right, loss = accuracy(self.model, self.images, held) if held is not None else (math.nan, math.nan)
        if held is not None:
            if loss < min(self.curve["loss"], default=math.inf):
                self.states["loss"] = _copied(self.model)
            if right > max(self.curve["validation"], default=-math.inf):
                self.states["accuracy"] = _copied(self.model)
        row = {"epoch": epoch, "train": shown, "validation": right, "loss": loss, "seconds": seconds}
        for name, value in row.items():
            self.curve[name].append(value)

    def _state(self) -> dict[str, Any]:
        parts = [name for name in STATEFUL if getattr(self, name) is not None]
        kept = {name: getattr(self, name).state_dict() for name in parts}
        return kept | {"states": self.states, "curve": self.curve, "step": getattr(self.optimizer, "current_step", 0)}

    def _restore(self, state: dict[str, Any]) -> None:
        for name in STATEFUL:
            if name in state:
                getattr(self, name).load_state_dict(state[name])
        self.states, self.curve = state["states"], state["curve"]
        if hasattr(self.optimizer, "current_step"):  # IVON's own count, which is not in its state
            self.optimizer.current_step = state["step"]


@contextmanager
def noisy(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """IVON takes its gradients at a draw of the weights; other optimizers take them where the weights are."""
    with optimizer.sampled_params(train=True) if hasattr(optimizer, "sampled_params") else nullcontext():
        yield


@torch.no_grad()
def accuracy(model: nn.Module, images: Images, rows: Tensor) -> tuple[float, float]:
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
