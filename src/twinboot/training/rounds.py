"""A round: twins settle on their samples, while the learning rate falls to 0. `error_bars` and `fit` use it.

With a constant learning rate, twins differ mostly by the noise of the optimizer. While the rate falls to 0, each twin
settles where its own data put it. What is left between them are the data, and the different ways of training.

A model that is trained again, on other data, also starts from other random weights. So a part of each weight matrix is
drawn anew before a round, as Ash and Adams do for warm starts ("shrink and perturb", 2020). Without it, twins of small
regressions stay too close to the model that they start from.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from .. import resets
from .._core import ranks, seeds
from .._core.copies import Places
from ..estimate.estimate import Estimate
from ..estimate.prediction import Task
from ..twins import Twins
from . import optimizers
from .epoch import Training
from .protocol import Protocol

# The learning rate of a round, as a multiple of that of the training. At 1 or 3 times it, twins that start from one
# point stay too close to it. Tried on Fashion-MNIST with 500 and 4,000 images, before docs/results/truth-fashion.md.
RESTART = 5.0
FACTORS = (RESTART, RESTART / 3, RESTART / 9)  # those after the first are tried if the twins become worse models
# The same for adapters of models that were pretrained on other data, of which no weight is drawn anew: at five times
# the rate, their error bars are too large (docs/adapter-truth.md).
GENTLE = tuple(factor / 3 for factor in FACTORS)
# The share of each weight matrix that is drawn anew before a round of `error_bars`. Without it the spread was 0.7 of
# the truth in small regressions. Chosen on three sets of each kind of data, before the pages docs/results/truth*.md.
# `settle` takes half of it: with all of it, `fit` on 500 images had 1.4 times the true spread.
PERTURB = 0.6
# How many times the loss of the model that of the twins may be at the end of a round, both on the twins' samples. With
# settings that gave the right spread on Fashion-MNIST and in regressions it was 0.4 to 1.2 in the first round. With
# five times the rate of LoRA adapters it was 1.5 to 2.8: those twins had unlearned their task (both Hugging Face
# examples).
LOWER = 1.25  # above this, `settle_around` tries a lower rate, which costs nothing but time
FAR = 1.8  # above this, a warning says that the twins are worse models
# A difference that does not count in a log-likelihood. Where a model has learned its samples by heart, its loss is so
# small that any other is many times that. On digits, where the model had 0.005, members with 0.009 predicted better
# than the model (NLL of the test images 0.135 and 0.155), and members with 0.15 worse (0.30).
NATS = 0.05
SHARE = 0.01  # the same for a squared error, of the variance of the targets
Run = TypeVar("Run")


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
        self.stepper = optimizers.make_optimizer(optimizer, run.parameters(), lr)
        for group in self.stepper.param_groups:
            group["lr"] = group["lr"] * factor  # not in place: a tensor would be the user's
        self.rates = [float(group["lr"]) for group in self.stepper.param_groups]
        self.schedule = falling(self.stepper, epochs * len(run.loader))
        self.scaler = torch.amp.GradScaler(run.device.type, enabled=run.amp is torch.float16)

    def epoch(self, number: int) -> float:
        loss = self.run.epoch(number, self.stepper, self.scaler, resets.never(), self.schedule)
        average_buffers(self.run.twins)
        return loss

    def losses(self, model: nn.Module) -> tuple[float, float]:
        """The losses of the twins and of a model, both on samples of the twins and in evaluation mode."""
        twins = self.run.models()
        return self.run.loss_of(twins), self.run.loss_of([model] * len(twins))

    def _parts(self) -> dict[str, Any]:
        parts = {"twins": self.run.twins, "optimizer": self.stepper, "loader": self.run.loader}
        return {**parts, "schedule": self.schedule, "scaler": self.scaler}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])


@torch.no_grad()
def perturb_(twins: Twins, share: float, seed: int) -> None:
    """Draw a share of each weight matrix of the twins anew, and keep its size: w becomes sqrt(1 - share^2) w + share r
    e with e ~ N(0, I) and r the root mean square of w.

    Biases and scales stay, as their start is not random. So do embeddings: rows of tokens that no sample has would
    never be learned again.
    """
    if not share:
        return
    fixed, names = twins.partition.fixed(), list(twins.partition.parameter_shapes)
    stack = [twins.get_submodule("stack")] * len(twins) if twins.stacked else None
    for place, twin in enumerate(stack or twins):
        rows = {id(layer.weight) for layer in twin.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))}
        for number, (name, held) in enumerate(zip(names, Places(twin, names).read(), strict=True)):
            weight = held[place] if stack else held
            if weight.ndim < 2 or id(held) in rows:
                continue
            generator = torch.Generator(weight.device).manual_seed(seeds.derive(seed, "perturb", place, number))
            drawn = torch.empty_like(weight).normal_(generator=generator)
            drawn *= share * weight.square().mean().sqrt()
            drawn += math.sqrt(1 - share**2) * weight
            weight.copy_(torch.where(fixed[name], weight, drawn) if name in fixed else drawn)


def falling(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule of steps along which the learning rate falls to 0, as half a cosine."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2
    )


def average_buffers(twins: Iterable[nn.Module]) -> None:
    """Give all ranks the same BatchNorm statistics: each has those of the batches that it read."""
    if ranks.rank_and_size()[1] > 1:
        for buffer in (b for twin in twins for b in twin.buffers() if b.is_floating_point()):
            buffer.copy_(ranks.mean(buffer))


def without_noise(protocol: Protocol) -> Protocol:
    """The protocol of twins that settle: no noise, no resets, and gradients of their own."""
    return replace(protocol, reset=resets.never(), noise=0.0, pooled=0.0)


class Settled(NamedTuple, Generic[Run]):
    """A run whose twins have settled around a model, and the losses of the model and of the twins on their samples."""

    run: Run
    before: float
    after: float


def is_above(after: float, before: float, times: float, least: float = 0.0) -> bool:
    """Whether a loss of twins is more than so many times that of the model, and the difference is not of the least. A
    log-likelihood may be negative.

    >>> is_above(0.9, 0.4, 2), is_above(0.7, 0.4, 2), is_above(0.05, 0.01, 2, least=NATS)
    (True, False, False)
    """
    return not after - before <= max((times - 1) * abs(before), least)


def least_of(task: Task | None) -> float:
    """A difference of losses that does not count, where that is known from the task."""
    return NATS if task in ("classification", "gaussian") else 0.0


def least_difference(run: Training) -> float:
    """The same for a run, whose targets are known."""
    return SHARE * run.target_variance() if run.task == "regression" else least_of(run.task)


def warn_if_far_above(after: float, before: float, least: float, advice: str, stacklevel: int) -> None:
    """Say that twins have become worse models than the one that they started from."""
    if is_above(after, before, FAR, least):
        warnings.warn(
            f"the twins ended with a training loss of {after:.3g}, and the model has {before:.3g} on the same samples, "
            f"so their spread says little about the model: {advice}.",
            stacklevel=stacklevel + 1,
        )


def settle_around(
    attempt: Callable[[float], Settled[Run]], least: float, stacklevel: int, factors: Iterable[float] = FACTORS
) -> Run | None:
    """A run whose twins have settled around a model, with the largest learning rate that leaves them as good as it.

    `attempt` lets twins settle at a multiple of the learning rate of the training. If that raises FloatingPointError at
    each rate, the result is None.
    """
    found = None
    for factor in factors:
        with suppress(FloatingPointError):
            found = attempt(factor)
            if not is_above(found.after, found.before, LOWER, least):
                return found.run
    if found is None:
        warnings.warn(
            "the loss became infinite while the twins settled, so the error bars have the size of sigma in training: "
            "lower the learning rate, or give spread=0 to leave this out.",
            stacklevel=stacklevel + 1,
        )
        return None
    advice = "lower the learning rate, or give a larger spread"
    warn_if_far_above(found.after, found.before, least, advice, stacklevel + 1)
    return found.run


def settle(
    run: Training, estimate: Estimate, optimizer: optimizers.Make | None, epochs: int, lr: float
) -> dict[str, Any]:
    """The sigma and the scale, by name, of twins that settle around the mean of an estimate, on the samples of a run;
    and whether draws are centered.

    No sample that the run held out is trained on. It is by those that the spread of the twins' predictions and that of
    draws are compared. If no learning rate works, sigma and scale are those of the estimate.
    """

    def attempt(factor: float) -> Settled[Training]:
        around = run.around(estimate.module, seeds.derive(run.seed, "settle"))
        perturb_(around.twins, factor / RESTART * PERTURB / 2, around.seed)
        settling = Round(around, optimizer, epochs, lr, factor)
        for number in range(1, epochs + 1):
            settling.epoch(number)
        after, before = settling.losses(estimate.module)
        return Settled(around, before, after)

    around = settle_around(attempt, least_difference(run), stacklevel=3)
    if around is None:
        return {"sigma": estimate.partition.sigma.clone(), "scale": estimate.scale, "centered": estimate.centered}
    settled = Estimate(estimate.module, around.twins.partition.scaled(run.bootstrap.scale))
    settled.task = run.task
    around.match_spread_(settled)
    return {"sigma": settled.partition.sigma, "scale": settled.scale, "centered": settled.centered}
