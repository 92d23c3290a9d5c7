"""The two-well landscape of the paper (Appendix A.3), how data enter it, and the exact uncertainty of its minimum.

    L(w) = -exp(-||w - mu_1||^2 / (2 width^2)) - exp(-||w - mu_2||^2 / (2 width^2)),   mu = (-1, 0) and (1, 0)

The paper does not say how data enter this loss. Three ways are implemented, for a datum x ~ N(0, noise^2 I):

    "shift"     l(w; x) = L(w - x)            the datum moves the landscape, as in Figure 1
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

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, vmap

from ... import Blocks, Bootstrap, Twins, resets
from ..._core.seeds import derive
from ..runner.experiment import Tick, one_thread, require_at_least, require_positive

Datum = Literal["shift", "tilt", "matched"]
Reset = Literal["none", "mean", "sample", "centered"]  # `resets.Mode`, or no reset at all
SEPARATION = 2.0  # d of Appendix A.3
WELLS = torch.tensor([[-SEPARATION / 2, 0.0], [SEPARATION / 2, 0.0]])


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Runs on the landscape, each with its own data."""

    width: float = 0.5
    """Standard deviation of a well. Not stated; at 1.0 the two wells would be one."""
    datum: Datum = "shift"
    """How a datum enters the loss. Not stated; it shifts the landscape, as in Figure 1; the others pull the weights."""
    noise: float = 0.3
    """Standard deviation of the data, per dimension. Not stated; below 0.8 the mean landscape has two wells."""
    size: int = 400
    """How many data, M. Not stated; as many as in Figure 1."""
    batch: int = 10
    """Batch size. Not stated; small enough for several steps an epoch with 50 data."""
    lr: float = 0.1
    """Learning rate of SGD. Not stated; a fifth of the way to the minimum of a well each step."""
    epochs: int = 40
    """Passes over the data (Appendix A.3)."""
    resets: tuple[int, ...] = (1, 2, 6, 12)
    """Epochs after which the twins are reset (Appendix A.3)."""
    rate_steps: tuple[int, ...] = (20, 30)
    """Epochs after which the learning rate falls to a tenth. The paper states a step schedule, not its steps."""
    seed: int = 0
    """Of the data, their resampling and the noise on the weights."""
    start: tuple[float, float] = (0.4, 0.6)
    """Where the twins start. Not stated; on the slope of one well, so that the well is not in question."""
    seeds: int = 200
    """Runs for each point, each with its own data."""

    def __post_init__(self) -> None:
        require_positive(self, "width", "noise", "size", "batch", "lr", "epochs")
        require_at_least(self, 2, "size", "seeds")  # one datum can't be resampled
        if math.hypot(*self.start) > 3:
            raise ValueError(f"start {self.start} is too far from the wells at (-1, 0) and (1, 0): there is no slope.")
        if any(epoch < 1 for epoch in (*self.resets, *self.rate_steps)):
            raise ValueError("resets and rate_steps are epochs, counted from 1.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, not {self.seed}.")


def rms(sigma: pd.Series) -> tuple[float, float]:
    """Root mean square of sigma over runs, and its standard error."""
    squared = sigma.pow(2)
    root = math.sqrt(squared.mean())  # NaN for no runs
    return root, squared.sem() / 2 / root if root else math.nan


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
    """Root mean square of sigma for twins that reached their minima: the sandwich, times the share (M - 1) / M that a
    bootstrap of M data sees of it."""
    size = setting.size
    return math.sqrt(_sandwich(setting.width, setting.noise, setting.datum) * (size - 1)) / size


def mean_landscape(width: float, noise: float, datum: Datum) -> Callable[[Tensor], Tensor]:
    """The expected loss at a point [2], as for infinitely many data."""
    x, probability = _quadrature(noise, width)
    return lambda w: (probability * loss(w, x, width, datum)).sum()


def _quadrature(noise: float, width: float) -> tuple[Tensor, Tensor]:
    """Points and weights for means over N(0, noise^2 I): an even grid, fine enough for data and wells. For smooth
    functions that fade out on both sides such a grid is exact to many digits."""
    nodes = torch.arange(-7 * noise, 7 * noise, min(noise, width) / 2, dtype=torch.float64)
    weights = torch.softmax(-0.5 * (nodes / noise) ** 2, 0)
    return torch.cartesian_prod(nodes, nodes), torch.outer(weights, weights).flatten()


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
    x, probability = _quadrature(noise, width)
    gradients = vmap(grad(lambda w, x: loss(w, x, width, datum)), in_dims=(None, 0))(minimum, x)
    bread = torch.linalg.inv(curvature)
    sandwich = bread @ (gradients.T * probability) @ gradients @ bread  # the mean gradient is 0 there
    return float(sandwich.trace()) / 2


class Points(nn.Module):
    """Many independent runs in one parameter: each of its rows is the weights of a run."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(setting.start).repeat(setting.seeds, 1))
        self.setting = setting

    def forward(self, x: Tensor) -> Tensor:
        """The summed losses of all runs, each on its own batch: x is [batch, runs, 2]."""
        return loss(self.w, x, self.setting.width, self.setting.datum).mean(0).sum()


@dataclass(frozen=True)
class Trained:
    """The final weights [twins, runs, 2] and sigma [runs]; and both at the start and, if asked for, after each step."""

    weights: Tensor
    sigma: Tensor
    path: Tensor  # [1 or steps + 1, twins, runs, 2]
    path_sigma: Tensor  # [1 or steps + 1, runs]

    def wells(self, width: float) -> Tensor:
        """The well [twins, runs] nearest to each twin, 0 or 1; -1 if it is over three widths away."""
        distance = (self.weights.unsqueeze(-2) - WELLS).norm(dim=-1)
        return torch.where(distance.amin(-1) < 3 * width, distance.argmin(-1), -1)


def train(setting: Setting, mode: Reset, tick: Tick, keep_path: bool = False, noise_scale: float = 1.0) -> Trained:
    """Many independent runs of Twin-Boot at once, each with its own data and its own two bootstrap samples."""
    generator = torch.Generator().manual_seed(setting.seed)
    data = torch.randn(setting.size, setting.seeds, 2, generator=generator) * setting.noise
    twins = Twins(Points(setting), groups=Blocks((1, 2)), seed=setting.seed)
    optimizer = torch.optim.SGD(twins.parameters(), lr=setting.lr)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, setting.rate_steps, gamma=0.1)
    due = resets.at(*setting.resets) if setting.resets else resets.never()
    path, path_sigma = [_weights(twins)], [twins.sigma["w"].flatten()]
    with one_thread():
        samples = list(resampled(data, setting.seed))
        for epoch in range(1, setting.epochs + 1):
            # One order for all runs: their samples are independent, so it is as good as an order for each.
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
            if mode != "none" and due(epoch):
                twins.reset(mode)
    return Trained(_weights(twins), twins.sigma["w"].flatten(), torch.stack(path), torch.stack(path_sigma))


def steps(setting: Setting) -> int:
    """How many steps, and ticks, a training takes."""
    return setting.epochs * math.ceil(setting.size / setting.batch)


def resampled(data: Tensor, seed: int) -> Iterable[Tensor]:
    """The bootstrap sample of each twin, drawn for each run on its own: data and samples are [size, runs, ...]."""
    size, runs = data.shape[:2]
    bootstraps = [Bootstrap(size, seed=derive(seed, "run", run)) for run in range(runs)]
    generator = torch.Generator().manual_seed(derive(seed, "order"))
    for twin in range(2):
        drawn = torch.stack([bootstrap.indices(twin) for bootstrap in bootstraps], dim=1)
        # The indices come sorted. In random order they are a plain sequence of draws.
        drawn = drawn.gather(0, torch.rand(size, runs, generator=generator).argsort(0))
        yield data.gather(0, drawn.unsqueeze(-1).expand_as(data))


def _weights(twins: Twins) -> Tensor:
    return torch.stack([twin.get_parameter("w").detach().clone() for twin in twins])
