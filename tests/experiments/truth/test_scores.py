import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import stdtr
from torch import Tensor

from twinboot.experiments.truth import scores
from twinboot.experiments.truth.methods import Found

SETS = 40


def score(points: Tensor, draws: list[Tensor], df: float, truth: Tensor | None = None) -> pd.DataFrame:
    """Scores of a method that predicts `points` [sets, inputs], as a regression; the truth is that of plain models with
    the same predictions, unless it is given."""
    truth = points if truth is None else truth
    target = torch.zeros(points.shape[1], 1)
    tables = [
        scores.truth_rows("regression", predicted[:, None], target).assign(size=100, lr=0.1, set=s)
        for s, predicted in enumerate(truth)
    ]
    drawn = [
        scores.draw_rows("regression", Found(own[..., None], point[:, None], 1.0), target).assign(set=s)
        for s, (own, point) in enumerate(zip(draws, points, strict=True))
    ]
    sets = range(len(draws))
    plain = pd.DataFrame({"set": sets, "method": scores.PLAIN, "seconds": [1.0, 3.0] * (len(draws) // 2)})
    runs = pd.concat([plain, pd.DataFrame({"set": sets, "method": "exact", "seconds": 5.0, "df": df})])
    found = scores.with_scores(
        pd.concat(tables),
        pd.concat(drawn).assign(size=100, lr=0.1, method="exact"),
        runs.assign(size=100, lr=0.1),
    )
    return found[found["method"] == "exact"]


def linear(sets: int, draws: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Least squares on `sets` training sets with the same inputs and new noise: its predictions for test inputs, draws
    around each from the exact distribution over training sets, and the covariance of the predictions."""
    generator = torch.Generator().manual_seed(0)
    x, test = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (30, 200))
    covariance = test @ (x.T @ x).inverse() @ test.T  # for noise of standard deviation 1
    y = torch.randn(30, sets, generator=generator, dtype=torch.float64)
    points = (test @ torch.linalg.lstsq(x, y).solution).T
    root = test @ torch.linalg.cholesky((x.T @ x).inverse())
    found = [point + torch.randn(draws, 3, generator=generator, dtype=torch.float64) @ root.T for point in points]
    return points, found, covariance


def test_the_exact_sampling_distribution_has_a_ratio_of_1() -> None:
    """Mean variances are traces of sample covariances: their relative variance is 2 tr(C^2) / tr(C)^2 / df."""
    points, draws, covariance = linear(SETS, 500)
    found = score(points, draws, math.inf)
    unit = (2 * (covariance @ covariance).trace() / covariance.trace() ** 2).item()
    log_error = 0.5 * math.sqrt(unit / (SETS - 1) + unit / 499 / SETS)  # of the mean over the sets
    assert abs(math.log(found["ratio"].pow(2).mean()) / 2) < 4 * log_error
    assert abs(math.log(found["own_ratio"].pow(2).mean()) / 2) < 4 * log_error


def test_a_spread_that_is_twice_as_large_has_a_ratio_that_is_twice_as_large() -> None:
    points, draws, _ = linear(4, 50)
    wider = [point + 2 * (own - point) for own, point in zip(draws, points, strict=True)]
    ratio = score(points, wider, math.inf)["ratio"] / score(points, draws, math.inf)["ratio"]
    assert ratio.to_numpy() == pytest.approx(2, rel=1e-4)  # the tables have five digits


@pytest.mark.parametrize(("draws", "df"), [(2, 1.0), (5, 4.0), (400, math.inf)])
def test_intervals_of_the_exact_distribution_cover_what_they_say(draws: int, df: float) -> None:
    """The expected prediction is that of the other sets, whose mean has an error of its own."""
    generator, inputs = torch.Generator().manual_seed(1), 500
    points = torch.randn(SETS, inputs, generator=generator, dtype=torch.float64)
    drawn = [point + torch.randn(draws, inputs, generator=generator, dtype=torch.float64) for point in points]
    found = score(points, drawn, df)
    reach = scores.quantile(df) / math.sqrt(1 + 1 / (SETS - 1))
    expected = 2 * stdtr(min(df, 1e9), reach) - 1
    # Inputs are independent. Sets share the truth: at most as if all of them were one.
    assert abs(found["covered"].mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / inputs)
    assert 0.85 < expected < 0.9


def test_ranks_are_those_of_the_true_spread() -> None:
    """Each input's spread is ten times that of the one before: chance cannot exchange two of them."""
    generator = torch.Generator().manual_seed(2)
    spread = 10.0 ** torch.arange(6, dtype=torch.float64)
    points = spread * torch.randn(SETS, 6, generator=generator, dtype=torch.float64)
    drawn = [point + spread * torch.randn(30, 6, generator=generator, dtype=torch.float64) for point in points]
    assert (score(points, drawn, math.inf)["rank"] == 1).all()
    backwards = [point + (own - point).flip(1) for own, point in zip(drawn, points, strict=True)]
    assert score(points, backwards, math.inf)["rank"].to_numpy() == pytest.approx(-1)
    same = [point + torch.tensor([[1.0], [-1.0]], dtype=torch.float64) for point in torch.zeros_like(points)]
    assert (score(torch.zeros_like(points), same, math.inf, points)["rank"] == 0).all()


def test_time_is_relative_to_the_median_of_the_plain_trainings() -> None:
    points, draws, _ = linear(4, 5)
    assert (score(points, draws, math.inf)["cost"] == 2.5).all()


def test_classes_are_judged_by_the_log_odds_of_the_label() -> None:
    draws = torch.tensor([[[0.5, 0.3, 0.2]], [[0.9, 0.1, 0.0]]], dtype=torch.float64)
    rows = scores.draw_rows("classification", Found(draws, draws.mean(0), 1.0), torch.tensor([1])).iloc[0]
    odds = np.log([0.3 / 0.7, 0.1 / 0.9])
    assert rows["value"] == pytest.approx(math.log(0.2 / 0.8), rel=1e-4)
    assert rows["std"] == pytest.approx(odds.std(ddof=1), rel=1e-4)
    assert rows["probability"] == pytest.approx(0.2)
    assert rows["probability_std"] == pytest.approx(0.2 / math.sqrt(2), rel=1e-4)
    assert rows["variance"] == pytest.approx((0.4**2 + 0.2**2 + 0.2**2) / 2, rel=1e-4)


def test_certain_classes_have_finite_log_odds() -> None:
    odds = scores.log_odds(torch.tensor([0.0, 1.0]))
    assert odds.tolist() == pytest.approx([math.log(1e-7), -math.log(1e-7)], rel=1e-5)


def test_probabilities_are_expected_to_be_the_mean_of_the_other_models() -> None:
    """Log-odds and probabilities have different means: an interval of no width holds one of them."""
    probs = torch.tensor([0.5, 0.5, 0.9, 0.3], dtype=torch.float64)  # of the label, for four sets
    predicted = torch.stack([probs, 1 - probs], 1)[:, None]
    target = torch.tensor([0])
    truth = [
        scores.truth_rows("classification", own, target).assign(size=9, lr=1.0, set=s)
        for s, own in enumerate(predicted)
    ]
    mean = probs[1:].mean()
    point = torch.stack([mean, 1 - mean])[None]
    found = Found(torch.stack([point, point]), point, 1.0)
    draws = scores.draw_rows("classification", found, target).assign(size=9, lr=1.0, method="one", set=0)
    runs = pd.DataFrame({"size": 9, "lr": 1.0, "method": ["plain", "one"], "set": 0, "seconds": 1.0, "df": 1.0})
    one = scores.with_scores(pd.concat(truth), draws.assign(probability_std=1e-5), runs).iloc[1]
    assert (one["covered"], one["covered_probs"]) == (0, 1)


def test_scores_of_predictions() -> None:
    probs = torch.tensor([[0.8, 0.2], [0.6, 0.4]], dtype=torch.float64)
    found = scores.quality("classification", probs[None], probs.flip(1), torch.tensor([0, 1]))
    assert found == pytest.approx(
        {
            "nll": -math.log(0.8 * 0.4) / 2,
            "accuracy": 0.5,
            "point_nll": -math.log(0.2 * 0.6) / 2,
            "point_accuracy": 0.5,
        }
    )
    values = torch.tensor([[1.0], [2.0]])
    assert scores.quality("regression", values[None], values, torch.zeros(2, 1))["rmse"] == pytest.approx(2.5**0.5)


def test_tables_keep_five_digits() -> None:
    values = torch.tensor([0.0, 1.2345678e-9, -123456.78, 1.0], dtype=torch.float64)
    assert scores._rounded(values).tolist() == pytest.approx([0.0, 1.2346e-9, -123460.0, 1.0], rel=1e-12)


@pytest.mark.parametrize("differ", [0.0, 0.1, 0.5])
def test_the_best_rank_correlation_is_that_of_the_exact_spread(differ: float) -> None:
    """With 20 sets, log variances have an error of about sqrt(2 / 19); the exact ones are known here."""
    generator, inputs = torch.Generator().manual_seed(3), 4000
    spread = torch.exp(differ * torch.randn(inputs, generator=generator, dtype=torch.float64))
    predictions = spread * torch.randn(20, inputs, generator=generator, dtype=torch.float64)
    rows = [
        scores.truth_rows("regression", own[:, None], torch.zeros(inputs, 1)).assign(size=9, lr=1.0, set=s)
        for s, own in enumerate(predictions)
    ]
    [truth] = scores.truths(pd.concat(rows)).values()
    exact = scores.rank_correlation(spread.numpy(), truth.variance) if differ else 0.0
    # A rank correlation r of n pairs has an error of about (1 - r^2) / sqrt(n); half the sets know less. Where nothing
    # is known, the square root of the error of 1 / sqrt(n) is left.
    assert abs(truth.best_rank - exact) < (
        4 * 2 / math.sqrt(inputs) if differ else math.sqrt(2 * 4 / math.sqrt(inputs))
    )
