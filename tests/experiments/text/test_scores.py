import math

import pytest
import torch

from twinboot import metrics
from twinboot.experiments.text.cost import Cost
from twinboot.experiments.text.methods import Found
from twinboot.experiments.text.scores import area_under_risk, scores, set_size


def test_area_under_the_risk_is_0_without_errors_and_1_where_all_is_wrong() -> None:
    doubt = torch.rand(7)
    assert area_under_risk(doubt, torch.zeros(7, dtype=torch.bool)) == 0
    assert area_under_risk(doubt, torch.ones(7, dtype=torch.bool)) == 1


def test_area_under_the_risk_is_least_if_the_errors_are_the_most_doubtful() -> None:
    wrong = torch.tensor([True, False, False, True])
    best = area_under_risk(wrong.double(), wrong)
    assert best == pytest.approx((0 + 0 + 1 / 3 + 2 / 4) / 4)
    assert area_under_risk(-wrong.double(), wrong) == pytest.approx((1 + 1 + 2 / 3 + 2 / 4) / 4)


def test_sets_hold_the_right_class_as_often_as_they_should() -> None:
    """Labels drawn from the probabilities themselves: the share is binomial, 0.9 and a little more."""
    generator = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(4000, 5, generator=generator)).softmax(1)
    size, held = set_size(probs, probs.multinomial(1, generator=generator).squeeze(1))
    assert abs(held - 0.9) < 4 * math.sqrt(2 * 0.9 * 0.1 / 2000)  # of the queries, and of those that calibrate
    assert 1 < size < 5


def test_confident_and_right_predictions_have_sets_of_one_class() -> None:
    labels = torch.arange(100) % 4
    probs = torch.nn.functional.one_hot(labels, 4).double() * 0.9 + 0.025
    assert set_size(probs, labels) == (1.0, 1.0)


def test_only_queries_with_an_intent_count_for_accuracy_and_only_the_others_are_out_of_scope() -> None:
    labels = torch.tensor([0, 1, 0, 1] * 5)
    known = torch.tensor([[0.9, 0.1], [0.2, 0.8]] * 10)
    found = Found(torch.cat([known, torch.full((10, 2), 0.5)]), cost=Cost(1.0), information=torch.arange(30.0))
    rows = scores(found, labels)
    assert rows["accuracy"] == rows["answered"] == rows["ood_entropy"] == rows["ood_information"] == 1
    assert rows["aurc"] == 0
    assert rows["nll"] == pytest.approx(metrics.nll(known, labels))
    assert "ood_information" not in scores(Found(found.probs, 1.0), labels)


def test_accuracy_of_the_answered_leaves_out_the_most_doubtful_fifth() -> None:
    labels = torch.zeros(10, dtype=torch.long)
    probs = torch.tensor([[0.9, 0.1]] * 8 + [[0.4, 0.6]] * 2 + [[0.5, 0.5]])
    assert scores(Found(probs, 1.0), labels)["answered"] == 1
    assert scores(Found(probs, 1.0), labels)["accuracy"] == pytest.approx(0.8)
