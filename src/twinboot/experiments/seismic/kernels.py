"""The paper's seismic task (section 4.3, Appendix A.6): a field seen through kernels after a nonlinear response.

    y = K f(v) + noise

v is a field of 30 x 30 cells, f acts on each cell alone, and each row of K is a Gaussian bump at a random centre, of L2
norm 1. The paper does not state the true field, the noise, beta, the width of the bumps, where the centres lie, or its
test measurements. Here they are settings; `regimes.py` tries a grid of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ... import Bootstrap
from ..._core import seeds

SIDE = 30
TEST_ROWS = 1000
HOLD_OUT = math.exp(-2)  # of the measurements: as many as neither of two twins draws
MIN_WIDTH = 0.3  # of kernels in cells: a narrower one may fall between all of them
Response = Literal["tanh", "cubic"]


@dataclass(frozen=True)
class Setting:
    """A setting of the seismic task; a seed makes a problem of it."""

    rows: int
    noise: float
    beta: float
    width: float
    spread: float
    response: Response = "tanh"
    texture: float = 4.0
    contrast: float = 0.5


@dataclass(frozen=True)
class Problem:
    """A true field and what is measured of it, here [M] values of [M, cells] kernels."""

    setting: Setting
    truth: Tensor
    kernels: Tensor
    observed: Tensor
    test_kernels: Tensor
    test_observed: Tensor
    bootstrap: Bootstrap
    held_out: Tensor  # the measurements that Adam without twins sets aside for early stopping
    initial: Tensor  # where the search starts


def respond(response: Response, x: Tensor) -> Tensor:
    """f(v) for x = beta v. The cubic proxy is tanh to third order. It folds at 1: two fields can have one response."""
    return x.tanh() if response == "tanh" else x - x**3 / 3


def undo(response: Response, u: Tensor) -> Tensor:
    """The x nearest to 0 with the response u, or with the response nearest to u."""
    if response == "tanh":
        return u.clamp(-0.999, 0.999).atanh()
    # x - x^3 / 3 = u, by the trigonometric solution of a cubic with three real roots: the middle one.
    return 2 * ((1.5 * u).clamp(-1, 1).asin() / 3).sin()


def problems(setting: Setting, seed: int, number: int, replicas: int = 2) -> list[Problem]:
    """Problems of one setting that share nothing with those of another seed."""
    return [problem(setting, seed * 1_000_000 + k, replicas) for k in range(number)]


def problem(setting: Setting, seed: int, replicas: int = 2) -> Problem:
    """For the same seed the field, the centres and the noise (up to its scale) are the same in all settings."""
    generator = torch.Generator().manual_seed(seeds.derive(seed, "kernels"))
    truth = field(setting.texture, setting.contrast, generator)
    test_kernels = kernels(_centres(TEST_ROWS, 1.0, generator), setting.width)
    test_noise = torch.randn(TEST_ROWS, generator=generator)
    measured = kernels(_centres(setting.rows, setting.spread, generator), setting.width)
    noise = torch.randn(setting.rows, generator=generator)
    u = respond(setting.response, setting.beta * truth).flatten()
    shuffled = torch.randperm(setting.rows, generator=generator)
    return Problem(
        setting,
        truth,
        measured,
        measured @ u + setting.noise * noise,
        test_kernels,
        test_kernels @ u + setting.noise * test_noise,
        Bootstrap(setting.rows, replicas, seeds.derive(seed, "bootstrap")),
        shuffled[: round(HOLD_OUT * setting.rows)],
        torch.zeros(SIDE, SIDE),
    )


def field(texture: float, contrast: float, generator: torch.Generator) -> Tensor:
    """White noise through a Gaussian filter with periodic edges, scaled to a standard deviation of `contrast`."""
    white = torch.randn(SIDE, SIDE, generator=generator)
    frequency = 2 * math.pi * torch.fft.fftfreq(SIDE)
    passed = torch.exp(-(frequency[:, None] ** 2 + frequency**2) * texture**2 / 2)
    smooth = torch.fft.ifft2(torch.fft.fft2(white) * passed).real
    return torch.mul(contrast, (smooth - smooth.mean()) / smooth.std())


def kernels(centres: Tensor, width: float) -> Tensor:
    """Gaussian bumps around centres, in cells: rows of L2 norm 1."""
    cells = torch.arange(SIDE, dtype=centres.dtype)
    down, across = (torch.exp(-((cells - c[:, None]) ** 2) / (2 * width**2)) for c in centres.T)
    rows = (down[:, :, None] * across[:, None, :]).flatten(1)
    rows[rows < 1e-20] = 0  # far from the centre they would be denormal numbers, on which processors are slow
    return torch.div(rows, rows.norm(dim=1, keepdim=True))


def _centres(number: int, spread: float, generator: torch.Generator) -> Tensor:
    """Anywhere in a square around the middle whose sides are `spread` of the field's."""
    middle = (SIDE - 1) / 2
    return middle + (torch.rand(number, 2, generator=generator) - 0.5) * (SIDE - 1) * spread


def tikhonov(problem: Problem, roughness: Tensor) -> Tensor:
    """The field whose response u minimises |K u - y|^2 / M + weight * u' R u, at the weight with the lowest loss on the
    hold-out. u has a closed form, because the problem is linear in it; v follows from u."""
    held = torch.zeros(len(problem.observed), dtype=torch.bool)
    held[problem.held_out] = True
    rows, y = problem.kernels[~held].double(), problem.observed[~held].double()
    gram, right = rows.T @ rows / len(rows), rows.T @ y / len(rows)
    weights = torch.logspace(-7, 1, 17, dtype=torch.double)
    found = torch.stack([torch.linalg.solve(gram + weight * roughness, right) for weight in weights]).float()
    losses = (found @ problem.kernels[held].T - problem.observed[held]).square().mean(1)
    u = found[losses.argmin()]
    return undo(problem.setting.response, u).view(SIDE, SIDE) / problem.setting.beta


def size() -> Tensor:
    """R such that u' R u is the sum of the squares of u."""
    return torch.eye(SIDE**2, dtype=torch.double)


def slopes() -> Tensor:
    """R such that u' R u is the sum of the squared differences of neighbours, plus a trace of `size` for cells without
    measurements."""
    step, eye = torch.eye(SIDE, dtype=torch.double).diff(dim=0), torch.eye(SIDE, dtype=torch.double)
    line = step.T @ step
    return torch.kron(line, eye) + torch.kron(eye, line) + 1e-6 * size()
