"""Losses with one value for each sample, against their closed forms."""

import math

import pytest
import torch

from twinboot.training.losses import loss_function


def test_each_name_gives_its_closed_form() -> None:
    logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    expected = torch.tensor([math.log(1 + math.exp(-2)), math.log(1 + math.e)])
    torch.testing.assert_close(loss_function("classification")(logits, labels), expected)
    values, target = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [3.0, 1.0]])
    torch.testing.assert_close(loss_function("regression")(values, target), torch.tensor([2.0, 5.0]))
    heads = torch.tensor([[1.0, math.log(4.0)]])
    normal = torch.distributions.Normal(1.0, 2.0)
    torch.testing.assert_close(
        loss_function("gaussian")(heads, torch.tensor([3.0])), -normal.log_prob(torch.tensor([3.0]))
    )


def test_a_target_without_the_last_axis_is_not_broadcast_into_a_square() -> None:
    values = torch.tensor([[1.0], [2.0], [3.0]])
    torch.testing.assert_close(
        loss_function("regression")(values, torch.tensor([1.0, 2.0, 5.0])), torch.tensor([0.0, 0.0, 4.0])
    )
    with pytest.raises(ValueError, match=r"targets have shape \(2,\), but the model gives \(3, 1\)"):
        loss_function("regression")(values, torch.zeros(2))


@pytest.mark.parametrize(
    ("loss", "output", "target", "said"),
    [
        ("classification", torch.zeros(2, 3), torch.tensor([0, 3]), "label 3 is out of range: the model has 3 classes"),
        ("classification", torch.zeros(2, 1), torch.tensor([0, 1]), r"one output; use two outputs \(logits\) for two"),
        ("classification", torch.zeros(2, 3), torch.tensor([-1, 0]), "label -1 is out of range"),
        ("classification", torch.zeros(2, 3), torch.zeros(2), "labels must be integers"),
        ("classification", torch.zeros(2), torch.tensor([0, 1]), "needs logits"),
        ("classification", torch.zeros(2, 3), torch.tensor([[0], [1]]), r"labels have shape \(2, 1\)"),
        ("classification", (torch.zeros(2, 3),), torch.tensor([0, 1]), "must give a tensor, not tuple"),
        ("gaussian", torch.zeros(2, 3), torch.zeros(2), "a mean and a log-variance for each value"),
        ("classification", torch.zeros(2, 3), torch.tensor([0j, 1]), "labels must be integers, not torch.complex64"),
        ("classification", torch.zeros(2, 3) + 0j, torch.tensor([0, 1]), "real floating-point values, not torch.compl"),
        ("classification", torch.zeros(2, 3), [0, 1], "labels must be a tensor, not list"),
        ("classification", torch.zeros(0, 3), torch.zeros(0).long(), "the batch is empty"),
        ("classification", torch.zeros(0, 3), torch.zeros(2).long(), r"at least one sample, not .* shape \(0, 3\)"),
        ("regression", torch.zeros(2, 1), torch.tensor([1j, 1]), "the target must be real numbers, not complex ones"),
        (
            "regression",
            torch.zeros(2, 1) + 0j,
            torch.tensor([1j, 1]),
            "real floating-point values, not torch.complex64",
        ),
        ("regression", torch.zeros(2, 1).long(), torch.zeros(2), "real floating-point values, not torch.int64"),
        ("regression", torch.zeros(2, 1), [0.0, 1.0], "the target must be a tensor, not list"),
        ("regression", torch.zeros(2, 1), None, "the target must be a tensor with one entry for each sample, not None"),
        ("regression", torch.tensor(0.0), torch.tensor(0.0), "one entry for each sample, not tensor"),
        ("regression", None, torch.zeros(2), "the model must give a tensor, not NoneType"),
        ("regression", torch.zeros(0, 1), torch.zeros(0), "the batch is empty"),
        ("regression", torch.zeros(2, 0), torch.zeros(2, 0), r"at least one sample, not .* shape \(2, 0\)"),
        ("gaussian", torch.zeros(2, 2), torch.tensor([1j, 1]), "the target must be real numbers, not complex ones"),
        ("gaussian", torch.zeros(2, 2), [0.0, 1.0], "the target must be a tensor, not list"),
        ("gaussian", torch.zeros(0, 2), torch.zeros(0), "the batch is empty"),
        (lambda output, target: output, torch.zeros(0), torch.zeros(0), "the batch is empty"),
        (lambda output, target: output, torch.zeros(2), 3, "one entry for each sample, not 3"),
        (lambda output, target: output + 1j, torch.zeros(2), torch.zeros(2), "the loss must give real floating-point"),
        (lambda output, target: output > 0, torch.zeros(2), torch.zeros(2), "the loss must give real floating-point"),
        (torch.nn.CrossEntropyLoss(), torch.zeros(2, 3), torch.tensor([0, 1]), 'PyTorch do so with reduction="none"'),
        (lambda output, target: output.mean(), torch.zeros(2, 3), torch.zeros(2), "one value for each of 2 samples"),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence(loss: object, output: object, target: object, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        loss_function(loss)(output, target)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", ["mse", None, 3])
def test_an_unknown_loss_is_refused_with_the_names_there_are(loss: object) -> None:
    with pytest.raises(ValueError, match='use "classification", "regression" or "gaussian", or a function'):
        loss_function(loss)  # type: ignore[arg-type]


def test_half_precision_outputs_are_compared_in_single_precision() -> None:
    half = torch.tensor([[1001.0], [300.0]]).half()
    torch.testing.assert_close(loss_function("regression")(half, torch.tensor([1003.0, 0.0])), torch.tensor([4.0, 9e4]))
