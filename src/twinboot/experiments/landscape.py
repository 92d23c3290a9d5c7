"""The two-well landscape of the paper (Appendix A.3), how data enter it, and how uncertain its minimum really is.

    L(w) = -exp(-||w - mu_1||^2 / (2 width^2)) - exp(-||w - mu_2||^2 / (2 width^2)),   mu = (-1, 0) and (1, 0)

The paper does not say how a datum enters this loss. Three ways are implemented; x ~ N(0, noise^2 I) is a datum:

    "shift"     l(w; x) = L(w - x)            it moves the landscape, as a point of a cloud does for the cloud's mean
    "tilt"      l(w; x) = L(w) - x . w        it pulls with the same force everywhere
    "matched"   l(w; x) = L(w) - x . A w      as "tilt", where A A is the curvature of a well

With M data the minimum of the mean loss has, for large M, the covariance V / M of the sandwich V = H^-1 C H^-1: H is
the curvature of the expected loss at its minimum, C the covariance of one datum's gradient there. The paper's own line,
S(width) noise / sqrt(M), scales with 1 / sqrt(curvature). That is the sandwich if C = noise^2 H, which "matched" makes
true, as a correct likelihood would; with "shift" and "tilt" it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, vmap

from .. import Blocks, Bootstrap, Twins, resets
from ..seeds import derive
from .experiment import Tick, one_thread

Datum = Literal["shift", "tilt", "matched"]
Mode = Literal["none", "mean", "sample", "centered"]
SEPARATION = 2.0  # d of Appendix A.3
WELLS = torch.tensor([[-SEPARATION / 2, 0.0], [SEPARATION / 2, 0.0]])


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training on the landscape. Where the paper states no number, the reason for ours is given."""

    width: float = 0.5
    """Standard deviation of a well. Not stated; at 1.0 the two wells would be one."""
    datum: Datum = "shift"
    """How a datum enters the loss. Not stated; it shifts the landscape, as in Figure 1; the others pull the weights."""
    noise: float = 0.3
    """Standard deviation of the data, per dimension. Not stated; below 0.8 the mean landscape has two wells."""
    size: int = 400
    """How many data, M. Not stated; as many as in Figure 1."""
    batch: int = 10
    """Data in a mini-batch. Not stated; small enough for several steps an epoch with 50 data."""
    rate: float = 0.1
    """Learning rate of SGD. Not stated; a fifth of the way to the minimum of a well each step."""
    epochs: int = 40
    """Passes over the data (Appendix A.3)."""
    resets: tuple[int, ...] = (1, 2, 6, 12)
    """Epochs after which the twins are reset (Appendix A.3)."""
    rate_steps: tuple[int, ...] = (20, 30)
    """Epochs after which the learning rate falls to a tenth. The paper states a step schedule, not its steps."""
    seed: int = 0
    """Of the data, their resampling and the noise on the weights."""

    def __post_init__(self) -> None:
        for name in ("width", "noise", "size", "batch", "rate", "epochs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}.")
        if self.size < 2:
            raise ValueError("size must be at least 2: one datum can't be resampled.")


def potential(w: Tensor, width: float) -> Tensor:
    """The two-well loss at points w [..., 2]."""
    squared = (w.unsqueeze(-2) - WELLS.to(w)).square().sum(-1)
    return -(squared / (-2 * width**2)).exp().sum(-1)


def curvatures(width: float) -> Tensor:
    """The paper's principal curvatures of a well: along the line between the wells, and across it."""
    overlap = math.exp(-(SEPARATION**2) / (2 * width**2))
    across = (1 + overlap) / width**2
    return torch.tensor([across - overlap * SEPARATION**2 / width**4, across], dtype=torch.float64)


def loss(w: Tensor, x: Tensor, width: float, datum: Datum) -> Tensor:
    """The loss l(w; x) of each datum."""
    if datum == "shift":
        return potential(w - x, width)
    pull = x if datum == "tilt" else x * curvatures(width).sqrt().to(x)
    return potential(w, width) - (pull * w).sum(-1)


def paper_line(setting: Setting) -> float:
    """The dashed line of Figure 3: S(width) noise / sqrt(M)."""
    return math.sqrt(curvatures(setting.width).reciprocal().mean()) * setting.noise / math.sqrt(setting.size)


def exact_line(setting: Setting) -> float:
    """Root mean square of sigma for twins that reached their minima: the sandwich, and what a bootstrap of M data sees
    of it, (M - 1) / M."""
    size = setting.size
    return math.sqrt(_sandwich(setting.width, setting.noise, setting.datum) * (size - 1)) / size


def mean_landscape(width: float, noise: float, datum: Datum) -> Callable[[Tensor], Tensor]:
    """The loss at a point [2] for endless data."""
    x, probability = _quadrature(noise)
    return lambda w: (probability * loss(w, x, width, datum)).sum()


def _quadrature(noise: float) -> tuple[Tensor, Tensor]:
    """Data and their probabilities that stand for N(0, noise^2 I): Gauss and Hermite's, 40 nodes a dimension."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    grid = torch.tensor(np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2) * noise)
    return grid, torch.tensor(np.outer(weights, weights).reshape(-1) / weights.sum() ** 2)


@cache
def _sandwich(width: float, noise: float, datum: Datum) -> float:
    """Mean over the two weights of the sandwich's diagonal."""
    expected = mean_landscape(width, noise, datum)
    minimum = WELLS[1].double()
    for _ in range(15):  # Newton's method: each step doubles the digits
        minimum = minimum - torch.linalg.solve(hessian(expected)(minimum), grad(expected)(minimum))
    curvature = hessian(expected)(minimum)
    # Farther away Newton's method finds the flat land outside, and on the middle line the saddle.
    if not (0.1 < minimum[0] < SEPARATION and torch.linalg.eigvalsh(curvature).min() > 0):
        raise ValueError(
            f"with noise {noise} and width {width} the mean landscape has no two wells any more: use less of either."
        )
    x, probability = _quadrature(noise)
    gradients = vmap(grad(lambda w, x: loss(w, x, width, datum)), in_dims=(None, 0))(minimum, x)
    bread = torch.linalg.inv(curvature)
    sandwich = bread @ (gradients.T * probability) @ gradients @ bread  # the mean gradient is 0 there
    return float(sandwich.trace()) / 2


class Points(nn.Module):
    """As many independent runs as there are rows: each row of the one parameter is the weights of a run."""

    def __init__(self, start: tuple[float, float], runs: int, width: float, datum: Datum) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start).repeat(runs, 1))
        self.width, self.datum = width, datum

    def forward(self, x: Tensor) -> Tensor:
        """The summed losses of all runs, each on its own batch: x is [batch, runs, 2]."""
        return loss(self.w, x, self.width, self.datum).mean(0).sum()


@dataclass(frozen=True)
class Trained:
    """What is left of a training: weights [twins, runs, 2], sigma [runs], and both after each step if asked for."""

    weights: Tensor
    sigma: Tensor
    path: Tensor | None = None  # [steps + 1, twins, runs, 2]
    path_sigma: Tensor | None = None  # [steps + 1, runs]

    def wells(self, width: float) -> Tensor:
        """The well [twins, runs] nearest to each twin, 0 or 1; -1 if it is over three widths away."""
        distance = (self.weights.unsqueeze(-2) - WELLS).norm(dim=-1)
        return torch.where(distance.amin(-1) < 3 * width, distance.argmin(-1), -1)


def train(
    setting: Setting,
    start: tuple[float, float],
    runs: int,
    mode: Mode,
    tick: Tick,
    keep_path: bool = False,
    noise_scale: float = 1.0,
) -> Trained:
    """Many independent runs of Twin-Boot at once, each with its own data and its own two bootstrap samples."""
    generator = torch.Generator().manual_seed(setting.seed)
    data = torch.randn(setting.size, runs, 2, generator=generator) * setting.noise
    samples = list(resampled(data, setting.seed))
    twins = Twins(Points(start, runs, setting.width, setting.datum), groups=Blocks((1, 2)), seed=setting.seed)
    optimizer = torch.optim.SGD(twins.parameters(), lr=setting.rate)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, setting.rate_steps, gamma=0.1)
    due = resets.at(*setting.resets) if mode != "none" and setting.resets else resets.never()
    path, path_sigma = [_weights(twins)], [twins.sigma["w"].flatten()]
    with one_thread():
        for epoch in range(1, setting.epochs + 1):
            # One order for all runs: their samples are independent, so a run can't tell it from an order of its own.
            for chosen in torch.randperm(setting.size, generator=generator).split(setting.batch):
                with twins.sampled(noise_scale):
                    for twin, sample in zip(twins, samples, strict=True):
                        twin(sample[chosen]).backward()
                optimizer.step()
                optimizer.zero_grad()
                twins.update()
                if keep_path:
                    path.append(_weights(twins))
                    path_sigma.append(twins.sigma["w"].flatten())
                tick()
            schedule.step()
            if due(epoch) and mode != "none":
                twins.reset(mode)
    trained = Trained(_weights(twins), twins.sigma["w"].flatten())
    if not keep_path:
        return trained
    return Trained(trained.weights, trained.sigma, torch.stack(path), torch.stack(path_sigma))


def steps(setting: Setting) -> int:
    """How many steps, and so ticks, a training takes."""
    return setting.epochs * math.ceil(setting.size / setting.batch)


def resampled(data: Tensor, seed: int) -> Iterable[Tensor]:
    """The bootstrap sample of each twin, drawn for each run on its own: data and samples are [size, runs, ...]."""
    size, runs = data.shape[:2]
    bootstraps = [Bootstrap(size, seed=derive(seed, "run", run)) for run in range(runs)]
    generator = torch.Generator().manual_seed(derive(seed, "order"))
    for twin in range(2):
        drawn = torch.stack([bootstrap.indices(twin) for bootstrap in bootstraps], dim=1)
        # They come sorted. In random order a run's sample is a plain sequence of draws.
        drawn = drawn.gather(0, torch.rand(size, runs, generator=generator).argsort(0))
        yield data.gather(0, drawn.unsqueeze(-1).expand_as(data))


def _weights(twins: Twins) -> Tensor:
    return torch.stack([twin.get_parameter("w").detach().clone() for twin in twins])
