import math
from typing import Any

import pytest
import torch
from torch import Tensor

from twinboot import metrics


def calibrated(n: int = 200_000, sharpness: float = 1.0) -> tuple[Tensor, Tensor]:
    """Labels drawn from some probabilities, and those probabilities raised to a power."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return (sharpness * logits).softmax(1), labels


def test_true_probabilities_have_no_calibration_error_beyond_that_of_counting() -> None:
    probs, labels = calibrated()
    # Each of 15 bins is off by sqrt(p (1 - p) / its samples): summed, at most sqrt(15 / n) / 2.
    width = math.sqrt(15 / len(labels)) / 2
    assert metrics.ece(probs, labels) < 2 * width
    assert metrics.adaptive_ece(probs, labels) < 2 * width


def test_calibration_error_of_a_model_that_is_too_sure_is_its_excess_of_confidence() -> None:
    probs, labels = calibrated(sharpness=3.0)
    excess = probs.max(1).values.mean() - (probs.argmax(1) == labels).double().mean()
    for error in (metrics.ece(probs, labels), metrics.adaptive_ece(probs, labels)):
        assert error == pytest.approx(excess.item(), abs=0.005)


def test_scores_of_one_and_the_same_probability_are_known() -> None:
    n = 1000
    probs = torch.tensor([[0.7, 0.3]]).expand(n, 2)
    labels = (torch.arange(n) >= 800).long()  # the first class for 80 %
    found = metrics.scores(probs, labels)
    assert found["accuracy"] == pytest.approx(0.8)
    assert found["nll"] == pytest.approx(-0.8 * math.log(0.7) - 0.2 * math.log(0.3), rel=1e-6)
    assert found["brier"] == pytest.approx(0.8 * 2 * 0.3**2 + 0.2 * 2 * 0.7**2, rel=1e-6)
    assert found["ece"] == pytest.approx(0.1, abs=1e-4)  # torchmetrics sums in single precision
    assert found["auroc"] == 0.5  # nothing tells them apart


def test_equally_many_samples_in_each_bin_see_what_one_bin_of_equal_width_averages_away() -> None:
    # Right with 91 %, wrong with 99 %: in one bin of a tenth the excess of the one makes up for the lack of the other.
    probs = torch.tensor([[0.91, 0.09]] * 50 + [[0.99, 0.01]] * 50)
    labels = torch.tensor([0] * 50 + [1] * 50)
    assert metrics.ece(probs, labels, bins=10) == pytest.approx(0.95 - 0.5, abs=1e-4)
    assert metrics.adaptive_ece(probs, labels, bins=2) == pytest.approx((0.09 + 0.99) / 2, abs=1e-6)


def test_a_probability_a_hair_above_one_is_none_the_less_a_probability() -> None:
    probs = torch.tensor([[1.0000001, 0.0], [0.9, 0.1], [0.2, 0.8]])
    assert metrics.ece(probs, torch.tensor([0, 0, 1])) == pytest.approx((0 + 0.1 + 0.2) / 3, abs=1e-4)


def test_auroc_counts_pairs_and_depends_on_the_order_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    uncertainty = torch.randn(60, generator=generator).round(decimals=1)  # with ties
    positive = torch.rand(60, generator=generator) < 0.3
    pairs = uncertainty[positive][:, None] - uncertainty[~positive]
    expected = ((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean().item()
    for values in (uncertainty, 1e6 * uncertainty, uncertainty.exp()):
        assert metrics.auroc(values, positive) == pytest.approx(expected, abs=1e-6)
    assert math.isnan(metrics.auroc(uncertainty, torch.zeros(60, dtype=torch.bool)))


def test_a_reliability_diagram_adds_up_to_the_calibration_error() -> None:
    probs, labels = calibrated(3000, sharpness=2.0)
    found = metrics.reliability(probs, labels)
    assert found.share.sum().item() == pytest.approx(1)
    gaps = (found.share * (found.confidence - found.accuracy).abs()).nansum().item()
    assert gaps == pytest.approx(metrics.ece(probs, labels), abs=1e-4)
    assert found.confidence.isnan().equal(found.share == 0)


HALVES, ZEROS = torch.full((5, 2), 0.5), torch.zeros(5).long()
OF_LABELS = [metrics.scores, metrics.nll, metrics.brier, metrics.ece, metrics.adaptive_ece, metrics.reliability]


@pytest.mark.parametrize(
    ("probs", "labels", "said"),
    [
        (torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), ZEROS, "apply softmax to logits"),
        (HALVES, torch.zeros(4).long(), r"not \(5, 2\) and \(4,\)"),
        (HALVES, torch.full((5,), 2), "label 2 is out of range"),
        (HALVES, torch.full((5,), 0.5), "labels must be integers, not torch.float32"),
        (HALVES, torch.zeros(5), "labels must be integers, not torch.float32"),
        (HALVES, torch.full((5,), 1j), "labels must be integers, not torch.complex64"),
        (HALVES, [0] * 5, "labels must be a tensor, not list"),
        (HALVES.numpy(), ZEROS, "probs must be a tensor, not ndarray"),
        (HALVES.to_sparse(), ZEROS, "probs must be a dense tensor with values"),
        (HALVES, ZEROS.to("meta"), "labels must be a dense tensor with values"),
        (HALVES + 0j, ZEROS, "probs must be real and finite"),
        (HALVES.where(torch.arange(2) > 0, math.nan), ZEROS, "probs must be real and finite: there are NaN"),
        (torch.ones(5, 1), ZEROS, "at least two classes, not 1"),
        (torch.zeros(0, 2), torch.zeros(0).long(), r"\(0, 2\)"),
        (torch.tensor(0.5), torch.tensor(0), r"\(\) and \(\)"),
    ],
)
@pytest.mark.parametrize("metric", OF_LABELS)
def test_what_is_no_prediction_is_refused_in_a_sentence(metric: Any, probs: Any, labels: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        metric(probs, labels)


@pytest.mark.parametrize("bins", [0, -1, 2.5, None, "15", True, 10**12])
@pytest.mark.parametrize("metric", [metrics.scores, metrics.ece, metrics.adaptive_ece, metrics.reliability])
def test_bins_are_a_whole_number(metric: Any, bins: Any) -> None:
    with pytest.raises(ValueError, match="bins must be"):
        metric(HALVES, ZEROS, bins)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int8, torch.int32])
def test_labels_may_be_of_any_integer_type(kind: torch.dtype) -> None:
    probs, labels = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.7, 0.3]]), torch.tensor([0, 1, 1])
    assert metrics.scores(probs, labels.to(kind)) == metrics.scores(probs, labels)


@pytest.mark.parametrize(
    ("uncertainty", "positive", "said"),
    [
        (torch.tensor([0.1, math.nan]), torch.tensor([True, False]), "uncertainty must be real numbers: NaN"),
        (torch.tensor([0.1, math.nan]), torch.tensor([True, True]), "uncertainty must be real numbers: NaN"),
        (torch.tensor([0.1, 1j]), torch.tensor([True, False]), "uncertainty must be real numbers"),
        (torch.tensor([0.1, 0.2]), torch.tensor([1, 0]), "positive must be booleans, .* not torch.int64"),
        (torch.tensor([0.1, 0.2]), torch.tensor([0.5, 0.0]), "positive must be booleans, .* not torch.float32"),
        (torch.tensor([0.1, 0.2]), torch.tensor([True]), r"not \(2,\) and \(1,\)"),
        (torch.empty(0), torch.empty(0, dtype=torch.bool), r"not be empty, not \(0,\) and \(0,\)"),
        (
            torch.tensor([0.1, 0.2]).to("meta"),
            torch.tensor([True, False]),
            "uncertainty must be a dense tensor with values",
        ),
        ([0.1, 0.2], torch.tensor([True, False]), "uncertainty must be a tensor, not list"),
        (torch.tensor([0.1, 0.2]), [True, False], "positive must be a tensor, not list"),
    ],
)
def test_doubt_that_ranks_nothing_is_refused_in_a_sentence(uncertainty: Any, positive: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        metrics.auroc(uncertainty, positive)


def test_infinite_doubt_has_a_rank() -> None:
    uncertainty = torch.tensor([math.inf, 0.0, -math.inf, 1.0])
    assert metrics.auroc(uncertainty, torch.tensor([True, False, False, True])) == 1.0
