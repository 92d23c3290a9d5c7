"""Regressions whose parameters and standard errors are known: the data, the model, and the closed forms.

Each standard error is the limit for large samples: of least squares, or of the maximum of a likelihood that is not the
true one, the sandwich A^-1 B A^-1 / n. Expectations over normal predictors are computed by Gauss-Hermite quadrature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from twinboot import Bootstrap

Floats = NDArray[np.float64]
TRUTH = (1.0, 0.5, -0.5)  # the intercept and two slopes
SIZE = 8  # samples of a cluster
BETWEEN = 0.7  # standard deviation of the effects of clusters; that of samples is 1
RHO = 0.5  # correlation of neighbours in time
DISPERSION = 0.5  # the variance of a count is its mean plus this times the mean squared


@dataclass(frozen=True, eq=False)
class Sample:
    """A data set: predictors [n, 2], targets [n], and what is drawn together."""

    x: Floats
    y: Floats
    clusters: Floats | None = None
    block: int | None = None

    def dataset(self) -> TensorDataset:
        return TensorDataset(torch.from_numpy(self.x), torch.from_numpy(self.y))

    def bootstrap(self, seed: int) -> Bootstrap:
        return Bootstrap(len(self.y), seed=seed, clusters=self.clusters, block=self.block)


class Line(nn.Module):
    """An intercept and slopes.

    >>> Line()(torch.zeros(3, 2).double()).shape
    torch.Size([3])
    """

    def __init__(self) -> None:
        super().__init__()
        self.intercept = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.slope = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.intercept + x @ self.slope


@dataclass(frozen=True)
class Task:
    """A kind of regression."""

    title: str
    loss: Any
    draw: Callable[[np.random.Generator, int], Sample]
    closed: Callable[[int], Floats]  # the standard errors for n samples
    robust: Callable[[Sample], tuple[Floats, Floats]]  # estimates and standard errors by statsmodels


def _line(x: Floats) -> Floats:
    return np.asarray(TRUTH[0] + x @ np.array(TRUTH[1:]))


def _scale(x: Floats) -> Floats:
    """The noise grows with the first predictor."""
    return np.asarray(0.5 + np.abs(x[..., 0]))


def _linear(rng: np.random.Generator, n: int) -> Sample:
    x = rng.normal(size=(n, 2))
    return Sample(x, _line(x) + _scale(x) * rng.normal(size=n))


def _logistic(rng: np.random.Generator, n: int) -> Sample:
    x = rng.normal(size=(n, 2))
    return Sample(x, (rng.random(n) < 1 / (1 + np.exp(-_line(x)))).astype(float))


def _poisson(rng: np.random.Generator, n: int) -> Sample:
    x = rng.normal(size=(n, 2))
    return Sample(x, rng.poisson(np.exp(_line(x)) * rng.gamma(1 / DISPERSION, DISPERSION, n)).astype(float))


def _clusters(rng: np.random.Generator, n: int) -> Sample:
    """The first predictor is that of a cluster, the second one of a sample."""
    label = np.arange(n) // SIZE
    x = np.stack([rng.normal(size=label.max() + 1)[label], rng.normal(size=n)], 1)
    effect = BETWEEN * rng.normal(size=label.max() + 1)[label]
    return Sample(x, _line(x) + effect + rng.normal(size=n), clusters=label.astype(float))


def _series(rng: np.random.Generator, n: int) -> Sample:
    """Predictors and noise are AR(1) processes of variance 1."""
    walks = rng.normal(size=(n, 3))
    for t in range(1, n):
        walks[t] = RHO * walks[t - 1] + math.sqrt(1 - RHO**2) * walks[t]
    x = walks[:, :2]
    return Sample(x, _line(x) + walks[:, 2], block=round(math.sqrt(n)))


def _expected(weight: Callable[[Floats], Floats]) -> Floats:
    """The mean of weight(x) times the outer product of (1, x), for two standard normal predictors, [3, 3]."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(201)
    x = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    w = np.outer(weights, weights).reshape(-1) / weights.sum() ** 2
    design = np.concatenate([np.ones((len(x), 1)), x], 1)
    return np.asarray(design.T @ (design * (w * weight(x))[:, None]))


def _sandwich(bread: Callable[[Floats], Floats], meat: Callable[[Floats], Floats]) -> Callable[[int], Floats]:
    def closed(n: int) -> Floats:
        inverse = np.linalg.inv(_expected(bread))
        return np.asarray(np.sqrt(np.diag(inverse @ _expected(meat) @ inverse) / n))

    return closed


def _ones(x: Floats) -> Floats:
    return np.ones(len(x))


def _binary(x: Floats) -> Floats:
    p = 1 / (1 + np.exp(-_line(x)))
    return np.asarray(p * (1 - p))


def _rate(x: Floats) -> Floats:
    return np.asarray(np.exp(_line(x)))


def _closed_clusters(n: int) -> Floats:
    """What the samples of a cluster share adds up for the intercept and for the first slope."""
    shared, single = 1 + SIZE * BETWEEN**2, 1 + BETWEEN**2
    return np.sqrt(np.array([shared, shared, single]) / n)


def _closed_series(n: int) -> Floats:
    """The sum of the autocovariances of the noise, and of its products with a predictor."""
    return np.sqrt(np.array([(1 + RHO) / (1 - RHO), *[(1 + RHO**2) / (1 - RHO**2)] * 2]) / n)


def _design(sample: Sample) -> Floats:
    return np.concatenate([np.ones((len(sample.y), 1)), sample.x], 1)


def _fitted(result: Any) -> tuple[Floats, Floats]:
    return np.asarray(result.params), np.asarray(result.bse)


def _robust_linear(sample: Sample) -> tuple[Floats, Floats]:
    import statsmodels.api as sm

    return _fitted(sm.OLS(sample.y, _design(sample)).fit(cov_type="HC3"))


def _robust_logistic(sample: Sample) -> tuple[Floats, Floats]:
    import statsmodels.api as sm

    return _fitted(sm.Logit(sample.y, _design(sample)).fit(cov_type="HC1", disp=0))


def _robust_poisson(sample: Sample) -> tuple[Floats, Floats]:
    import statsmodels.api as sm

    return _fitted(sm.GLM(sample.y, _design(sample), family=sm.families.Poisson()).fit(cov_type="HC1"))


def _robust_clusters(sample: Sample) -> tuple[Floats, Floats]:
    import statsmodels.api as sm

    groups = {"groups": np.asarray(sample.clusters, int)}
    return _fitted(sm.OLS(sample.y, _design(sample)).fit(cov_type="cluster", cov_kwds=groups))


def _robust_series(sample: Sample) -> tuple[Floats, Floats]:
    import statsmodels.api as sm

    return _fitted(sm.OLS(sample.y, _design(sample)).fit(cov_type="HAC", cov_kwds={"maxlags": sample.block}))


TASKS = {
    "linear": Task(
        "linear, noise grows with a predictor",
        "regression",
        _linear,
        _sandwich(_ones, lambda x: _scale(x) ** 2),
        _robust_linear,
    ),
    "logistic": Task("logistic", "logistic", _logistic, _sandwich(_binary, _binary), _robust_logistic),
    "poisson": Task(
        "Poisson, overdispersed counts",
        "poisson",
        _poisson,
        _sandwich(_rate, lambda x: _rate(x) + DISPERSION * _rate(x) ** 2),
        _robust_poisson,
    ),
    "clusters": Task(f"linear, clusters of {SIZE}", "regression", _clusters, _closed_clusters, _robust_clusters),
    "series": Task("linear, AR(1), blocks", "regression", _series, _closed_series, _robust_series),
}
