"""Gradients that the twins have in part in common, so that their mean learns from all samples of a step.

A twin on its own sees its own batch alone, half of the samples of a step where twins divide the data. Optimizers that
divide a gradient by its size, as Adam does, then take smaller steps along what the batches agree on, for the rest is
noise; and to average the twins afterwards gives none of that back. With a share c of each gradient pooled,

    g_b = (1 - c) g_b + c mean(g)

the mean of the gradients stays what it was, and their differences are 1 - c times as large. Where a twin settles is
left as it was, too: the distance d of two twins on quadratic losses obeys

    d' = -(1 - c) (H d + s),    s: how much the slopes of their samples differ

which ends at d = -H^-1 s whatever c is, only 1 / (1 - c) times as late. So sigma ends as what the samples leave open,
with less of the noise of batches in it. Networks are stopped long before: their twins are on their way, where d grows
1 - c times as fast, so that sigma is 1 / (1 - c) times too small. `fit` takes so much more of it as noise, in training
and for predictions; resets are of sigma as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .apart import Apart
from .sharding import local
from .twins import Twins


@torch.no_grad()
def pool_gradients(twins: Twins, share: float) -> None:
    """Replace each twin's gradients by their mean over the twins, in part: after `backward()`, before `step()`.

    Args:
        twins: after a backward pass of each of them.
        share: from 0, where each keeps its own as in the paper, to 1, where all have the mean.

    >>> twins = Twins(torch.nn.Linear(1, 1, bias=False))
    >>> for twin, slope in zip(twins, (0.0, 4.0), strict=True):
    ...     (slope * twin.weight).sum().backward()
    >>> pool_gradients(twins, 0.5)
    >>> [twin.weight.grad.item() for twin in twins]
    [1.0, 3.0]
    """
    require_share(share)
    if isinstance(twins, Apart):
        raise TypeError("the twins of Apart are in different processes, so that their gradients cannot be pooled here.")
    if share == 0:
        return
    if twins.stacked:
        for p in twins.parameters():
            if p.grad is not None:
                p.grad.lerp_(p.grad.mean(0, keepdim=True), share)
        return
    of_each = zip(*([p for p in twin.parameters() if p.requires_grad] for twin in twins), strict=True)
    own = [_gradients(copies) for copies in of_each if any(p.grad is not None for p in copies)]
    if not own:
        return
    gradients = [list(of_twin) for of_twin in zip(*own, strict=True)]
    mean = torch._foreach_add(gradients[0], gradients[1])
    for others in gradients[2:]:
        torch._foreach_add_(mean, others)
    torch._foreach_div_(mean, len(gradients))
    for of_twin in gradients:
        torch._foreach_lerp_(of_twin, mean, share)


def faster(share: float) -> float:
    """So many times as fast the twins would part with nothing pooled."""
    require_share(share)
    if share == 1:
        raise ValueError("with all of the gradients pooled the twins never part: pool a share below 1, such as 0.7.")
    return 1 / (1 - share)


def require_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"the share of gradients that is pooled must lie between 0 and 1, not {share!r}.")


def _gradients(copies: tuple[Tensor, ...]) -> list[Tensor]:
    """Of one weight of each twin; a twin whose pass did not use it has a gradient of 0."""
    for p in copies:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return [local(p.grad) for p in copies]  # type: ignore[arg-type]
