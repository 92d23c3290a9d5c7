from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from twinboot.parameters.problem import Problem, logistic, poisson


def data(n: int = 20, k: int = 2) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, k, generator=generator), torch.randn(n, 1, generator=generator))


def test_the_squares_of_the_residuals_of_a_sample_are_its_loss() -> None:
    x, y = torch.randn(20, 3), torch.randn(20, 4)
    problem = Problem(nn.Linear(3, 4), TensorDataset(x, y), "regression")
    torch.testing.assert_close(problem.residuals(problem.start).square().sum(1), problem.losses(problem.start))


def test_a_vector_holds_the_trainable_parameters_in_order_and_the_model_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[1].bias.requires_grad_(False)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    problem = Problem(model, data(), "regression")
    assert problem.size == 2 * 3 + 3 + 3
    assert problem.labels[:2] == ["0.weight[0, 0]", "0.weight[0, 1]"]
    torch.testing.assert_close(problem.tensors(problem.start)["1.weight"], model[1].weight.double())
    problem.losses(problem.start + 1)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert model[0].weight.dtype == torch.float32


def test_batches_of_a_dataset_that_is_no_tensor_dataset_are_collated() -> None:
    x, y = data().tensors
    listed = [(a, b) for a, b in zip(x, y, strict=True)]
    own, other = (Problem(nn.Linear(2, 1), d, "regression", whole=False) for d in (data(), listed))
    for index in (None, torch.tensor([3, 1])):
        for a, b in zip(own.read(index), other.read(index), strict=True):
            torch.testing.assert_close(a, b)


def test_losses_are_those_of_pytorch() -> None:
    logits, labels = torch.randn(9, 1), torch.tensor([0.0, 1.0, 1.0] * 3)
    own = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels, reduction="none")
    torch.testing.assert_close(logistic(logits, labels), own)
    counts = torch.tensor([0.0, 2.0, 5.0] * 3)
    own = nn.functional.poisson_nll_loss(logits[:, 0], counts, reduction="none")
    torch.testing.assert_close(poisson(logits, counts), own)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.requires_grad_(False)


class Root(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) - 100).sqrt()


def spoilt(place: int, value: float, where: str = "y") -> TensorDataset:
    x, y = (t.clone() for t in data().tensors)
    (y if where == "y" else x)[place] = value
    return TensorDataset(x, y)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Problem(Frozen(), data(), "regression"), "no trainable parameters"),
        (lambda: Problem(nn.Linear(2, 1), data(3), "regression"), "3 data cannot determine 3 parameters"),
        (lambda: Problem(nn.Linear(2, 1), spoilt(4, torch.nan), "regression"), "the target of sample 4 is NaN"),
        (lambda: Problem(nn.Linear(2, 1), spoilt(5, torch.inf, "x"), "regression"), "an input of sample 5 is NaN"),
        (
            lambda: Problem(nn.Linear(2, 1), TensorDataset(torch.randn(9, 2), torch.ones(9, 1)), "regression"),
            "all targets are the same",
        ),
        (lambda: Problem(nn.Linear(2, 1), 7, "regression"), "must be map-style"),
        (lambda: Problem(nn.Linear(2, 1), [], "regression"), "the dataset is empty"),
        (lambda: Problem(nn.Linear(2, 1), data().tensors, "regression"), "a tuple of arrays"),
        (lambda: Problem(nn.Linear(2, 1), TensorDataset(torch.randn(9, 2)), "regression"), "an input and a target"),
        (lambda: Problem(nn.Linear(2, 1), data(), "ols"), "unknown loss 'ols'"),  # type: ignore[arg-type]
        (lambda: Problem(nn.Linear(2, 1), data(), nn.MSELoss()), "one value for each of 20 samples"),
        (lambda: Problem(nn.Linear(2, 1), data(), "logistic"), "must lie between 0 and 1"),
        (lambda: Problem(nn.Linear(2, 1), data(), "poisson"), "must not be negative"),
        (lambda: Problem(Root(2, 1), data(), "regression"), "NaN or infinite with the parameters that the model has"),
    ],
)
def test_bad_input_gets_one_sentence(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
