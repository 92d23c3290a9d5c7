from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import assert_same_bits, mlp, seeded
from torch import Tensor, nn

from twinboot import Blocks
from twinboot.partition import Partition

shapes = st.lists(st.lists(st.integers(1, 5), max_size=4).map(tuple), min_size=1, max_size=4)


class Bag(nn.Module):
    """Parameters of any shapes, spread over submodules; some frozen."""

    def __init__(self, shapes: list[tuple[int, ...]], frozen: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for i, shape in enumerate(shapes):
            part = nn.Module()
            part.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i)), i != frozen)
            part.b = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(i)))
            self.parts.append(part)


def by_parity(name: str, parameter: Tensor) -> tuple[str, Tensor] | str:
    if parameter.numel() < 2:
        return "single"
    return "parity", (torch.arange(parameter.numel()) % 2).view(parameter.shape)


def blocks_where_possible(name: str, parameter: Tensor) -> Any:
    return Blocks((2, 2))(name, parameter) if parameter.ndim >= 2 else name


groupings = st.sampled_from(["layer", "tensor", "unit", by_parity, blocks_where_possible])


@settings(deadline=None)
@given(shapes, st.integers(0, 4), groupings)
def test_every_entry_lies_in_exactly_one_group(shapes: list[tuple[int, ...]], frozen: int, grouping: Any) -> None:
    model = Bag(shapes, frozen)
    partition = Partition.of(model, grouping)
    parameters = [p.detach() for p in model.parameters() if p.requires_grad]
    # Give each sigma its own place as its value: then each entry reads the place that it belongs to.
    partition.sigma.copy_(torch.arange(len(partition.sizes)))
    read = zip(partition.expand(parameters), parameters, strict=True)
    owner = torch.cat([t.expand_as(p).flatten() for t, p in read]).long()
    assert len(owner) == sum(p.numel() for p in parameters)
    assert torch.equal(torch.bincount(owner, minlength=len(partition.sizes)), partition.sizes)
    assert sum(part.numel() for part in partition.named(partition.sizes).values()) == len(partition.sizes)
    # And the squares of each entry are summed where it reads its sigma.
    squares = torch.cat([p.flatten() for p in parameters]).double().square()
    expected = torch.zeros(len(partition.sizes), dtype=torch.float64).index_add_(0, owner, squares)
    torch.testing.assert_close(partition.sum_of_squares(parameters).double(), expected, rtol=1e-5, atol=0)


@settings(deadline=None)
@given(shapes, groupings)
def test_a_partition_survives_being_described(shapes: list[tuple[int, ...]], grouping: Any) -> None:
    partition = Partition.of(Bag(shapes, frozen=-1), grouping)
    again = Partition.restore(partition.describe(), partition.labels(), partition.sigma)
    assert again.describe() == partition.describe()
    assert torch.equal(again.sizes, partition.sizes)


def test_sums_of_half_precision_are_taken_in_float32() -> None:
    model = nn.Linear(100, 100, bias=False)
    partition = Partition.of(model, "layer")
    deviations = [torch.full((100, 100), 0.01, dtype=torch.bfloat16)]
    exact = 10_000 * float(deviations[0][0, 0]) ** 2
    assert abs(float(partition.sum_of_squares(deviations)) / exact - 1) < 1e-5
    assert Partition.of(model.double(), "layer").sum_of_squares([torch.ones(100, 100)]).dtype == torch.float64


def test_each_parameter_gets_its_sigma_on_its_own_device() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    for grouping in ("layer", "unit"):
        partition = Partition.of(model, grouping)
        like = [p.detach().to("meta") if i % 2 else p.detach() for i, p in enumerate(model.parameters())]
        assert [s.device for s in partition.expand(like)] == [p.device for p in like]


@pytest.mark.parametrize("groups", ["layer", "unit"])
def test_parameters_one_after_another_add_up_to_the_sum_of_all_bit_for_bit(groups: str) -> None:
    partition = Partition.of(mlp(), groups)
    deviations = [torch.randn(s, generator=seeded(i)) for i, s in enumerate(partition.parameter_shapes.values())]
    total = torch.zeros_like(partition.sigma)
    for i, deviation in enumerate(deviations):
        partition.add_squares_(total, [i], [deviation], [deviation])
    assert_same_bits(total, partition.sum_of_squares(deviations))


def test_it_says_how_many_groups_there_are_and_sigma_once_it_is_known() -> None:
    partition = Partition.of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), "unit")
    assert repr(partition) == "Partition(groups=2)"
    partition.sigma.copy_(torch.linspace(0.25, 1, len(partition.sigma)))
    assert repr(partition) == "Partition(groups=2, sigma=0.25 to 1)"
    assert repr(partition.to("meta")) == "Partition(groups=2)"
