"""Degrees of freedom of predictions, for linear models, where they are known."""

import math
from typing import Any

import pytest
import torch
from loops import mlp, seeded
from torch import Tensor, nn

from twinboot import Bootstrap, Estimate, Twins
from twinboot.estimate import degrees
from twinboot.estimate.student import satterthwaite


def settled(model: nn.Module, groups: Any, replicas: int = 2) -> Estimate:
    """The estimate of twins that differ at random."""
    twins = Twins(model, replicas, groups)
    generator = seeded(1)
    with torch.no_grad():
        for p in twins.parameters():
            p.add_(torch.randn(p.shape, generator=generator))
    twins.update()
    return twins.estimate()


def of(estimate: Estimate, x: Any, task: Any = "regression") -> Tensor:
    chunks = [lambda: x if isinstance(x, dict) else (x,)]
    return degrees.of_predictions(estimate.module, task, chunks, estimate.partition, estimate._df())


def test_each_sigma_has_a_degree_of_freedom_for_each_weight_and_twin_but_one() -> None:
    estimate = settled(mlp(), "layer", replicas=3)
    assert {name: df.item() for name, df in estimate.df.items()} == {"0": 2 * (4 * 8 + 8), "2": 2 * (8 * 3 + 3)}
    estimate.df_per_weight = None
    assert all(df == math.inf for df in estimate.df.values())


@pytest.mark.parametrize("task", ["regression", "gaussian"])
def test_a_linear_model_has_those_of_its_weights_and_inputs(task: str) -> None:
    estimate = settled(nn.Linear(3, 2), "weight")
    x = torch.randn(5, 3, generator=seeded(0))
    weight, bias = (estimate.sigma[name] for name in ("weight", "bias"))
    expected = torch.stack(
        [
            satterthwaite(torch.cat([x**2 * weight[row] ** 2, (bias[row] ** 2).expand(5, 1)], 1), torch.ones(4))
            for row in range(2)
        ],
        1,
    )
    torch.testing.assert_close(of(estimate, x, task), expected[:, : 1 if task == "gaussian" else 2])
    assert (expected > 1.05).any()


def test_one_group_has_those_of_its_sigma() -> None:
    estimate = settled(nn.Linear(3, 1), "layer")
    torch.testing.assert_close(of(estimate, torch.randn(5, 3)), torch.full((5, 1), 4.0))


def test_weights_that_carry_no_noise_do_not_count() -> None:
    table = settled(nn.Embedding(4, 2, padding_idx=0), "weight")
    assert of(table, torch.tensor([0, 1])).tolist() == [[math.inf] * 2, [1.0] * 2]


def test_derivatives_are_taken_a_few_inputs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate, x = settled(mlp(), "unit"), torch.randn(7, 4, generator=seeded(0))
    whole = of(estimate, x)
    monkeypatch.setattr(degrees, "AT_ONCE", 2 * degrees.FEW_VALUES * 67)
    torch.testing.assert_close(of(estimate, x), whole)
    assert whole.shape == (7, 3)


class Named(nn.Linear):
    def forward(self, values: Tensor, factor: Tensor, switch: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(values * factor[:, None]) * switch


def test_arguments_by_name_of_one_number_for_each_input_and_of_one_for_all() -> None:
    estimate = settled(Named(3, 1), "weight")
    values, factor = torch.randn(5, 3, generator=seeded(0)), torch.arange(1.0, 6.0)
    found = of(estimate, {"values": values, "factor": factor, "switch": torch.tensor(2.0)})
    plain = nn.Linear(3, 1)
    plain.load_state_dict(estimate.module.state_dict())
    other = Estimate(plain, estimate.partition)
    other.df_per_weight = 1
    torch.testing.assert_close(found, of(other, values * factor[:, None]))


class Awkward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if float(x.sum()) else 0)  # a number from a tensor: vmap refuses


def test_models_without_derivatives_are_treated_as_if_all_weights_counted_alike() -> None:
    estimate = settled(Awkward(3, 1), "weight")
    sigma = torch.cat([s.flatten() for s in estimate.sigma.values()])
    torch.testing.assert_close(of(estimate, torch.randn(5, 3)), satterthwaite(sigma**2, torch.ones(4)))
    wide = settled(nn.Linear(1, degrees.FEW_VALUES + 1), "tensor")
    assert of(wide, torch.randn(5, 1)).ndim == 0


def test_large_groups_need_no_derivatives() -> None:
    estimate = settled(nn.Sequential(Awkward(120, 5), Awkward(5, 40)), "layer")
    assert of(estimate, torch.randn(5, 120)).item() == 5 * 40 + 40


@pytest.mark.parametrize(
    ("inputs", "groups"), [(1, "layer"), (3, "layer"), (10, "layer"), (3, "weight"), (10, "weight")]
)
def test_intervals_of_a_regression_hold_the_expected_value(inputs: int, groups: str) -> None:
    """Twins are the least-squares fits of two bootstrap samples. The coverage is a mean over inputs, so its variance is
    at most that of one input for each data set. Satterthwaite's intervals may be 4 points too wide."""
    sets, n, level, covered = 200, 120, 0.9, 0.0
    generator = seeded(0)
    twins = Twins(nn.Linear(inputs, 1, bias=False), groups=groups)
    for seed in range(sets):
        true = torch.randn(inputs, 1, generator=generator)
        x, new = (torch.randn(rows, inputs, generator=generator) for rows in (n, 16))
        y = x @ true + torch.randn(n, 1, generator=generator)
        with torch.no_grad():
            for b, twin in enumerate(twins):
                rows = Bootstrap(n, seed=seed).indices(b)
                twin.weight.copy_(torch.linalg.lstsq(x[rows], y[rows]).solution.T)
        twins.update()
        estimate = twins.estimate()
        with torch.no_grad():  # the fit of all data, whose variance sigma^2 is
            estimate.module.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
        low, high = estimate.predict(new, task="regression", seed=seed).interval(level)
        covered += ((low <= new @ true) & (new @ true <= high)).float().mean().item() / sets
    width = 4 * math.sqrt(level * (1 - level) / sets)
    assert level - width < covered < level + 0.04 + width
