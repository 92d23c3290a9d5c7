"""Twins that find the mean of a Gaussian cloud, and the closed forms of how far they stand apart.

A datum x enters as l(w; x) = ||x - w||^2 (the paper does not say whether with a factor of 1/2, which would halve the
rate), so a full-batch step of rate r closes the share a = 2 r of the way to the mean of the twin's bootstrap sample.
Everything about sigma^2 then has a closed form. Write tau^2 = variance / M * (M - 1) / M for what a bootstrap of M
data says about the mean, u for E[sigma^2] and c for the covariance of a twin with the mean of its own sample. The
noise on the weights, N(0, sigma^2), pushes each step, so

    c' = (1 - a) c + a tau^2
    u' = (1 - a)^2 u + 2 a (1 - a) c + a^2 tau^2 + a^2 u        (the last term is the noise)

At a constant rate u settles at tau^2 (2 - a) / (2 - 2 a): noise that is driven by sigma makes sigma larger. As the
rate falls to 0 it settles at tau^2. Given the data, an estimate from B bootstrap samples then has the relative variance
r = 2 / ((B - 1) D) of the paper, D = 2 weights here. Over data sets, whose own covariance is a Wishart matrix, it has
r (1 + (D + 1) / (M - 1)) + 2 / ((M - 1) D), so that beyond B = M more trainings buy little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ... import Blocks, Bootstrap, PairedLoader, Twins
from ..._core.seeds import derive
from ..runner.experiment import Part, Tick, one_thread, refuse_repeated

WEIGHTS = 2  # D: the twins look for a point in the plane


@dataclass(frozen=True, kw_only=True)
class Config:
    """Figure 1: two twins find the mean of a cloud of points, and how good that estimate of sigma is."""

    points: int = 400
    """Data in the cloud (Appendix A.2)."""
    variance: float = 120.0
    """Of the data, per dimension (Appendix A.2)."""
    epochs: int = 5
    """Passes over the data in the picture (Appendix A.2)."""
    batch: int = 200
    """Data in a mini-batch of the picture (Appendix A.2)."""
    rate: float = 0.07
    """Learning rate of SGD (Appendix A.2)."""
    stride: int = 4
    """Steps between two circles in the picture (Appendix A.2)."""
    start: tuple[float, float] = (-4.0, 3.0)
    """Where the twins start in the picture. Not stated; some true sigmas away."""
    sizes: tuple[int, ...] = (50, 100, 200, 500, 1000, 2000, 5000)
    """Numbers of data M for the comparison with theory."""
    seeds: int = 400
    """Data sets for each M."""
    replicas: tuple[int, ...] = (10, 50, 200)
    """Numbers B of the classical bootstrap's trainings, for comparison."""
    constant: int = 60
    """Full-batch steps at the constant rate, in the comparison: 0.86^60 is 0.0001 of the way left."""
    falling: int = 1000
    """Further steps while the rate falls to 0: by the closed form less than 1 % of sigma^2 is then due to the noise."""
    seed: int = 7
    """Of the data, their resampling and the noise on the weights (Appendix A.2)."""

    def __post_init__(self) -> None:
        for name in ("points", "variance", "epochs", "batch", "rate", "stride", "seeds", "constant", "falling"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}.")
        if not self.sizes or min(self.sizes) < 2 or self.points < 2:
            raise ValueError("points and all sizes must be at least 2: one datum can't be resampled.")
        if self.seeds < 2:
            raise ValueError("seeds must be at least 2: one estimate has no spread.")
        if any(b < 2 for b in self.replicas):
            raise ValueError(f"replicas must all be at least 2, not {self.replicas}.")
        if self.rate >= 0.5:
            raise ValueError(f"rate must be below 0.5, not {self.rate}: a step would go past the mean.")
        refuse_repeated(self, "sizes", *(["replicas"] if self.replicas else []))
        if self.constant <= self.stages["twins, few steps"]:
            raise ValueError(f"constant must be more than the {self.stages['twins, few steps']} steps of the picture.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, not {self.seed}.")

    @property
    def stages(self) -> dict[str, int]:
        """The steps after which sigma is looked at in the comparison."""
        short = self.epochs * math.ceil(self.points / self.batch)
        return {"twins, few steps": short, "twins, constant rate": self.constant, "twins": self.constant + self.falling}


QUICK = Config(seeds=200, sizes=(50, 200, 1000, 5000), replicas=(10, 50))


class Mean(nn.Module):
    """The whole model: a point, or a row of them for as many runs. Its loss is the squared distance from the data."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.w).square().sum(-1)


def parts(config: Config) -> list[Part]:
    short = config.stages["twins, few steps"]
    picture = Part("picture", short, partial(_picture, config))
    return [picture, *(Part(f"size-{size}", config.seeds, partial(_estimates, config, size)) for size in config.sizes)]


def _picture(config: Config, tick: Tick) -> dict[str, pd.DataFrame]:
    """One run, through the same loop that a user would write."""
    generator = torch.Generator().manual_seed(config.seed)
    data = torch.randn(config.points, WEIGHTS, generator=generator) * math.sqrt(config.variance)
    bootstrap = Bootstrap(config.points, seed=config.seed)
    loader = PairedLoader(TensorDataset(data), bootstrap, config.batch)
    twins = Twins(Mean(torch.tensor(config.start)), seed=config.seed)
    optimizer = torch.optim.SGD(twins.parameters(), lr=config.rate)
    rows = _path_rows(0, twins)
    for _ in range(config.epochs):
        for pair in loader:
            with twins.sampled():
                for twin, (x,) in zip(twins, pair, strict=True):
                    twin(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            twins.update()
            rows += _path_rows(len(rows) // 2, twins)
            tick()
    optima = [(r + 1, *data[bootstrap.indices(r)].mean(0).tolist()) for r in range(2)]
    return {
        "path": pd.DataFrame(rows, columns=["step", "twin", "w1", "w2", "sigma"]),
        "optima": pd.DataFrame(optima, columns=["twin", "w1", "w2"]),
    }


def _path_rows(step: int, twins: Twins) -> list[tuple[float, ...]]:
    sigma = twins.sigma["(model)"].item()
    return [(step, i, *twin.get_parameter("w").tolist(), sigma) for i, twin in enumerate(twins, start=1)]


def _estimates(config: Config, size: int, tick: Tick) -> dict[str, pd.DataFrame]:
    """sigma^2 by twins at each stage and by classical bootstraps, for many data sets of one size."""
    generator = torch.Generator().manual_seed(derive(config.seed, "data", size))
    most = max(config.replicas, default=2)
    means = []  # of the bootstrap samples; the first two of a data set are the twins'
    with one_thread():
        for seed in range(config.seeds):
            data = torch.randn(size, WEIGHTS, generator=generator) * math.sqrt(config.variance)
            bootstrap = Bootstrap(size, max(most, 2), seed=derive(config.seed, "bootstrap", size, seed))
            means.append(bootstrap.counts.to(data) @ data / size)
            tick()
        found = _twins(config, torch.stack(means)[:, :2], derive(config.seed, "noise", size))
    for replicas in config.replicas:
        found[f"bootstrap {replicas}"] = torch.stack([m[:replicas].var(0).mean() for m in means])
    frames = [
        pd.DataFrame({"size": size, "seed": range(config.seeds), "estimator": name, "sigma2": values.numpy()})
        for name, values in found.items()
    ]
    return {"estimates": pd.concat(frames, ignore_index=True)}


def _twins(config: Config, means: Tensor, seed: int) -> dict[str, Tensor]:
    """sigma^2 [seeds] at each stage. A squared loss knows its data only by their mean, so the mean stands for them."""
    twins = Twins(Mean(torch.zeros(len(means), WEIGHTS)), groups=Blocks((1, WEIGHTS)), seed=seed)
    optimizer = torch.optim.SGD(twins.parameters(), lr=config.rate)
    found, names = {}, {step: name for name, step in config.stages.items()}
    for step, rate in enumerate(_rates(config), start=1):
        optimizer.param_groups[0]["lr"] = rate
        with twins.sampled():
            for twin, mean in zip(twins, means.unbind(1), strict=True):
                twin(mean).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()
        if step in names:
            found[names[step]] = twins.sigma["w"].flatten().square()
    return found


def _rates(config: Config) -> list[float]:
    falling = [config.rate * (1 - step / config.falling) for step in range(config.falling)]
    return [config.rate] * config.constant + falling


def tau_squared(config: Config, size: int) -> float:
    """What a bootstrap of so many data says about the variance of their mean."""
    return config.variance / size * (size - 1) / size


def expected(config: Config, size: int) -> dict[str, float]:
    """E[sigma^2] of each estimator by the closed forms at the top of this file."""
    tau2 = tau_squared(config, size)
    names = {step: name for name, step in config.stages.items()}
    u, c, found = 0.0, 0.0, {}
    for step, rate in enumerate(_rates(config), start=1):
        a = 2 * rate
        u = (1 - a) ** 2 * u + 2 * a * (1 - a) * c + a**2 * tau2 + a**2 * u
        c = (1 - a) * c + a * tau2
        if step in names:
            found[names[step]] = u
    return found | {f"bootstrap {replicas}": tau2 for replicas in config.replicas}


def relative_variance(trainings: float, size: int) -> float:
    """Of sigma^2 from so many bootstrap samples, over data sets of one size."""
    given_data = 2 / (WEIGHTS * (trainings - 1))
    return given_data * (1 + (WEIGHTS + 1) / (size - 1)) + 2 / (WEIGHTS * (size - 1))


def summary(config: Config, estimates: pd.DataFrame) -> pd.DataFrame:
    """For each size and estimator: the mean of sigma^2 as a share of what a bootstrap can know, tau^2, its standard
    error and its relative variance, and what theory says of each."""
    rows = []
    for (size, name), group in estimates.groupby(["size", "estimator"], sort=False):
        tau2 = tau_squared(config, size)
        ratio = group["sigma2"] / tau2
        trainings = int(name.split()[1]) if name.startswith("bootstrap") else 2
        settled = name == "twins" or name.startswith("bootstrap")
        rows.append(
            {
                "size": size,
                "estimator": name,
                "trainings": trainings,
                "mean": ratio.mean(),
                "error": ratio.std() / math.sqrt(len(ratio)),
                "expected": expected(config, size)[name] / tau2,
                "variance": ratio.var() / ratio.mean() ** 2,
                "theory": relative_variance(trainings, size) if settled else math.nan,
            }
        )
    return pd.DataFrame(rows)


def pooled(config: Config, estimates: pd.DataFrame) -> pd.DataFrame:
    """The summary over all sizes together, one row per estimator; the order is that of the table."""
    of_size = summary(config, estimates)
    rows = []
    for name, group in of_size.groupby("estimator", sort=False):
        rows.append(
            {
                "estimator": name,
                "trainings": group["trainings"].iloc[0],
                "mean": group["mean"].mean(),
                "error": math.sqrt(group["error"].pow(2).sum()) / len(group),
                "expected": group["expected"].mean(),
                "variance": group["variance"].mean(),
                "theory": group["theory"].mean(),
            }
        )
    return pd.DataFrame(rows)
