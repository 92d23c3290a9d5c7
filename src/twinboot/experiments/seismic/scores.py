"""How good a reconstruction of the seismic task is, and how well its sigma knows that."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from ...estimate.prediction import half_width
from .descent import Method, State
from .kernels import Problem, respond

LEVELS = (0.5, 0.9, 0.95)  # of central intervals


def scores(problems: Sequence[Problem], state: State, method: Method) -> pd.DataFrame:
    """For each problem: losses, squared error of the field, and, of twins, what sigma says of the error."""
    rows = []
    for p, field, sigma, step in zip(problems, state.field, state.sigma, state.step.tolist(), strict=True):
        error = (field - p.truth).abs()
        row = {
            "train": _loss(p, field, p.kernels, p.observed, trained_on(p, method)),
            "test": _loss(p, field, p.test_kernels, p.test_observed),
            "error": error.square().mean().item(),
            "step": step,
        }
        if method.replicas > 1:
            row |= {
                "sigma": sigma.square().mean().sqrt().item(),
                "correlation": correlation(sigma, error),
                **{f"covered_{level}": covered(error, sigma, level) for level in LEVELS},
            }
        rows.append(row)
    return pd.DataFrame(rows)


def trained_on(problem: Problem, method: Method) -> Tensor:
    """The measurements that entered a loss."""
    if method.replicas > 1:
        return problem.bootstrap.seen
    used = torch.ones(len(problem.observed), dtype=torch.bool)
    used[problem.held_out] = not method.hold_out
    return used.nonzero().squeeze(1)


def deciles(problems: Sequence[Problem], state: State) -> pd.DataFrame:
    """The cells of each problem by sigma, in ten parts: root mean square of sigma and of the error, and coverage. Means
    over the problems."""
    found = []
    for p, field, sigma in zip(problems, state.field, state.sigma, strict=True):
        order = sigma.flatten().argsort(stable=True)
        error, ordered = (field - p.truth).abs().flatten()[order], sigma.flatten()[order]
        for part, (e, s) in enumerate(zip(error.chunk(10), ordered.chunk(10), strict=True), start=1):
            row = {"decile": part, "sigma2": s.square().mean().item(), "error2": e.square().mean().item()}
            found.append(row | {f"covered_{level}": covered(e, s, level) for level in LEVELS})
    return pd.DataFrame(found).groupby("decile", as_index=False).mean()


def correlation(sigma: Tensor, error: Tensor) -> float:
    """Of sigma with |error|, over the cells; 0 where sigma is the same everywhere."""
    found = torch.corrcoef(torch.stack([sigma.flatten(), error.flatten()]))[0, 1].item()
    return found if math.isfinite(found) else 0.0


def covered(error: Tensor, sigma: Tensor, level: float) -> float:
    """The share of the cells whose interval of that level holds the truth."""
    return (error < half_width(level) * sigma).float().mean().item()


def _loss(problem: Problem, field: Tensor, kernels: Tensor, observed: Tensor, rows: Tensor | None = None) -> float:
    u = respond(problem.task.response, problem.task.beta * field).flatten()
    squared = (kernels @ u - observed).square()
    return (squared if rows is None else squared[rows]).mean().item()
