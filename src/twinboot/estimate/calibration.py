"""The temperature and the scale of weight noise with which an estimate predicts hold-out samples best.

A temperature above 1 makes a model less confident: it divides logits, so that a probability p becomes proportional to
p^(1/T), and multiplies the variance of a normal distribution. The scale multiplies sigma when weights are drawn. Both
minimize the negative log-likelihood (NLL) of samples that no twin saw.

If a few samples are all predicted correctly, their likelihood grows without end as the temperature falls. So one
pseudo-sample is added; among many samples it hardly counts. For classes, its log-probabilities are the means of the
others', and its label is spread evenly over the classes (as in Laplace's rule of succession, which adds a sample of
each class). For values, its squared error is the variance that the model predicts before calibration.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .._core.batches import loader_of, parted
from .._core.checks import require_tensor, shown
from .prediction import Task, like, require_labels

SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # 3 and 4 for small sigmas, as with `pool_gradients`
GOLDEN = (math.sqrt(5) - 1) / 2
IMPOSSIBLE = -50.0  # lowest log-probability in the pseudo-sample: a class that the model masks has one of -inf


class Target(ABC):
    """What a model's outputs [draws, samples, ...] are compared with."""

    hottest: float  # temperatures from 1 / hottest to hottest are searched

    @abstractmethod
    def losses(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """The NLL of each sample, and terms whose mean over the samples is the NLL of the pseudo-sample."""

    def nll(self, outputs: Tensor, temperature: float) -> float:
        return self.losses(outputs, temperature)[0].mean().item()

    def smoothed_nll(self, outputs: Tensor, temperature: float) -> float:
        """The NLL with the pseudo-sample."""
        own, pseudo = self.losses(outputs, temperature)
        return ((own.sum(0) + pseudo.mean(0)) / (len(own) + 1)).mean().item()


class Labels(Target):
    """Labels, for logits, whose probabilities are averaged over the draws."""

    hottest = 20.0

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels[:, None]

    def losses(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_probs = (outputs / temperature).log_softmax(2).logsumexp(0) - math.log(len(outputs))
        pseudo = log_probs.clamp_min(IMPOSSIBLE).mean(1, keepdim=True)
        return -_precise(log_probs.gather(1, self.labels)), -_precise(pseudo)


class Values(Target):
    """Values, for means and log-variances as of `task="gaussian"`. All draws together make one normal distribution, as
    in `Prediction.nll`. The pseudo-sample is the same for all scales: else the most confident one would win."""

    hottest = 20.0**2  # of a variance, so 20 of a standard deviation

    def __init__(self, values: Tensor, before: Tensor) -> None:
        self.values = _precise(values)
        self.expected = self._moments(before, 1.0)[1]

    def losses(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        squares, variance = self._moments(outputs, temperature)
        constant = variance.log() + math.log(2 * math.pi)
        return 0.5 * (squares / variance + constant), 0.5 * (self.expected / variance + constant)

    def _moments(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Squared residuals, and the variance."""
        means, log_variances = _precise(outputs).chunk(2, -1)
        spread = means.var(0) if len(means) > 1 else torch.zeros_like(means[0])
        return (self.values - means.mean(0)).square(), spread + temperature * log_variances.exp().mean(0)


def read(dataset: Dataset[Any], task: Task, batch_size: int, options: Mapping[str, Any]) -> tuple[list[Any], Tensor]:
    """The inputs of a dataset in batches, and all targets."""
    scalar = getattr(dataset, "ndim", 1) == 0  # has both methods, which fail
    if scalar or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise TypeError(f"dataset must be a torch dataset of inputs and targets, not {shown(dataset)}.")
    batches = list(loader_of(dataset, batch_size=batch_size, **{"generator": torch.Generator(), **options}))
    if not batches:
        raise ValueError("the dataset is empty: there is nothing to calibrate by.")
    inputs, found = zip(*map(parted, batches), strict=True)
    for target in found:
        require_tensor("the targets of the dataset", target)
    targets = torch.cat(found)
    if task == "classification" and (targets.ndim != 1 or targets.is_floating_point()):
        raise TypeError('calibration needs one integer label for each sample; for values, give task="gaussian".')
    if not targets.isfinite().all():
        raise ValueError("some targets are not finite: look for bad samples.")
    return list(inputs), targets


def target_of(task: Task, targets: Tensor, outputs: Tensor) -> Target:
    """The targets, checked against the model's outputs before calibration."""
    if task == "classification":
        return Labels(require_labels(targets, outputs[0]))
    return Values(like(targets, _precise(outputs[0]).chunk(2, -1)[0]), outputs)


def minimize(
    outputs: Callable[[float], Tensor], target: Target, scales: Sequence[float] = SCALES
) -> tuple[float, float, float]:
    """The best temperature and scale, and the NLL with both. `outputs(scale)` are those of the draws."""
    results = []
    for scale in scales:
        drawn = outputs(scale)
        chosen = temperature(drawn, target)
        results.append((target.smoothed_nll(drawn, chosen), scale, chosen, target.nll(drawn, chosen)))
    _, scale, chosen, loss = min(results)
    return chosen, scale, loss


def temperature(outputs: Tensor, target: Target) -> float:
    """The temperature with the lowest smoothed NLL: by a wide grid, then golden section around its lowest point."""
    end = math.log(target.hottest)
    grid = torch.linspace(-end, end, 25).tolist()
    losses = [target.smoothed_nll(outputs, math.exp(t)) for t in grid]
    lowest = losses.index(min(losses))
    low, high = grid[max(lowest - 1, 0)], grid[min(lowest + 1, len(grid) - 1)]
    for _ in range(20):  # to 10^-5 of the logarithm
        length = GOLDEN * (high - low)
        if target.smoothed_nll(outputs, math.exp(high - length)) < target.smoothed_nll(outputs, math.exp(low + length)):
            high = low + length
        else:
            low = high - length
    return math.exp((low + high) / 2)


def _precise(values: Tensor) -> Tensor:
    return values.cpu().double()  # on the CPU, as some devices have no float64
