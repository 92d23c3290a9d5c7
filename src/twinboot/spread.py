"""How far copies of weights stand apart: sigma squared, line 10 of Algorithm 1, for any number of copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ._core.replicate import wide
from ._core.sharding import local
from .partition import Partition

# Which parameters, by their places in the partition, and for each copy those of its weights.
Part = tuple[Sequence[int], Sequence[Sequence[Tensor]]]


def variance(partition: Partition, replicas: int, parts: Iterable[Part]) -> Tensor:
    """sum_b ||w_b - mean||^2 / ((B - 1) D) behind each sigma, by Welford's recurrence: for two copies the paper's
    formula itself. The weights come in parts: all at once, or one by one where they are not all in memory."""
    sums = partition.sigma.new_zeros(replicas - 1, len(partition.sigma))
    for which, (first, *others) in parts:
        center = [wide(w) for w in first]
        for k, (total, copy) in enumerate(zip(sums, others, strict=True), start=1):
            apart = torch._foreach_sub([wide(w) for w in copy], center)
            partition.add_squares_(total, which, apart, first)
            if k < len(others):
                center = list(torch._foreach_add(center, torch._foreach_div(apart, k + 1)))
    found = torch.zeros_like(partition.sigma)
    for k, total in enumerate(sums, start=1):
        found.addcdiv_(total, partition.sizes, value=k / (k + 1) / len(sums))
    return found


def apart(copies: Sequence[Tensor]) -> Tensor:
    """Where not all copies of a weight agree, as a mask. In half precision rounding makes single entries agree by
    chance, so there it is one answer for the whole weight. Of sharded ones, for the part that is here."""
    first, *others = (local(w) for w in copies)
    found = torch.stack([w != first for w in others]).any(0)
    return found if wide(first) is first else found.any()
