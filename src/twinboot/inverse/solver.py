"""Nonlinear least squares for a stack of fields, each at its own minimum of |residuals|^2 / 2.

A draw from the posterior is the minimum of a randomized loss, and it is exact at the minimum only. Adam with its fixed
step needs thousands of steps to come close. This is L-BFGS with three changes:

    - The line search uses the residuals: along a direction they are linear, or nearly so, and one trial step gives the
      length at which their sum of squares is lowest. For a linear operator these are the steps of conjugate gradients.
    - The first guess of the inverse Hessian is that of the prior plus a constant for the measurements.
    - It needs gradients only, no products with the Jacobian: many operators have no forward-mode derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Residuals = Callable[[Tensor], Tensor]  # fields [members, ...] -> residuals [members, n]
Map = Callable[[Tensor], Tensor]  # of fields [members, ...]

MEMORY = 10  # pairs of steps and changes of the gradient, as usual for L-BFGS
# A member is done when its loss falls by less than this per cell in WINDOW iterations. A draw's loss is 1/2 per cell
# above the minimum, so what is left is small against the spread of the draws.
TOLERANCE = 1e-4
WINDOW = 5
HALVINGS = 12  # of a step that raises the loss, before the member is left where it is
LINEAR = 0.5  # a trial step's change of the loss, to first order, in units of the slope: below, it is too long


def least_squares(
    residuals: Residuals, start: Tensor, precondition: Map, steps: int, tick: Callable[[], object]
) -> Tensor:
    """The fields [members, ...] at their minima. `precondition` approximates a product with the inverse Hessian."""
    fields, shape = start.detach(), start.shape
    now, gradient = evaluate(residuals, fields)
    loss = half_square(now)
    if not bool(loss.isfinite().all()):
        raise FloatingPointError("the loss is not finite at the start: forward or the prior gave NaN or infinity.")
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    history = [loss]
    least = TOLERANCE * math.prod(shape[1:])
    running = torch.ones_like(loss, dtype=torch.bool)
    for _ in range(steps):
        direction = -_inverse_hessian(gradient, pairs, precondition)
        downhill = dot(direction, gradient) < 0
        direction = torch.where(_to(downhill, direction), direction, -precondition(gradient))
        direction = torch.where(_to(running, direction), direction, 0.0)
        length = _length(residuals, fields, direction, now, dot(direction, gradient))
        for _ in range(HALVINGS):
            moved = fields + _to(length, fields) * direction
            after, slope = evaluate(residuals, moved)
            lower = half_square(after)
            worse = running & ~(slope.flatten(1).isfinite().all(1) & (lower <= loss + 1e-6 * loss.abs()))
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 4, length)
        else:  # these stay where they are
            running = running & ~worse
            keep = _to(worse, fields)
            moved, slope = torch.where(keep, fields, moved), torch.where(keep, gradient, slope)
            after, lower = torch.where(worse[:, None], now, after), torch.where(worse, loss, lower)
        step, change = moved - fields, slope - gradient
        curvature = dot(step, change)
        enough = curvature > 1e-10 * (dot(step, step) * dot(change, change)).sqrt()
        pairs = [*pairs[-MEMORY + 1 :], (step, change, torch.where(enough, 1 / curvature, 0.0))]
        fields, now, gradient, loss = moved, after, slope, lower
        tick()
        history = [*history[-WINDOW:], loss]
        if len(history) > WINDOW:
            running = running & (history[0] - loss > least)
        if not bool(running.any()):
            break
    return fields


def evaluate(residuals: Residuals, fields: Tensor) -> tuple[Tensor, Tensor]:
    """The residuals of each member, and the gradient of half their sum of squares."""
    with torch.enable_grad():
        leaf = fields.detach().requires_grad_()
        found = residuals(leaf)
        [gradient] = torch.autograd.grad(found, leaf, found.detach())
    return found.detach(), gradient


def _length(residuals: Residuals, fields: Tensor, direction: Tensor, now: Tensor, slope: Tensor) -> Tensor:
    """How far to go in units of the direction: to the minimum, if the residuals are linear along it. A trial shows
    whether they are: its change of the loss to first order must agree with the slope. If not, a shorter one is made."""
    trial = torch.ones_like(slope)
    for _ in range(HALVINGS):
        with torch.no_grad():
            change = residuals(fields + _to(trial, fields) * direction).detach() - now
        along = dot(now, change)
        ratio = along / (trial * slope)
        far = ~((ratio > LINEAR) & (ratio < 1 / LINEAR)) & (slope != 0)
        if not bool(far.any()):
            break
        trial = torch.where(far, trial / 4, trial)
    length = -trial * along / dot(change, change).clamp(min=1e-300)
    length = torch.where(length.isfinite() & (length > 0), length, 0.1 * trial)
    return torch.minimum(length, 10 * trial)


def _inverse_hessian(gradient: Tensor, pairs: list[tuple[Tensor, Tensor, Tensor]], precondition: Map) -> Tensor:
    """The two loops of L-BFGS (Nocedal 1980), for each member by itself."""
    found, parts = gradient, []
    for step, change, inverse in reversed(pairs):
        part = inverse * dot(step, found)
        found = found - _to(part, found) * change
        parts.append(part)
    found = precondition(found)
    for (step, change, inverse), part in zip(pairs, reversed(parts), strict=True):
        found = found + _to(part - inverse * dot(change, found), found) * step
    return found


def half_square(residuals: Tensor) -> Tensor:
    return dot(residuals, residuals) / 2


def dot(a: Tensor, b: Tensor) -> Tensor:
    """For each member, in double precision: losses are compared that differ in the last digits of single precision."""
    return (a.flatten(1).double() * b.flatten(1).double()).sum(1)


def _to(values: Tensor, fields: Tensor) -> Tensor:
    """One value for each member, to multiply fields with."""
    values = values if values.dtype == torch.bool else values.to(fields.dtype)
    return values.view(-1, *[1] * (fields.ndim - 1))
