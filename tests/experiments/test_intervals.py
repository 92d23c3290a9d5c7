import math

import pandas as pd
import pytest
import torch
from loops import seeded

from twinboot.experiments.intervals import change, correlation, covered, interval, with_error

# Quantiles of Student's distribution at 97.5 %, from tables.
STUDENT = {2: 12.706, 3: 4.3027, 4: 3.1824, 5: 2.7764, 6: 2.5706, 10: 2.2622, 25: 2.0639, 100: 1.9842}


@pytest.mark.parametrize(("n", "quantile"), STUDENT.items())
def test_intervals_are_students(n: int, quantile: float) -> None:
    values = pd.Series(torch.randn(n, generator=seeded(n)).tolist())
    mean, half = interval(values)
    assert mean == pytest.approx(values.mean())
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    assert half == pytest.approx(quantile * spread / math.sqrt(n), rel=2e-3)


def test_one_value_has_no_interval() -> None:
    mean, half = interval(pd.Series([2.0]))
    assert mean == 2
    assert math.isnan(half)


def test_ninety_five_per_cent_of_the_intervals_of_five_hold_the_mean() -> None:
    """A binomial number of the samples, here 2,000 of normal numbers."""
    samples = torch.randn(2000, 5, generator=seeded(0)).double()
    held = sum(abs(mean) < half for mean, half in (interval(pd.Series(sample)) for sample in samples.tolist()))
    assert abs(held / 2000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_a_change_is_relative_to_theirs_on_the_same_seeds() -> None:
    wide = pd.DataFrame({"theirs": [1.0, 2.0, 3.0], "ours": [0.9, 1.9, 2.9]})
    mean, half = change(wide, "ours", "theirs")
    assert mean == pytest.approx(-0.1 / 2)
    assert half == pytest.approx(0, abs=1e-12)  # the same on each seed, however much the seeds differ


def test_numbers_stand_with_their_errors() -> None:
    assert with_error(1.25, 0.004, "{:.2f}") == "1.25 ± 0.00"
    assert with_error(20.0, math.nan, "{:.2f}") == "20.00"


def test_correlation_is_one_for_a_multiple_and_none_for_a_constant() -> None:
    error = torch.rand(30, 30, generator=seeded(0))
    assert correlation(3 * error + 1, error) == pytest.approx(1)
    assert correlation(1 - error, error) == pytest.approx(-1)
    assert correlation(torch.ones(30, 30), error) == 0
    a, b = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[1.0, 3.0, 2.0]])
    assert correlation(a, b) == pytest.approx(1 / math.sqrt(14 / 3 * 2))  # by hand: covariance 1 / 2


def test_an_error_of_either_sign_is_covered_within_the_normal_quantile() -> None:
    error = torch.tensor([-1.7, -1.6, 1.6, 1.7])  # 1.645 sigmas hold 90 % of a normal distribution
    assert covered(error, torch.ones(4), 0.9) == 0.5
    assert covered(error, 2 * torch.ones(4), 0.9) == 1
