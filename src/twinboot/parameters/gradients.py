"""Minima by gradients alone: L-BFGS for models with many parameters, Adam with mini-batches for many data."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vmap

from .._core import seeds
from .problem import Problem

WINDOW = 10  # iterations of L-BFGS
LEFT = 1e-4  # by so much of the spread of the samples' losses may the objective still fall in a window
MOST = 1000  # iterations


def by_lbfgs(problem: Problem, start: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Each member [members, p] at its minimum, one after the other, and whether it has settled."""
    found = [_lbfgs(problem, own, weight) for own, weight in zip(start, weights, strict=True)]
    return torch.stack([member for member, _ in found]), torch.tensor([done for _, done in found])


def _lbfgs(problem: Problem, start: Tensor, weight: Tensor) -> tuple[Tensor, bool]:
    leaf = start.clone().requires_grad_()
    with torch.no_grad():
        unit = problem.losses(start).std().item() or 1.0
    optimizer = torch.optim.LBFGS(
        [leaf],
        max_iter=WINDOW,
        max_eval=3 * WINDOW,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = (weight * problem.losses(leaf)).sum() / unit
        value.backward()
        return value

    last = math.inf
    for _ in range(MOST // WINDOW):
        before, kept = last, leaf.detach().clone()
        with torch.enable_grad():
            optimizer.step(closure)
        with torch.no_grad():
            last = (weight * problem.losses(leaf)).sum().item() / unit
        if not math.isfinite(last):
            return kept, False
        if before - last <= LEFT:
            return leaf.detach(), True
    return leaf.detach(), False


class Batches:
    """Adam for a stack of members, with the learning rate falling to 0 along a cosine.

    All members read the same batches, in which each counts the samples as often as it drew them. So what they differ by
    is their data, and less the order of the samples.
    """

    def __init__(self, problem: Problem, batch_size: int, epochs: int, lr: float, seed: int) -> None:
        self.problem, self.batch_size, self.epochs, self.lr, self.seed = problem, batch_size, epochs, lr, seed
        self.vmapped: bool | None = None

    def __call__(self, start: Tensor, weights: Tensor, purpose: str, tick: Callable[[], object]) -> Tensor:
        members, n = start.clone(), self.problem.n
        first, second = torch.zeros_like(members), torch.zeros_like(members)
        steps, step = self.epochs * math.ceil(n / self.batch_size), 0
        for epoch in range(self.epochs):
            generator = torch.Generator().manual_seed(seeds.derive(self.seed, purpose, epoch))
            for indices in torch.randperm(n, generator=generator).split(self.batch_size):
                inputs, target = self.problem.read(indices)
                slope = self._slopes(members, weights[:, indices.to(weights.device)], inputs, target)
                if not bool(slope.isfinite().all()):
                    raise FloatingPointError(
                        f"the gradient is not finite in pass {epoch + 1} over the data: look for bad samples, or lower "
                        "lr."
                    )
                step += 1
                first = first.lerp(slope, 0.1)
                second = second.lerp(slope.square(), 0.001)
                rate = self.lr * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
                sizes = (second / (1 - 0.999**step)).sqrt()
                members = members - rate * (first / (1 - 0.9**step)) / (sizes + 1e-12)
            tick()
        return members

    @torch.no_grad()
    def losses(self, member: Tensor) -> Tensor:
        """The losses of all samples, [n]."""
        parts = torch.arange(self.problem.n).split(self.batch_size)
        return torch.cat([self.problem.losses(member, *self.problem.read(indices)) for indices in parts])

    def _slopes(self, members: Tensor, weights: Tensor, inputs: tuple[object, ...], target: object) -> Tensor:
        def objective(vector: Tensor, weight: Tensor) -> Tensor:
            return (weight * self.problem.losses(vector, inputs, target)).mean()

        if self.vmapped is not False:
            try:
                found: Tensor = vmap(grad(objective))(members, weights)
            except (RuntimeError, NotImplementedError):
                if self.vmapped:
                    raise
                self.vmapped = False
            else:
                self.vmapped = True
                return found
        slopes = []
        for member, weight in zip(members, weights, strict=True):
            with torch.enable_grad():
                leaf = member.clone().requires_grad_()
                slopes += torch.autograd.grad(objective(leaf, weight), leaf)
        return torch.stack(slopes)
