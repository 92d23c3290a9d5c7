"""The temperature and the scale of the weight noise with which an estimate predicts some samples best.

A temperature divides logits: above 1 it makes a model less sure of itself. The scale multiplies sigma where weights are
drawn. Both are chosen by the negative log-likelihood of samples that no twin saw, so they know nothing of training.

Where all of a few samples are predicted right, their likelihood only grows as the temperature falls. So one imaginary
sample is counted with them: its log-probabilities are the means of theirs, and its label is divided evenly among all
classes (as in Laplace's rule of succession, which has one sample for each class). Among many samples it hardly counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
COLDEST, HOTTEST = math.log(0.05), math.log(20.0)
GOLDEN = (math.sqrt(5) - 1) / 2
IMPOSSIBLE = -50.0  # log-probability of what a model rules out, such as classes that it masks: as bad as can be


def best(logits: Callable[[float], Tensor], labels: Tensor) -> tuple[float, float, float]:
    """Temperature, scale, and the loss with both. `logits` gives [draws, samples, classes] for a scale."""
    found = []
    for scale in SCALES:
        drawn = logits(scale)
        hot = temperature(drawn, labels)
        found.append((cautious(drawn, labels, hot), scale, hot, nll(drawn, labels, hot)))
    _, scale, hot, loss = min(found)
    return hot, scale, loss


def nll(logits: Tensor, labels: Tensor, temperature: float) -> float:
    """The mean negative log-likelihood of labels under probabilities that are averaged over the draws."""
    return -_precise(_averaged(logits, temperature).gather(1, labels[:, None])).mean().item()


def cautious(logits: Tensor, labels: Tensor, temperature: float) -> float:
    """The same with one imaginary sample more: the mean of all samples, its label divided among all classes."""
    logs = _averaged(logits, temperature)
    own, imaginary = _precise(logs.gather(1, labels[:, None])), _precise(logs.clamp_min(IMPOSSIBLE).mean(1))
    return -((own.sum() + imaginary.mean()) / (len(labels) + 1)).item()


def _averaged(logits: Tensor, temperature: float) -> Tensor:
    """Logarithms of probabilities that are averaged over the draws: [samples, classes]."""
    return (logits / temperature).log_softmax(2).logsumexp(0) - math.log(len(logits))


def _precise(values: Tensor) -> Tensor:
    return values.cpu().double()  # some devices have no float64


def temperature(logits: Tensor, labels: Tensor) -> float:
    """That with the lowest `cautious` loss: over a wide grid, then by golden section between its neighbours."""
    grid = torch.linspace(COLDEST, HOTTEST, 25).tolist()
    losses = [cautious(logits, labels, math.exp(t)) for t in grid]
    lowest = losses.index(min(losses))
    low, high = grid[max(lowest - 1, 0)], grid[min(lowest + 1, len(grid) - 1)]
    for _ in range(20):  # to 10^-5 of the logarithm
        step = GOLDEN * (high - low)
        if cautious(logits, labels, math.exp(high - step)) < cautious(logits, labels, math.exp(low + step)):
            high = low + step
        else:
            low = high - step
    return math.exp((low + high) / 2)
