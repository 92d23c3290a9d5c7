"""Gradients that the twins have in part in common, so that their mean learns faster with Adam and its kin.

A twin on its own learns from its own batch alone, half of the samples of a step where twins divide the data. An
optimizer that divides a gradient by its size, as Adam does, then takes smaller steps along what the batches agree on,
for more of a gradient is noise; and to average the twins afterwards gives none of that back. With a share c of each
gradient pooled,

    g_b  <-  (1 - c) g_b + c mean(g)

the mean of the gradients is what it was, and their differences are 1 - c times as large. For c < 1 the twins rest where
they would rest, for all of these vanish only where all g_b do. What changes is the way: on losses of one curvature H,
whose slopes differ by s, the distance of two twins under gradient descent obeys

    d' = -(1 - c) (H d + s)

which ends at d = -H^-1 s, 1 / (1 - c) times as late, and with 1 - c times the variance that the noise of batches adds.
So sigma is right where twins have settled. Twins of a network that is stopped long before, or is reset often, stand
less apart than they would. With Adam, where gradients are mostly noise of batches, their size, of two twins, is

    q = sqrt((1 + (1 - c)^2) / 2)

of what it was: twins part (1 - c) / q times as fast, 0.41 for c = 0.7, while their mean goes 1 / q times as far along
what the batches agree on, 1.35. `noise` of `fit` and `Estimate.scale`, then 2.4, can make up for the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._core.checks import require_number
from ._core.sharding import local
from .distributed.apart import Apart
from .twins import Twins


@torch.no_grad()
def pool_gradients(twins: Twins, share: float) -> None:
    """Replace each twin's gradients by their mean over the twins, in part: once for each `optimizer.step()`, before it
    and before clipping, after the last `backward()`.

    Args:
        twins: after a backward pass of each of them. Those of `Apart` are in different processes, and refused.
        share: from 0, where each keeps its own as in the paper, to below 1, where all would have the mean and never
            part.

    >>> twins = Twins(torch.nn.Linear(1, 1, bias=False))
    >>> for twin, slope in zip(twins, (0.0, 4.0), strict=True):
    ...     (slope * twin.weight).sum().backward()
    >>> pool_gradients(twins, 0.5)
    >>> [twin.weight.grad.item() for twin in twins]
    [1.0, 3.0]
    """
    require_share(share)
    if share == 0:
        return
    if isinstance(twins, Apart):
        raise TypeError("the twins of Apart are in different processes: pool the gradients of Twins in one.")
    if not isinstance(twins, Twins):
        raise TypeError(f"pool_gradients takes Twins, not {type(twins).__name__}: if that is around twins, give those.")
    if any(p.grad is not None and p.grad.is_sparse for p in twins.parameters()):
        raise TypeError("sparse gradients cannot be pooled: make the embedding with sparse=False.")
    if twins.stacked:
        for p in twins.parameters():
            if p.grad is not None:
                p.grad.lerp_(p.grad.mean(0, keepdim=True), share)
        return
    of_each = zip(*(twin.parameters() for twin in twins), strict=True)
    own = [_gradients(copies) for copies in of_each if any(p.grad is not None for p in copies)]
    if not own:
        return
    gradients = [list(of_twin) for of_twin in zip(*own, strict=True)]
    mean = torch._foreach_lerp(gradients[0], gradients[1], 1 / 2)
    for number, of_twin in enumerate(gradients[2:], start=3):
        torch._foreach_lerp_(mean, of_twin, 1 / number)
    for of_twin in gradients:
        torch._foreach_lerp_(of_twin, mean, share)


def require_share(share: float) -> None:
    require_number("the share of gradients that is pooled", share)
    if share >= 1:
        raise ValueError(f"the share of gradients that is pooled must be below 1, not {share!r}.")


def _gradients(copies: tuple[Tensor, ...]) -> list[Tensor]:
    """Of one weight of each twin; a twin whose pass did not use it has a gradient of 0."""
    for p in copies:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return [local(p.grad) for p in copies]  # type: ignore[arg-type]
