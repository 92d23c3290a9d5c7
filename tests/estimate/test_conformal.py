"""Conformal quantiles, sets and intervals, against the probability that ranks give them."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from twinboot import Prediction
from twinboot.estimate.conformal import Scores, noise_variance, of_classes, quantile


@pytest.mark.parametrize(("n", "level"), [(9, 0.9), (18, 0.9), (30, 0.5), (57, 0.8)])
def test_a_new_score_is_below_the_quantile_as_often_as_its_rank_says(n: int, level: float) -> None:
    draws = 4000
    scores = np.random.default_rng(0).exponential(size=(draws, n + 1))
    covered = np.mean([own[-1] <= quantile(own[:-1], level) for own in scores])
    expected = math.ceil(round((n + 1) * level, 9)) / (n + 1)  # all ranks of the new one are as probable
    assert level <= expected <= level + 1 / (n + 1)
    assert abs(covered - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def test_too_few_scores_give_no_bound() -> None:
    assert quantile(np.arange(8.0), 0.9) == math.inf  # the 9th of 8
    assert quantile(np.arange(9.0), 0.9) == 8.0
    assert quantile(np.empty(0), 0.1) == math.inf


def test_equal_weights_change_nothing_and_a_heavy_row_counts_more() -> None:
    scores = np.random.default_rng(1).exponential(size=25)
    for level in (0.1, 0.5, 0.9):
        assert quantile(scores, level, np.full(25, 0.3)) == quantile(scores, level)
    assert quantile(np.arange(20.0), 0.5, np.where(np.arange(20) == 15, 30.0, 1.0)) == 15.0


@pytest.mark.parametrize("factor", [1e308, 1e-320])
def test_only_ratios_of_weights_matter(factor: float) -> None:
    scores, weight = np.random.default_rng(1).exponential(size=25), np.where(np.arange(25) < 5, 1.0, 0.5)
    for level in (0.1, 0.5, 0.9):
        assert quantile(scores, level, factor * weight) == quantile(scores, level, weight)


@pytest.mark.parametrize("level", [0, 1, 90, -0.1, math.nan, True, "0.9", None, [0.9], np.array([0.9]), 0.9j])
def test_a_level_is_a_share(level: Any) -> None:
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        quantile(np.arange(5.0), level)


def test_a_list_is_as_good_as_an_array() -> None:
    assert quantile([float(score) for score in range(9)], 0.9, [1] * 9) == 8.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "scores",
    [np.array([1.0, math.nan]), np.zeros((2, 2)), np.array([1j, 2]), ["a", "b"], [[1.0], 2.0], [None], None, 3.0],
)
def test_scores_that_have_no_order_are_refused(scores: Any) -> None:
    with pytest.raises(ValueError, match="scores must be a one-dimensional array of real numbers without NaN"):
        quantile(scores, 0.5)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (np.ones(4), "weight must have 5 finite numbers, one per score"),
        (np.zeros(5), "none below 0, and one above"),
        (np.array([1.0, 1, 1, 1, -1]), "5 finite numbers"),
        (np.array([1.0, 1, 1, 1, math.inf]), "5 finite numbers"),
        (np.array([1.0, 1, 1, 1, math.nan]), "weight must be a one-dimensional array of real numbers"),
        (np.array(["a"] * 5), "weight must be a one-dimensional array of real numbers"),
        (np.empty(0), "weight must have 5 finite numbers"),
    ],
)
def test_weights_that_weigh_nothing_are_refused(weight: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quantile(np.arange(5.0), 0.5, weight)


@pytest.mark.parametrize("n", [8, 9, 19, 57])
@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_scores_of_samples_have_the_quantile_of_scores_with_equal_weights(n: int, level: float) -> None:
    values = np.sort(np.random.default_rng(1).exponential(size=(n, 2)), axis=0)
    scores = Scores(torch.from_numpy(values), None, {})
    expected = [quantile(values[:, column], level) for column in range(2)]
    if math.isfinite(expected[0]):
        assert scores.quantile(level).tolist() == expected
    else:
        with pytest.warns(
            UserWarning, match=r"^sets of level 0.9 have all classes.* need 9 samples .*, but there are 8"
        ):
            assert scores.quantile(level).tolist() == expected


def test_the_score_of_a_class_is_the_probability_of_the_more_probable_ones() -> None:
    probs = torch.rand(6, 5, 3, generator=torch.Generator().manual_seed(0)).softmax(1)
    above = probs[:, None] > probs[:, :, None]  # [inputs, class, other class, ...]
    expected = (above * probs[:, None]).sum(2).double()
    torch.testing.assert_close(of_classes(probs), expected, atol=1e-7, rtol=0)
    assert (of_classes(probs).min(1).values == 0).all()


@pytest.mark.parametrize(("n", "level"), [(9, 0.9), (40, 0.8), (100, 0.95)])
def test_sets_and_intervals_contain_new_samples_as_often_as_theory_says(n: int, level: float) -> None:
    """Also for a model that is wrong: its probabilities are those of other logits, and its spread is too small. The
    most probable class is right in fewer than 75 % of the cases, so that scores of 0, which are equal, do not
    matter."""
    draws = 2000
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(draws * (n + 1), 6, generator=generator)
    labels = torch.multinomial((1.5 * logits).softmax(1), 1, generator=generator).squeeze(1)
    probs = (4 * logits + torch.randn(logits.shape, generator=generator)).softmax(1)
    assert (probs.argmax(1) == labels).float().mean() < 0.75
    noise = torch.randn(draws * (n + 1), generator=generator)
    spread = 0.1 + torch.rand(draws * (n + 1), generator=generator)
    in_set = in_interval = 0
    for part in torch.arange(draws * (n + 1)).split(n + 1):
        past, new = part[:-1], part[-1:]
        for task, mean, target in (("classification", probs, labels), ("regression", 0 * noise, 3 * spread * noise**3)):
            known = Prediction(task, mean[past], spread[past])  # type: ignore[arg-type]
            scores = Scores(known._scores_of(target[past], 0.1).sort().values, 0.1, {})
            found = Prediction(task, mean[new], spread[new], scores=scores)  # type: ignore[arg-type]
            if task == "classification":
                in_set += int(found.set(level)[0, labels[new]])
            else:
                low, high = found.conformal_interval(level)
                in_interval += int(low <= target[new] <= high)
    expected = math.ceil(round((n + 1) * level, 9)) / (n + 1)
    assert level <= expected <= level + 1 / (n + 1)
    for inside in (in_set, in_interval):
        assert abs(inside / draws - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def test_noise_is_what_the_spread_leaves_of_the_errors() -> None:
    errors = np.array([3.0, -3.0, 3.0, -3.0])
    assert noise_variance(errors, np.full(4, 2.0)) == pytest.approx(5)
    assert noise_variance(errors, np.full(4, 9.0)) == pytest.approx(0.05 * 9)
    weight = np.array([1.0, 1.0, 0.0, 0.0])
    assert noise_variance(np.array([3.0, 3.0, 8.0, 8.0]), np.zeros(4), weight) == pytest.approx(9)
