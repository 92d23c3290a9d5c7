import copy
import math

import pytest
import torch
from torch import Tensor, nn

from twinboot import Estimate, Twins
from twinboot.averaging import Average


def estimate(value: float) -> Estimate:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return Twins(model).estimate()


def averaged(power: float, values: list[float]) -> float:
    average, found = Average(power), math.nan
    for value in values:
        found = average.add(estimate(value)).module.bias.item()
    return found


def test_without_a_power_all_weigh_alike_and_with_infinity_only_the_last_does() -> None:
    assert averaged(0, [1.0, 2.0, 6.0]) == pytest.approx(3.0)
    assert averaged(math.inf, [1.0, 2.0, 6.0]) == 6.0


@pytest.mark.parametrize("power", [1, 3])
def test_weights_are_rising_products(power: int) -> None:
    # The recurrence in closed form: number s weighs s (s + 1) ... (s + power - 1), about s^power.
    values = [3.0, -1.0, 4.0, 1.0, -5.0]
    weights = [math.prod(range(s, s + power)) for s in range(1, 6)]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert averaged(power, values) == pytest.approx(expected)


def test_a_walk_is_averaged_out() -> None:
    # Of independent means with variance 1, t of them with weights s^p, it is about (p + 1)^2 / (2 p + 1) / t.
    generator, t, power = torch.Generator().manual_seed(0), 50, 3.0
    average, model = Average(power), nn.Linear(100, 100)
    for _ in range(t):
        found: Tensor = torch.empty(0)
        with torch.no_grad():
            model.weight.copy_(torch.randn(100, 100, generator=generator))
        found = average.add(Twins(model).estimate()).module.weight
    assert found.var().item() == pytest.approx((power + 1) ** 2 / (2 * power + 1) / t, rel=0.1)


def test_a_state_goes_on_where_it_was() -> None:
    average = Average(3.0)
    average.add(estimate(1.0))
    average.add(estimate(2.0))
    again = Average(3.0)
    again.load_state_dict(copy.deepcopy(average.state_dict()))
    assert again.add(estimate(5.0)).module.bias.item() == average.add(estimate(5.0)).module.bias.item()


def test_a_power_below_zero_is_refused() -> None:
    for power in (-1.0, math.nan):
        with pytest.raises(ValueError, match="at least 0"):
            Average(power)
