"""Student's quantiles against scipy, and Satterthwaite's degrees of freedom against simulation."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from loops import seeded
from scipy.stats import t as student

from twinboot.estimate.student import TABLE, combined, half_width, satterthwaite

LEVELS = (0.01, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999)


@pytest.mark.parametrize("level", LEVELS)
def test_quantiles_are_those_of_scipy(level: float) -> None:
    df = np.r_[1, 1.01, 1.1, 1.5, 2, 2.5, 3, 4, 5, 9.7, 30, 100, 1e3, 1e4, 9.99e4, 1.01e5, 1e6, 1e9]
    expected = student.ppf(0.5 + level / 2, df)
    np.testing.assert_allclose([half_width(level, d) for d in df], expected, rtol=1e-6)
    found = half_width(level, torch.from_numpy(df).view(2, 9))
    np.testing.assert_allclose(found.numpy().ravel(), expected, rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_many_quantiles_are_interpolated(level: float) -> None:
    df = 1 / torch.rand(2 * TABLE, generator=seeded(0), dtype=torch.float64)
    expected = student.ppf(0.5 + level / 2, df.numpy())
    np.testing.assert_allclose(half_width(level, df).numpy(), expected, rtol=1e-6)


def test_without_degrees_of_freedom_or_with_infinitely_many_the_distribution_is_normal() -> None:
    normal = NormalDist().inv_cdf(0.95)
    assert half_width(0.9) == normal
    assert half_width(0.9, math.inf) == normal
    assert half_width(0.9, torch.tensor([math.inf])).item() == pytest.approx(normal)
    assert half_width(0.9, torch.empty(0)).shape == (0,)
    with pytest.raises(ValueError, match="the degrees of freedom must be at least 1"):
        half_width(0.9, 0.5)


@pytest.mark.parametrize(("groups", "each"), [(1, 1), (3, 1), (10, 1), (1, 4), (3, 4), (10, 4)])
def test_intervals_of_a_sum_of_variances_hold_as_often_as_they_say(groups: int, each: int) -> None:
    """Exactly for one group. For several, Satterthwaite's formula has to use the estimates themselves: with one degree
    of freedom each they are too wide, by less than 4 points of coverage."""
    n, level = 20_000, 0.9
    rng = np.random.default_rng(0)
    variances = rng.standard_normal((n, groups)) ** 2 * rng.uniform(0.5, 2, (n, groups))
    errors = rng.standard_normal(n) * np.sqrt(variances.sum(1))
    estimated = torch.from_numpy(variances * rng.chisquare(each, (n, groups)) / each)
    df = satterthwaite(estimated, torch.full((groups,), float(each)))
    assert (df > each - 1e-9).all()
    assert (df < groups * each + 1e-9).all()
    width = estimated.sum(1).sqrt().numpy()
    covered, normal = (np.mean(np.abs(errors) < half * width) for half in (half_width(level, df).numpy(), 1.645))
    error = math.sqrt(level * (1 - level) / n)
    assert level - 4 * error < covered < level + 4 * error + (0.04 if groups > 1 else 0)
    assert normal < level - 4 * error


def test_a_prediction_that_no_group_changes_has_no_uncertain_variance() -> None:
    assert satterthwaite(torch.zeros(2, 3), torch.ones(3)).tolist() == [math.inf, math.inf]


def test_two_steps_have_fewer_degrees_of_freedom_than_each() -> None:
    assert combined(None, None) is None
    assert combined(3, None) == combined(None, 3) == 3
    assert combined(4.0, 4.0) == 2
    assert combined(1.0, 31.0) == 1  # with fewer than one, no quantile is known
    torch.testing.assert_close(combined(torch.tensor([1.0, 4.0]), 4), torch.tensor([1.0, 2.0]))
