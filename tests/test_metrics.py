import math

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
    doubt = torch.randn(60, generator=generator).round(decimals=1)  # with ties
    positive = torch.rand(60, generator=generator) < 0.3
    pairs = doubt[positive][:, None] - doubt[~positive]
    expected = ((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean().item()
    for values in (doubt, 1e6 * doubt, doubt.exp()):
        assert metrics.auroc(values, positive) == pytest.approx(expected, abs=1e-6)
    assert math.isnan(metrics.auroc(doubt, torch.zeros(60, dtype=torch.bool)))


def test_a_reliability_diagram_adds_up_to_the_calibration_error() -> None:
    probs, labels = calibrated(3000, sharpness=2.0)
    found = metrics.reliability(probs, labels)
    assert found.share.sum().item() == pytest.approx(1)
    gaps = (found.share * (found.confidence - found.accuracy).abs()).nansum().item()
    assert gaps == pytest.approx(metrics.ece(probs, labels), abs=1e-4)
    assert found.confidence.isnan().equal(found.share == 0)


@pytest.mark.parametrize(
    ("probs", "labels", "said"),
    [
        (torch.randn(5, 3), torch.zeros(5).long(), "give no logits"),
        (torch.full((5, 2), 0.5), torch.zeros(4).long(), r"not \(5, 2\) and \(4,\)"),
        (torch.full((5, 2), 0.5), torch.full((5,), 2), "between 0 and 1"),
        (torch.zeros(0, 2), torch.zeros(0).long(), r"\(0, 2\)"),
    ],
)
def test_what_is_no_prediction_is_refused_in_a_sentence(probs: Tensor, labels: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        metrics.scores(probs, labels)
