"""Levenberg and Marquardt's method for a stack of members, each with data of its own.

    step: the minimum of the local model plus damping * |scale * step|^2
    a step that lowers the objective is taken and the damping falls, else it grows

`scale` makes the method blind to the units of the parameters: it is the largest curvature that was met along each axis
(Moré 1978). A member has settled when its next full step would be short against what resampling moves it by.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .local import Local, Locals

FIT = 1e-9  # of the fit to all data: so much of a standard error may be left to go
DRAW = 1e-3  # of a member: a thousandth of a standard error, far below what a few hundred draws can see
LOOSE = 1e-3  # where rounding allows no further step, this counts as settled
STILL = 1e-8  # or this change of every parameter, relative to its value, as with data that have no noise
STEPS = 300  # most steps. Warm starts need 3 to 10; the worst NIST sets need about 200 from a start far away.
MOST_DAMPING = 1e12
BEND = 0.75  # the most by which a step may bend, relative to its length (Transtrum and Sethna 2012)


@dataclass(frozen=True)
class Settled:
    members: Tensor  # [members, p]
    done: Tensor  # [members]: whether it has settled
    local: Local
    steps: int


def settle(
    evaluate: Locals,
    start: Tensor,
    weights: Tensor,
    *,
    tolerance: float,
    damping: float,
    steps: int = STEPS,
    unit: Tensor | None = None,
) -> Settled:
    """Each member at its minimum. `unit`: that of `Local`, if it is known from the fit to all data."""
    squares = evaluate.squares
    members, here = start.clone(), evaluate(start, weights, unit is None)
    here = Local(*(t.clone() for t in here))
    scale = _curvature(here, squares)
    damped, growth = torch.full_like(here.loss, damping), torch.full_like(here.loss, 2.0)
    running, done = here.loss.isfinite(), torch.zeros_like(here.loss, dtype=torch.bool)
    number = 0
    for number in range(1, steps + 1):  # noqa: B007
        which = running.nonzero().squeeze(1)
        if not len(which):
            break
        local = here.take(which)
        near = _full_step(local, squares)[1] <= tolerance**2 * (local.unit if unit is None else unit)
        done[which[near]], running[which[near]] = True, False
        which, local = which[~near], local.take(~near)
        if not len(which):
            break
        step, gain, triangle = _step(local, damped[which], scale[which], squares)
        if local.table.shape[1]:
            step = step + _bent(evaluate, members[which], weights[which], local, step, triangle, scale[which])
        moved = members[which] + step
        after = evaluate(moved, weights[which], unit is None)
        lower = (after.loss < local.loss) & step.isfinite().all(1) & (gain > 0)
        share = torch.where(lower, (local.loss - after.loss) / gain.clamp(min=1e-300), 0.0)
        good = which[lower]
        members[good] = moved[lower]
        here.put(good, after.take(lower))
        scale[good] = torch.maximum(scale[good], _curvature(after.take(lower), squares))
        factor = (1 - (2 * share - 1) ** 3).clamp(1 / 9, 2.0)
        grown = growth[which]
        damped[which] = torch.where(lower, damped[which] * factor, damped[which].clamp(min=1e-10) * grown)
        growth[which] = torch.where(lower, 2.0, grown * 2)
        running[which[damped[which] > MOST_DAMPING]] = False
    full, left = _full_step(here, squares)
    loose = (left <= LOOSE**2 * (here.unit if unit is None else unit)) | (full.abs() <= STILL * members.abs()).all(1)
    done = here.loss.isfinite() & (done | loose)
    return Settled(members, done, here, number)


def determined(local: Local, squares: bool) -> Tensor:
    """For each member, the smallest over the largest curvature once all parameters have the same; 0 if some combination
    of parameters has no effect. In the units of a Jacobian's singular values, not of their squares."""
    scale = _curvature(local, squares)
    values: Tensor
    if squares:
        values = torch.linalg.svdvals(local.root / scale[:, None, :])
    else:
        values = torch.linalg.eigvalsh(local.root / scale[:, None, :] / scale[:, :, None]).flip(-1).clamp(min=0).sqrt()
    return values[:, -1] / values[:, 0].clamp(min=1e-300)


def weakest(local: Local, squares: bool) -> Tensor:
    """The direction [p] of the first member with the least curvature, in units of `_curvature`."""
    scale = _curvature(local, squares)
    found: Tensor
    if squares:
        found = torch.linalg.svd(local.root[0] / scale[0]).Vh[-1]
    else:
        found = torch.linalg.eigh(local.root[0] / scale[0] / scale[0][:, None]).eigenvectors[:, 0]
    return found


def _curvature(local: Local, squares: bool) -> Tensor:
    """The square root of the curvature along each axis; 1 where there is none."""
    found = local.root.square().sum(1).sqrt() if squares else local.root.diagonal(dim1=1, dim2=2).abs().sqrt()
    return torch.where(found > 0, found, 1.0)


def _full_step(local: Local, squares: bool) -> tuple[Tensor, Tensor]:
    """The step to the minimum of the local model, and twice by how much it lowers the objective (for squares: once).
    Infinite if the model has no minimum."""
    unit = _curvature(local, squares)
    if squares:
        # Without a damping, the projection of the residuals on what the parameters can change.
        rank = determined(local, squares) > 0
        step = torch.linalg.solve_triangular(_safe(local.root), -local.slope[:, :, None], upper=True)[:, :, 0]
        return torch.where(rank[:, None], step, torch.inf), local.slope.square().sum(1)
    factor, failed = torch.linalg.cholesky_ex(local.root / unit[:, None, :] / unit[:, :, None])
    bad = failed > 0
    factor = torch.where(bad[:, None, None], torch.eye(unit.shape[1]).to(unit), factor)
    step = torch.cholesky_solve(-(local.slope / unit)[:, :, None], factor)[:, :, 0] / unit
    left = -(step * local.slope).sum(1)
    return torch.where(bad[:, None], torch.inf, step), torch.where(bad, torch.inf, left)


def _safe(root: Tensor) -> Tensor:
    """A triangle that can be inverted."""
    diagonal = root.diagonal(dim1=1, dim2=2)
    return root + torch.diag_embed(torch.where(diagonal == 0, 1e-300, 0.0))


def _step(local: Local, damping: Tensor, scale: Tensor, squares: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The damped step, and by how much it lowers the local model."""
    p = scale.shape[1]
    if squares:
        # The minimum of |root d + slope|^2 + damping |scale d|^2, by another triangle.
        table = torch.zeros(len(scale), 2 * p + 1, p + 1).to(scale)
        table[:, :p, :p], table[:, :p, p] = local.root, local.slope
        table[:, p : 2 * p, :p] = torch.diag_embed(damping.sqrt()[:, None] * scale)
        triangle = torch.linalg.qr(table, mode="r").R
        step = -torch.linalg.solve_triangular(_safe(triangle[:, :p, :p]), triangle[:, :p, p:], upper=True)[:, :, 0]
        after = (local.root @ step[:, :, None])[:, :, 0] + local.slope
        return step, local.slope.square().sum(1) - after.square().sum(1), _safe(triangle[:, :p, :p])
    matrix = local.root / scale[:, None, :] / scale[:, :, None]
    factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag_embed(damping[:, None].expand(-1, p)))
    good = failed == 0
    factor = torch.where(good[:, None, None], factor, torch.eye(p).to(scale))
    step = torch.cholesky_solve(-(local.slope / scale)[:, :, None], factor)[:, :, 0] / scale
    gain = -(local.slope * step).sum(1) - (step * (local.root @ step[:, :, None])[:, :, 0]).sum(1) / 2
    return step, torch.where(good, gain, -1.0), factor


def _bent(
    evaluate: Locals, members: Tensor, weights: Tensor, local: Local, step: Tensor, triangle: Tensor, scale: Tensor
) -> Tensor:
    """What bends a step along a curved valley ("geodesic acceleration", Transtrum and Sethna 2012)."""
    second = evaluate.bend(members, weights, local, step)
    jacobian = local.table[:, : second.shape[1], :-1]
    right = jacobian.transpose(1, 2) @ second[:, :, None]
    half = torch.linalg.solve_triangular(triangle.transpose(1, 2), right, upper=False)
    bent = -torch.linalg.solve_triangular(triangle, half, upper=True)[:, :, 0] / 2
    short = 2 * (scale * bent).norm(dim=1) <= BEND * (scale * step).norm(dim=1)
    return torch.where(short[:, None], bent, 0.0)
