"""Centered draws: shifted so that the mean of their outputs is the output of the mean model.

Noise that spreads the predictions of a deep network as much as twins differ does not only spread its outputs. It also
shifts their mean, away from what was learned. The spread is what was asked for, so the shift is taken back. For classes
the outputs are logits, and probabilities are averaged over the shifted draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .prediction import Task

MOST_OUTPUTS = 2**26  # of all draws together that are in memory at once
RULED_OUT = 1e3  # a class whose logit is so far from its usual one has a probability of 0 in one of the two


def around(draws: Tensor, center: Tensor, task: Task, temperature: float = 1.0) -> Tensor:
    """The outputs [draws, ...] of a model, shifted so that their mean over the draws is `center`. Classes that a model
    rules out by a logit of -inf or -1e9, in all draws or in some, stay ruled out and do not count. `temperature` has
    divided these logits.

    >>> around(torch.tensor([[1.0], [3.0]]), torch.tensor([5.0]), "regression").flatten().tolist()
    [4.0, 6.0]
    """
    values = draws if draws.dtype == torch.float64 else draws.float()
    apart = values - center
    known = apart.abs() < (RULED_OUT / temperature if task == "classification" else math.inf)
    shift = apart.masked_fill_(~known, 0.0).sum(0) / known.sum(0).clamp(min=1)
    return torch.sub(values, shift, out=apart)


def in_parts(sizes: Sequence[int], most: int | None = None) -> Iterator[slice]:
    """Consecutive parts of some sizes, each with at most so much in all (`MOST_OUTPUTS`), or with one size alone.

    >>> list(in_parts([3, 4, 2, 9], 7))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    start, total, most = 0, 0, MOST_OUTPUTS if most is None else most
    for place, size in enumerate(sizes):
        if place > start and total + size > most:
            yield slice(start, place)
            start, total = place, 0
        total += size
    yield slice(start, len(sizes))
