"""What sigma is at least, where the data say little.

In a direction that no measurement constrains no gradient moves the twins, so they stay where they began, together, and
their distance says nothing. What is known there is what was known before: a prior, here N(initial, prior^2) for each
cell. With J the derivatives of the measurements, a cell that is seen alone, all others known, keeps the variance

    1 / (1 / prior^2 + (J'J) / noise^2)

of which the diagonal of J'J is enough, and random signs z give it without J itself: E (J'z)^2 = diag(J'J). True
variances are larger, since the other cells are not known: this is a floor, and sigma is the twins' where that is more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._core import seeds
from ..groups import Partition
from .measurements import Weighted

PROBES = 8  # of random signs; with nine cells to a block this knows the floor to a tenth


def floor(field: Tensor, data: Weighted, partition: Partition, prior: float, noise: float, seed: int) -> Tensor:
    """The floor for each cell of the field, the same within a group. `noise` and `prior` are standard deviations."""
    operator, shape = data.seen()
    generator = torch.Generator(field.device).manual_seed(seeds.derive(seed, "floor"))
    information = torch.zeros_like(partition.sigma)
    for _ in range(PROBES):
        leaf = field.detach().clone().requires_grad_()
        signs = field.new_empty(shape).bernoulli_(generator=generator).mul_(2).sub_(1)
        with torch.enable_grad():
            [pulled] = torch.autograd.grad(operator(leaf.clone()), leaf, signs)
        information += partition.sum_of_squares([pulled]) / partition.sizes / PROBES
    if not prior:
        return torch.zeros_like(field)
    least = (1 / prior**2 + information / max(noise, 1e-30) ** 2).rsqrt()
    [expanded] = partition.expand([field], of=least)
    return expanded.to(field).expand_as(field)
