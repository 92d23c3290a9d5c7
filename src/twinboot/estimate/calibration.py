"""The temperature and the scale of the weight noise with which an estimate predicts some samples best.

A temperature T makes a model less sure of itself where it is above 1: a probability p becomes p^(1/T), and is scaled to
be one again. It divides logits, and multiplies the variance of a normal distribution. The scale multiplies sigma where
weights are drawn. Both are chosen by the negative log-likelihood of samples that no twin saw, so they know nothing of
training.

Where all of a few samples are predicted right, their likelihood only grows as the temperature falls. So one imaginary
sample is counted with them. Of classes: its log-probabilities are the means of theirs, and its label is divided evenly
among all classes (as in Laplace's rule of succession, which has one sample for each class). Of values: it is as far off
as the model says before it is calibrated. Among many samples it hardly counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .._core.batches import loader_of
from .._core.checks import require_tensor, shown
from .prediction import Task, checked_labels, like

SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # the last for twins that part slowly: `pool_gradients`
GOLDEN = (math.sqrt(5) - 1) / 2
IMPOSSIBLE = -50.0  # log-probability of what a model rules out, such as classes that it masks: as bad as can be


class Truth(Protocol):
    """What a model's outputs, [draws, samples, ...], are judged by: the mean negative log-likelihood of it at a
    temperature, and the same with the imaginary sample. Temperatures go from 1 / hottest to hottest."""

    hottest: float

    def nll(self, outputs: Tensor, temperature: float) -> float: ...

    def cautious(self, outputs: Tensor, temperature: float) -> float: ...


def read(
    dataset: Dataset[Any], task: Task, batch_size: int, options: Mapping[str, Any]
) -> tuple[list[tuple[Any, ...]], Tensor]:
    """The inputs of a dataset in batches, and all targets."""
    if task == "regression":
        raise ValueError(
            "calibrate needs a likelihood, and this estimate predicts values without their noise: train with the "
            'loss "gaussian", or give the noise to interval().'
        )
    scalar = getattr(dataset, "ndim", 1) == 0  # which has both methods, and can do neither
    if scalar or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise TypeError(f"dataset must be a torch dataset of inputs and targets, not {shown(dataset)}.")
    batches = list(loader_of(dataset, batch_size=batch_size, **{"generator": torch.Generator(), **options}))
    if not batches:
        raise ValueError("the dataset is empty: there is nothing to calibrate by.")
    if not all(isinstance(batch, (tuple, list)) and len(batch) > 1 for batch in batches):
        raise TypeError("samples of the dataset must be tuples of an input and a target.")
    for batch in batches:
        require_tensor("the targets of the dataset", batch[-1])
    targets = torch.cat([batch[-1] for batch in batches])
    if task == "classification" and (targets.ndim != 1 or targets.is_floating_point()):
        raise TypeError('calibrate needs one integer label for each sample; of values it needs task="gaussian".')
    if not targets.isfinite().all():
        raise ValueError("some targets are not finite: look for bad samples.")
    return [tuple(batch[:-1]) for batch in batches], targets


def truth(task: Task, targets: Tensor, outputs: Tensor) -> Truth:
    """The targets, checked against what a model gives for them before it is calibrated."""
    if task == "classification":
        return Labels(checked_labels(targets, outputs[0]))
    return Values(like(targets, _precise(outputs[0]).chunk(2, -1)[0]), outputs)


def best(outputs: Callable[[float], Tensor], truth: Truth) -> tuple[float, float, float]:
    """Temperature, scale, and the loss with both. `outputs` gives those of the draws for a scale."""
    found = []
    for scale in SCALES:
        drawn = outputs(scale)
        hot = temperature(drawn, truth)
        found.append((truth.cautious(drawn, hot), scale, hot, truth.nll(drawn, hot)))
    _, scale, hot, loss = min(found)
    return hot, scale, loss


def temperature(outputs: Tensor, truth: Truth) -> float:
    """That with the lowest `cautious` loss: over a wide grid, then by golden section between its neighbours."""
    end = math.log(truth.hottest)
    grid = torch.linspace(-end, end, 25).tolist()
    losses = [truth.cautious(outputs, math.exp(t)) for t in grid]
    lowest = losses.index(min(losses))
    low, high = grid[max(lowest - 1, 0)], grid[min(lowest + 1, len(grid) - 1)]
    for _ in range(20):  # to 10^-5 of the logarithm
        step = GOLDEN * (high - low)
        if truth.cautious(outputs, math.exp(high - step)) < truth.cautious(outputs, math.exp(low + step)):
            high = low + step
        else:
            low = high - step
    return math.exp((low + high) / 2)


class Labels:
    """Of classes: outputs are logits, whose probabilities are averaged over the draws."""

    hottest = 20.0

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels[:, None]

    def nll(self, outputs: Tensor, temperature: float) -> float:
        return -_precise(self._logs(outputs, temperature).gather(1, self.labels)).mean().item()

    def cautious(self, outputs: Tensor, temperature: float) -> float:
        logs = self._logs(outputs, temperature)
        own, imaginary = _precise(logs.gather(1, self.labels)), _precise(logs.clamp_min(IMPOSSIBLE).mean(1))
        return -((own.sum() + imaginary.mean()) / (len(own) + 1)).item()

    def _logs(self, outputs: Tensor, temperature: float) -> Tensor:
        """Logarithms of probabilities: [samples, classes]."""
        return (outputs / temperature).log_softmax(2).logsumexp(0) - math.log(len(outputs))


class Values:
    """Of values: outputs are means and log-variances, as of `task="gaussian"`. All draws together are taken for one
    normal distribution, as `Prediction.nll` does. Those of before are the same for each scale: else that would seem
    best with which the model is surest of itself."""

    hottest = 20.0**2  # of a variance: as far for the standard deviation as for logits

    def __init__(self, values: Tensor, before: Tensor) -> None:
        self.values = _precise(values)
        self.expected = self._moments(before, 1.0)[1]

    def nll(self, outputs: Tensor, temperature: float) -> float:
        return _normal(*self._moments(outputs, temperature)).mean().item()

    def cautious(self, outputs: Tensor, temperature: float) -> float:
        squares, variance = self._moments(outputs, temperature)
        own, imaginary = _normal(squares, variance), _normal(self.expected, variance)
        return ((own.sum(0) + imaginary.mean(0)) / (len(own) + 1)).mean().item()

    def _moments(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Squared residuals, and the variance."""
        means, logarithms = _precise(outputs).chunk(2, -1)
        spread = means.var(0) if len(means) > 1 else torch.zeros_like(means[0])
        return (self.values - means.mean(0)).square(), spread + temperature * logarithms.exp().mean(0)


def _normal(squares: Tensor, variance: Tensor) -> Tensor:
    """Negative log-likelihood of what is so far, squared, from the mean of a normal distribution."""
    return 0.5 * (squares / variance + variance.log() + math.log(2 * math.pi))


def _precise(values: Tensor) -> Tensor:
    return values.cpu().double()  # some devices have no float64
