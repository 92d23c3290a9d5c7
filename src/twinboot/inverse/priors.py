"""What a prior adds to sigma where the data say little.

No gradient moves the twins in a direction that no measurement constrains. They stay together there, and their distance
says nothing. What is known there is what was known before: a prior, N(initial, prior^2) for each cell. With J the
derivatives of the measurements, a cell has the posterior variance

    1 / (1 / prior^2 + (J'J) / noise^2)

if all other cells are known. The diagonal of J'J is enough, and random signs z give it without J: E (J'z)^2 =
diag(J'J). The true variance is larger, because the other cells are not known. So sigma is the larger of this value and
the twins' own.

To add a kind of prior that is chosen by name, add an entry to `KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core import seeds
from .._core.checks import is_number, one_of, shown
from ..groups import Partition
from .measurements import Measurements

PROBES = 8  # vectors of random signs; with nine cells to a block, sigma is then known to a tenth

# Name -> the standard deviation of the prior, from the field that was found and the initial one.
KINDS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "found": lambda field, initial: (field - initial).square().mean().sqrt().item(),
}


def as_prior(prior: Any) -> Any:
    """A number, the name of a kind, or None; anything else is refused."""
    if isinstance(prior, Tensor) and prior.numel() == 1 and prior.is_floating_point() and not prior.is_meta:
        prior = prior.item()
    if prior is None or (isinstance(prior, str) and prior in KINDS) or (is_number(prior) and 0 < prior < math.inf):
        return prior
    error = ValueError if isinstance(prior, str) or is_number(prior) else TypeError
    raise error(f"prior must be a number above 0, {one_of(KINDS)} or None, not {shown(prior)}.")


def raised(
    sigma: Tensor,
    prior: float | str | None,
    field: Tensor,
    initial: Tensor,
    data: Measurements,
    partition: Partition,
    noise: float,
    seed: int,
) -> Tensor:
    """Sigma, or the root of the variance above where that is more. `noise` is the standard deviation of the noise in
    the measurements, and `before` that of the prior. The diagonal of J'J is averaged over the cells of a group."""
    before = KINDS[prior](field, initial) if isinstance(prior, str) else prior
    if not before:
        return sigma
    operator, shape = data.part(data.seen), (len(data.seen), data.observed.numel() // data.n)
    generator = torch.Generator(field.device).manual_seed(seeds.derive(seed, "floor"))
    information = torch.zeros_like(partition.sigma)
    for _ in range(PROBES):
        leaf = field.detach().clone().requires_grad_()
        signs = field.new_empty(shape).bernoulli_(generator=generator).mul_(2).sub_(1)
        with torch.enable_grad():
            [pulled] = torch.autograd.grad(operator(leaf.clone()), leaf, signs)
        information += partition.sum_of_squares([pulled]) / partition.sizes / PROBES
    [least] = partition.expand([field], of=(1 / float(before) ** 2 + information / max(noise, 1e-30) ** 2).rsqrt())
    return torch.maximum(sigma, least.to(field).expand_as(field))
