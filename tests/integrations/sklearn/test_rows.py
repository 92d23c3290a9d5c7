"""The order of rows and who sees them: the rows' own, and fair."""

import math

import numpy as np
import pytest
import torch

from twinboot.integrations.sklearn.rows import Rows, moments, ordered, shared


def table(n: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 3)), rng.normal(size=n), rng.integers(1, 4, n).astype(float)


def assert_same(first: Rows, second: Rows) -> None:
    for name in ("x", "y", "weight"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("whole", [True, False])
def test_the_order_of_the_table_does_not_matter(whole: bool) -> None:
    x, y, weight = table()
    weight = weight if whole else weight + 0.5
    mixed = np.random.default_rng(1).permutation(len(x))
    assert_same(ordered(x, y, weight, 0), ordered(x[mixed], y[mixed], weight[mixed], 0))


def test_a_whole_weight_is_a_row_that_comes_as_often() -> None:
    x, y, weight = table()
    often = weight.astype(int)
    found = ordered(x, y, weight, 0)
    assert_same(found, ordered(x.repeat(often, 0), y.repeat(often), np.ones(often.sum()), 0))
    assert len(found.x) == weight.sum()


def test_other_weights_stay_with_their_rows_and_only_their_ratios_matter() -> None:
    x, y, weight = table()
    found = ordered(x, y, weight + 0.5, 0)
    assert found.weight.mean() == pytest.approx(1)
    assert len(found.x) == len(x)
    of = {row.tobytes(): w for row, w in zip(x, (weight + 0.5) / (weight + 0.5).mean(), strict=True)}
    np.testing.assert_allclose(found.weight, [of[row.tobytes()] for row in found.x])


@pytest.mark.parametrize("factor", [3.0, 0.1, 1e20])
def test_other_units_of_the_weights_leave_the_order_as_it_is(factor: float) -> None:
    x, y, weight = table()
    x[:20], y[:20] = x[0], y[0]  # equal rows, some of them with other weights
    weight = weight + 0.7
    first, second = ordered(x, y, weight, 0), ordered(x, y, factor * weight, 0)
    np.testing.assert_array_equal(first.x, second.x)
    np.testing.assert_allclose(first.weight, second.weight, rtol=1e-12)
    mixed = np.random.default_rng(1).permutation(len(x))
    assert_same(first, ordered(x[mixed], y[mixed], weight[mixed], 0))


@pytest.mark.parametrize("value", [0.7, 2, 100, 1e20])
def test_equal_weights_are_as_none(value: float) -> None:
    x, y, _ = table()
    assert_same(ordered(x, y, np.full(len(x), value), 0), ordered(x, y, np.ones(len(x)), 0))


@pytest.mark.parametrize("factor", [11, 10**20])
def test_large_whole_weights_are_ratios_and_not_repetitions(factor: float) -> None:
    x, y, weight = table()
    found = ordered(x, y, factor * weight, 0)
    assert len(found.x) == len(x)
    np.testing.assert_allclose(found.weight, ordered(x, y, 0.1 * weight, 0).weight)


def test_signed_zeros_are_equal() -> None:
    zeros, y = np.array([[0.0, 1.0], [-0.0, 2.0]]), np.zeros(2)
    assert_same(ordered(zeros, y, np.ones(2), 0), ordered(np.abs(zeros), -y, np.ones(2), 0))


def test_a_seed_does_not_pick_the_same_ranks_of_every_table() -> None:
    """The mean rank of what seed 0 sets aside has the variance of a fair sample of ranks, over tables."""
    tables, n = 200, 100
    aside = shared(n, 0, set_aside=True).aside.numpy()
    ranks = []
    for number in range(tables):
        y = np.random.default_rng(number).normal(size=n)
        rows = ordered(np.zeros((n, 1)), y, np.ones(n), 0)
        ranks.append(np.argsort(np.argsort(rows.y))[aside].mean())
    m = len(aside)
    variance = (n + 1) * (n - m) / (12 * m)  # of the mean of m of n ranks, without replacement
    assert abs(np.mean(ranks) - (n - 1) / 2) < 4 * math.sqrt(variance / tables)
    assert np.var(ranks) == pytest.approx(variance, rel=4 * math.sqrt(2 / tables))


@pytest.mark.parametrize("n", [2, 3, 4, 10, 500])
@pytest.mark.parametrize("set_aside", [True, False])
def test_rows_are_shared_out_without_overlap_however_few_they_are(n: int, set_aside: bool) -> None:
    for seed in range(5):
        shares = shared(n, seed, set_aside)
        parts = torch.cat([shares.seen, shares.stopping, shares.aside])
        assert sorted(parts.tolist()) == list(range(n))
        assert len(shares.stopping) >= 1
        assert len(shares.stopping) - len(shares.aside) in ((0, 1) if set_aside else (len(shares.stopping),))
        assert shares.bootstrap.counts.sum(1).tolist() == [n, n]


@pytest.mark.parametrize("factor", [1e-300, 1e-165, 1e-20, 1e20, 1e153, 1e300])
def test_moments_are_in_the_units_of_the_values(factor: float) -> None:
    values, _, weight = table()
    values[:, 2] = 7.0  # a constant
    center, spread = moments(values, weight)
    for found, expected in zip(moments(factor * values, weight), (center, spread), strict=True):
        np.testing.assert_allclose(found[:2] / factor, expected[:2], rtol=1e-12)
    exact = 2.0 ** round(math.log2(factor))
    for found, expected in zip(moments(exact * values, weight), (center, spread), strict=True):
        np.testing.assert_array_equal(found / exact, expected)


def test_moments_of_ordinary_values_are_those_of_numpy_bit_for_bit() -> None:
    values, _, weight = table()
    center, spread = moments(values, weight)
    np.testing.assert_array_equal(center, np.average(values, axis=0, weights=weight))
    variance = np.average((values - center) ** 2, axis=0, weights=weight)
    np.testing.assert_array_equal(spread, np.sqrt(variance))


def test_values_of_very_different_size_have_moments() -> None:
    center, spread = moments(np.array([[1e300, 5e-324], [1.0, 0.0]]), np.ones(2))
    np.testing.assert_allclose(center[0], 5e299)
    np.testing.assert_allclose(spread[0], 5e299)
    assert spread[1] > 0


@pytest.mark.parametrize("factor", [1e308 / 4, 1e-320])
def test_extreme_weights_are_ratios_as_others_are(factor: float) -> None:
    x, y, weight = table()
    weight = np.where(weight > 1, 1.0, 0.5)
    assert_same(ordered(x, y, factor * weight, 0), ordered(x, y, weight, 0))


def test_the_spread_of_constant_columns_is_a_power_of_two_of_their_size() -> None:
    values = np.c_[np.full(7, 0.1), np.arange(7.0), np.ones(7), np.zeros(7), np.full(7, -5e-200)]
    center, spread = moments(values, np.ones(7))
    np.testing.assert_allclose(center, [0.1, 3, 1, 0, -5e-200])
    np.testing.assert_allclose(spread[:4], [1 / 16, 2, 1, 1])
    assert 0.5 < spread[4] / 5e-200 <= 1
