"""The objective of each member near where it stands: its value, its slope and its curvature.

The objective is the sum of the losses of the samples, each as often as the member counts it. For squared errors the
curvature is that of Gauss and Newton, kept as a triangular root so that no digits are lost; for other losses it is the
Hessian. Both exist in two ways that give the same numbers: all members at once by `vmap`, or, for models that cannot
be vmapped, one member and one parameter after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import grad_and_value, jacfwd, vmap

from .problem import Problem

AT_ONCE = 4_000_000  # the most entries of stacked Jacobians: 32 MB


class Local(NamedTuple):
    """For each member, a quadratic model of its objective. Squares: loss = |root d + slope|^2 for a step d, and `root`
    is triangular. Else: loss + slope d + d root d / 2, and `root` is the Hessian."""

    loss: Tensor  # [members]
    slope: Tensor  # [members, p]
    root: Tensor  # [members, p, p]
    unit: Tensor  # [members]: by how much resampling raises the objective, in one direction and on average
    table: Tensor  # [members, rows, p + 1]: for squares, the weighted Jacobian and residuals; no rows if too many

    def take(self, which: Tensor) -> Local:
        return Local(*(t[which] for t in self))

    def put(self, which: Tensor, other: Local) -> None:
        for own, new in zip(self, other, strict=True):
            own[which] = new


class Locals:
    """Evaluates members. `vmapped` says whether all at once."""

    def __init__(self, problem: Problem, vmapped: bool | None = None) -> None:
        self.problem = problem
        self.squares = problem.squares
        self.vmapped = self._can_be_vmapped() if vmapped is None else vmapped

    def _can_be_vmapped(self) -> bool:
        """Whether the model gives the same outputs by vmap as without."""
        stack = torch.stack([self.problem.start, self.problem.start])
        try:
            found = self._jacobians(stack, True)[0]
            if not self.squares:
                self._hessians(stack, torch.ones(2, self.problem.n).to(stack), True)
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            return False
        plain = self.problem.residuals(stack[0]) if self.squares else self.problem.losses(stack[0])
        return bool(torch.allclose(found[1].reshape(plain.shape), plain, rtol=1e-6, atol=1e-9))

    def __call__(self, members: Tensor, weights: Tensor, with_unit: bool = True) -> Local:
        each = max(1, AT_ONCE // (self.problem.n * self.problem.size))
        parts = [
            self._squares(m, w) if self.squares else self._newton(m, w, with_unit)
            for m, w in zip(members.split(each), weights.split(each), strict=True)
        ]
        return parts[0] if len(parts) == 1 else Local(*(torch.cat(own) for own in zip(*parts, strict=True)))

    def _squares(self, members: Tensor, weights: Tensor) -> Local:
        residuals, jacobian = self._jacobians(members, self.vmapped)
        m, rows, p = jacobian.shape
        root = weights.repeat_interleave(rows // weights.shape[1], 1).sqrt()
        table = torch.cat([jacobian, residuals[:, :, None]], 2) * root[:, :, None]
        finite = table.flatten(1).isfinite().all(1)
        table = torch.where(finite[:, None, None], table, 0.0)
        if rows < p + 1:
            table = torch.cat([table, table.new_zeros(m, p + 1 - rows, p + 1)], 1)
        triangle = torch.linalg.qr(table, mode="r").R
        loss = (root * residuals).square().sum(1)
        loss = torch.where(finite, loss, torch.inf)
        # The mean weight makes this that of a sample that counts once.
        spare = (weights.sum(1) * (rows / weights.shape[1]) - p).clamp(min=1)
        kept = table if weights.numel() * p <= AT_ONCE else table[:, :0]
        return Local(loss, triangle[:, :p, p], triangle[:, :p, :p], loss / spare, kept)

    def bend(self, members: Tensor, weights: Tensor, local: Local, step: Tensor) -> Tensor:
        """How the weighted residuals bend along a step, [members, rows]: their second derivative in its direction."""
        h = 0.1  # of the step (Transtrum and Sethna 2012)

        def values(vector: Tensor) -> Tensor:
            return self.problem.residuals(vector).reshape(-1)

        moved = members + h * step
        after = vmap(values)(moved) if self.vmapped else torch.stack([values(vector) for vector in moved])
        root = weights.repeat_interleave(after.shape[1] // weights.shape[1], 1).sqrt()
        jacobian, residuals = local.table[:, : after.shape[1], :-1], local.table[:, : after.shape[1], -1]
        return 2 / h * ((root * after - residuals) / h - (jacobian @ step[:, :, None])[:, :, 0])

    def _newton(self, members: Tensor, weights: Tensor, with_unit: bool) -> Local:
        loss, slope, hessian = self._hessians(members, weights, self.vmapped)
        finite = loss.isfinite() & slope.isfinite().all(1) & hessian.flatten(1).isfinite().all(1)
        loss = torch.where(finite, loss, torch.inf)
        slope = torch.where(finite[:, None], slope, 0.0)
        hessian = torch.where(finite[:, None, None], hessian, 0.0)
        unit = torch.zeros_like(loss)
        if with_unit:
            own = self._jacobians(members, self.vmapped)[1]
            spread = own.transpose(1, 2) @ (weights[:, :, None] * own)
            solved: Tensor = torch.linalg.lstsq(hessian, spread).solution
            unit = solved.diagonal(dim1=1, dim2=2).sum(1).abs() / slope.shape[1]
        return Local(loss, slope, hessian, unit, slope.new_empty(len(slope), 0, 0))

    def _jacobians(self, members: Tensor, vmapped: bool) -> tuple[Tensor, Tensor]:
        """The residuals, or the losses, of each member [members, rows], and their derivatives [members, rows, p]."""
        plain = self.problem.residuals if self.squares else self.problem.losses

        def values(vector: Tensor) -> Tensor:
            return plain(vector).reshape(-1)

        def twice(vector: Tensor) -> tuple[Tensor, Tensor]:
            found = values(vector)
            return found, found

        if vmapped:
            jacobian, found = vmap(jacfwd(twice, has_aux=True))(members)
            return found.detach(), jacobian.detach()
        pairs = [_forward(values, member) for member in members]
        return torch.stack([found for found, _ in pairs]), torch.stack([jacobian for _, jacobian in pairs])

    def _hessians(self, members: Tensor, weights: Tensor, vmapped: bool) -> tuple[Tensor, Tensor, Tensor]:
        def objective(vector: Tensor, weight: Tensor) -> Tensor:
            return (weight * self.problem.losses(vector)).sum()

        if vmapped:

            def slope(vector: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                found, value = grad_and_value(objective)(vector, weight)
                return found, (found, value)

            hessian, (found, value) = vmap(jacfwd(slope, has_aux=True))(members, weights)
            return value.detach(), found.detach(), hessian.detach()
        each = [_double_backward(objective, m, w) for m, w in zip(members, weights, strict=True)]
        values, slopes, hessians = zip(*each, strict=True)
        return torch.stack(values), torch.stack(slopes), torch.stack(hessians)

    def influence(self, vector: Tensor) -> Tensor | None:
        """How much each sample moves each parameter of a fit to all data, [n, p]: by one more count of that sample.
        None where the objective is not curved upwards in all directions."""
        ones = torch.ones(1, self.problem.n).to(vector)
        problem, squares = self.problem, self.squares
        losses = Locals.__new__(Locals)
        losses.problem, losses.squares, losses.vmapped = problem, False, self.vmapped
        _, _, hessian = losses._hessians(vector[None], ones, self.vmapped)
        own = losses._jacobians(vector[None], self.vmapped)[1][0]
        candidates = [hessian[0]]
        if squares:
            jacobian = self._jacobians(vector[None], self.vmapped)[1][0]
            candidates.append(2 * jacobian.T @ jacobian)
        for matrix in candidates:
            scale = matrix.diagonal().abs().sqrt().clamp(min=1e-300)
            factor, failed = torch.linalg.cholesky_ex(matrix / scale / scale[:, None])
            if bool(matrix.isfinite().all()) and not int(failed):
                return -(torch.cholesky_solve((own / scale).T, factor).T / scale)
        return None


def _forward(values: Callable[[Tensor], Tensor], vector: Tensor) -> tuple[Tensor, Tensor]:
    """Values and their derivatives by forward mode, one parameter at a time."""
    columns, found = [], vector.new_empty(0)
    with torch.no_grad(), forward_ad.dual_level():
        for direction in torch.eye(len(vector)).to(vector):
            dual = values(forward_ad.make_dual(vector, direction))
            found, tangent = forward_ad.unpack_dual(dual)
            columns.append(torch.zeros_like(found) if tangent is None else tangent.clone())
        found = found.clone()
    return found, torch.stack(columns, 1)


def _double_backward(
    objective: Callable[[Tensor, Tensor], Tensor], vector: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Value, gradient and Hessian by reverse mode, one row of the Hessian at a time."""
    with torch.enable_grad():
        leaf = vector.detach().requires_grad_()
        value = objective(leaf, weight)
        [slope] = torch.autograd.grad(value, leaf, create_graph=True)
        rows = []
        for entry in slope:
            row = None
            if entry.requires_grad:
                [row] = torch.autograd.grad(entry, leaf, retain_graph=True, allow_unused=True)
            rows.append(torch.zeros_like(leaf) if row is None else row)
    return value.detach(), slope.detach(), torch.stack(rows).detach()
