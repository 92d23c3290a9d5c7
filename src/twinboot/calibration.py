"""The temperature and the scale of the weight noise with which an estimate predicts some samples best.

A temperature divides logits: above 1 it makes a model less sure of itself. The scale multiplies sigma where weights are
drawn. Both are chosen by the negative log-likelihood of samples that no twin saw, so they know nothing of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
COLDEST, HOTTEST = math.log(0.05), math.log(20.0)
GOLDEN = (math.sqrt(5) - 1) / 2


def best(logits: Callable[[float], Tensor], labels: Tensor) -> tuple[float, float, float]:
    """Temperature, scale, and the loss with both. `logits` gives [draws, samples, classes] for a scale."""
    found = []
    for scale in SCALES:
        drawn = logits(scale)
        hot = temperature(drawn, labels)
        found.append((nll(drawn, labels, hot), scale, hot))
    loss, scale, hot = min(found)
    return hot, scale, loss


def nll(logits: Tensor, labels: Tensor, temperature: float) -> float:
    """The mean negative log-likelihood of labels under probabilities that are averaged over the draws."""
    own = (logits / temperature).log_softmax(2).gather(2, labels.expand(len(logits), -1)[:, :, None]).squeeze(2)
    return -(own.logsumexp(0) - math.log(len(logits))).cpu().double().mean().item()  # some devices have no float64


def temperature(logits: Tensor, labels: Tensor) -> float:
    """That with the lowest `nll`: the minimum over a wide grid, then by golden section between its neighbours."""
    grid = torch.linspace(COLDEST, HOTTEST, 25).tolist()
    losses = [nll(logits, labels, math.exp(t)) for t in grid]
    lowest = losses.index(min(losses))
    low, high = grid[max(lowest - 1, 0)], grid[min(lowest + 1, len(grid) - 1)]
    for _ in range(20):  # to 10^-5 of the logarithm
        step = GOLDEN * (high - low)
        if nll(logits, labels, math.exp(high - step)) < nll(logits, labels, math.exp(low + step)):
            high = low + step
        else:
            low = high - step
    return math.exp((low + high) / 2)
