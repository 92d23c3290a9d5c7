"""A round: twins settle on their samples, while the learning rate falls to 0. `error_bars` and `fit` use it.

With a constant learning rate, twins differ mostly by the noise of the optimizer. While the rate falls to 0, each twin
settles where its own data put it. What is left between them are the data, and the different ways of training.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from .. import resets
from .._core import ranks, seeds
from ..estimate.estimate import Estimate
from . import optimizers
from .epoch import Training

# The learning rate of a round, as a multiple of that of the training. At 1 or 3 times it, twins that start from one
# point stay too close to it. Tried on Fashion-MNIST with 500 and 4,000 images, before docs/results/truth-fashion.md.
RESTART = 5.0


class Round:
    """Some epochs of twins, without noise and resets, in which the learning rate falls to 0.

    Args:
        run: the twins and their samples.
        optimizer: as in `fit`.
        epochs: the length of the round.
        lr: the learning rate of the default optimizer.
        factor: multiplies the learning rate that the optimizer starts with.
    """

    def __init__(
        self, run: Training, optimizer: optimizers.Make | None, epochs: int, lr: float, factor: float = 1.0
    ) -> None:
        self.run = run
        parameters = [list(twin.parameters()) for twin in run.twins]
        self.stepper = optimizers.make_optimizer(optimizer, parameters, lr)
        for group in self.stepper.param_groups:
            group["lr"] = group["lr"] * factor  # not in place: a tensor would be the user's
        self.rates = [float(group["lr"]) for group in self.stepper.param_groups]
        self.schedule = falling(self.stepper, epochs * len(run.loader))
        self.scaler = torch.amp.GradScaler(run.device.type, enabled=run.amp is torch.float16)

    def epoch(self, number: int) -> float:
        loss = self.run.epoch(number, self.stepper, self.scaler, resets.never(), self.schedule)
        if ranks.rank_and_size()[1] > 1:  # each rank has BatchNorm statistics of the last batch that it read
            for buffer in (b for twin in self.run.twins for b in twin.buffers() if b.is_floating_point()):
                buffer.copy_(ranks.mean(buffer))
        return loss

    def _parts(self) -> dict[str, Any]:
        parts = {"twins": self.run.twins, "optimizer": self.stepper, "loader": self.run.loader}
        return {**parts, "schedule": self.schedule, "scaler": self.scaler}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])


def falling(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule of steps along which the learning rate falls to 0, as half a cosine."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2
    )


def settle(
    run: Training, estimate: Estimate, optimizer: optimizers.Make | None, epochs: int, lr: float
) -> dict[str, Any]:
    """The sigma and the scale, by name, of twins that settle around the mean of an estimate, on the samples of a run.

    No sample that the run held out is trained on. It is by those that the spread of the twins' predictions and that of
    draws are compared. If the larger learning rate makes the loss infinite, a smaller one is tried. If none works, they
    are those of the estimate.
    """
    for factor in (RESTART, RESTART / 3, RESTART / 9):
        around = run.around(estimate.module, seeds.derive(run.seed, "settle"))
        settling = Round(around, optimizer, epochs, lr, factor)
        try:
            for number in range(1, epochs + 1):
                settling.epoch(number)
        except FloatingPointError:
            continue
        settled = Estimate(estimate.module, around.twins.partition.scaled(run.bootstrap.scale))
        settled.task = run.task
        return {"sigma": settled.partition.sigma, "scale": around.matched_scale(settled)}
    warnings.warn(
        "the loss became infinite while the twins settled, so the error bars have the size of sigma in training: lower "
        "the learning rate, or give spread=0 to leave this out.",
        stacklevel=3,
    )
    return {"sigma": estimate.partition.sigma.clone(), "scale": estimate.scale}
