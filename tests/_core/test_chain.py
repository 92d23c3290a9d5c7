from typing import Any

import pytest
import torch
from loops import mlp, seeded
from torch import nn

from twinboot._core.chain import Chain


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def hooked() -> nn.Module:
    model = mlp()
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def patched() -> nn.Module:
    model = mlp()
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)),
        nn.Sequential(nn.Linear(4, 4), nn.PReLU()),
        nn.Sequential(nn.Flatten(0), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Sequential(mlp(), Doubled(3, 3)),
        hooked(),
        patched(),
        nn.Conv2d(1, 1, 1),
    ],
)
def test_what_mixes_entries_or_does_more_than_its_class_is_no_chain(model: nn.Module) -> None:
    assert Chain.of(model, list(model.parameters())) is None


@pytest.mark.parametrize(
    ("model", "inputs", "taken"),
    [
        (mlp(), [torch.zeros(2, 4), torch.zeros(3, 4)], True),
        (mlp(), [torch.zeros(2, 5, 4), torch.zeros(2, 5, 4)], False),
        (nn.Sequential(nn.Flatten(), mlp()), [torch.zeros(2, 2, 2), torch.zeros(2, 2, 2)], True),
        (nn.Sequential(nn.Flatten(), mlp()), [torch.zeros(2, 2, 2), torch.zeros(2, 1, 4)], False),
        (mlp(), [torch.zeros(4), torch.zeros(4)], False),
        (mlp(), [torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.float64)], False),
        (mlp(), [(torch.zeros(2, 4),), torch.zeros(2, 4)], False),
    ],
)
def test_a_chain_takes_batches_of_rows(model: nn.Module, inputs: list[Any], taken: bool) -> None:
    chain = Chain.of(model, list(model.parameters()))
    assert chain is not None
    assert chain.takes(inputs) == taken


def test_each_model_of_the_stack_runs_on_its_own_input() -> None:
    models = [mlp(seed=s) for s in range(3)]
    inputs = [torch.randn(n, 4, generator=seeded(n)) for n in (5, 2, 5)]
    chain = Chain.of(models[0], list(models[0].parameters()))
    assert chain is not None
    weights = [torch.stack(same) for same in zip(*(m.parameters() for m in models), strict=True)]
    torch.testing.assert_close(chain.run(inputs, weights), tuple(m(x) for m, x in zip(models, inputs, strict=True)))


def test_frozen_weights_and_biases_run_as_they_are() -> None:
    from twinboot import Twins

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2))
    for frozen in (model[0].bias, model[2].weight, model[2].bias):
        frozen.requires_grad_(False)
    x = torch.randn(5, 4)
    for output in Twins(model, stacked=True)(x, x):
        torch.testing.assert_close(output, model(x))
