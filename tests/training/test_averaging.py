import copy
import math

import pytest
import torch

from twinboot.training.averaging import Average


def averaged(power: float, values: list[float]) -> float:
    average, weight = Average(power), torch.zeros(2, 3)
    for value in values:
        average.take([weight.fill_(value)])
    assert (weight == weight[0, 0]).all()
    return weight[0, 0].item()


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
    average, weight = Average(power), torch.empty(100, 100)
    for _ in range(t):
        average.take([weight.normal_(generator=generator)])
    assert weight.var().item() == pytest.approx((power + 1) ** 2 / (2 * power + 1) / t, rel=0.1)


def test_half_precision_is_averaged_in_single_precision() -> None:
    average, weight = Average(0.0), torch.empty(1, dtype=torch.bfloat16)
    for value in (1.0, 1.0078125, 1.015625):  # neighbours in that precision
        average.take([weight.fill_(value)])
    assert average.weights[0].item() == pytest.approx(1.0078125, abs=1e-6)


def test_a_state_goes_on_where_it_was() -> None:
    average = Average(3.0)
    for value in (1.0, 2.0):
        average.take([torch.tensor([value])])
    again = Average(3.0)
    again.load_state_dict(copy.deepcopy(average.state_dict()))
    here, there = torch.tensor([5.0]), torch.tensor([5.0])
    average.take([here])
    again.take([there])
    assert torch.equal(here, there)


def test_a_power_below_zero_is_refused() -> None:
    for power in (-1.0, math.nan):
        with pytest.raises(ValueError, match="at least 0"):
            Average(power)
