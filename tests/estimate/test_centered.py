import math
from itertools import chain

import pytest
import torch
from loops import seeded

from twinboot.estimate.centered import around, in_parts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_mean_becomes_the_center_and_differences_stay(dtype: torch.dtype) -> None:
    draws = torch.randn(7, 5, 3, generator=seeded(0)).to(dtype)
    center = 10 * torch.randn(5, 3, generator=seeded(1)).to(dtype)
    found = around(draws, center, "regression")
    torch.testing.assert_close(found.mean(0), center.to(found.dtype))
    torch.testing.assert_close(found - found[0], (draws - draws[0].to(found.dtype)).to(found.dtype), atol=1e-5, rtol=0)


def test_what_is_infinite_stays_and_does_not_move_the_rest() -> None:
    draws = torch.tensor([[1.0, -math.inf, -math.inf], [3.0, 2.0, -math.inf]])
    center = torch.tensor([5.0, 7.0, -math.inf])
    assert around(draws, center, "classification").tolist() == [[4.0, -math.inf, -math.inf], [6.0, 7.0, -math.inf]]


def test_the_lowest_number_does_not_overflow() -> None:
    lowest = torch.finfo(torch.float32).min
    found = around(torch.full((8, 1), lowest), torch.tensor([lowest]), "classification")
    assert found.flatten().tolist() == [lowest] * 8


def test_values_may_be_as_far_apart_as_they_like() -> None:
    draws = torch.tensor([[1e6], [3e6]])
    assert around(draws, torch.tensor([5e6]), "regression").flatten().tolist() == [4e6, 6e6]


@pytest.mark.parametrize(
    ("sizes", "lengths"), [([5], [1]), ([1, 1, 1, 1], [4]), ([3, 3, 3], [2, 1]), ([9, 1, 9], [1, 1, 1])]
)
def test_parts_are_consecutive_and_small(sizes: list[int], lengths: list[int]) -> None:
    found = [sizes[part] for part in in_parts(sizes, 6)]
    assert list(chain(*found)) == sizes
    assert [len(part) for part in found] == lengths
