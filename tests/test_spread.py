"""Sigma squared is the sample variance of the copies, pooled over a group, however the weights come."""

import pytest
import torch
from loops import assert_same_bits, mlp, seeded

from twinboot.partition import Partition
from twinboot.spread import apart, variance


@pytest.mark.parametrize("copies", [2, 3, 5])
@pytest.mark.parametrize("groups", ["layer", "tensor", "unit"])
def test_it_is_the_sample_variance_of_the_copies_at_once_and_one_by_one(copies: int, groups: str) -> None:
    model = mlp()
    partition = Partition.of(model, groups)
    generator = seeded(4)
    weights = [[torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(copies)]
    found = variance(partition, copies, [(range(len(weights[0])), weights)])
    spreads = [torch.stack(same).var(0) for same in zip(*weights, strict=True)]
    expected, sizes = torch.zeros_like(found), partition.sizes
    for owners, spread in zip(partition.expand(spreads, of=torch.arange(len(found))), spreads, strict=True):
        expected.index_add_(0, owners.expand_as(spread).flatten(), spread.flatten())
    torch.testing.assert_close(found, expected / sizes)
    parts = (([i], [[copy[i]] for copy in weights]) for i in range(len(weights[0])))
    assert_same_bits(variance(partition, copies, parts), found)


def test_copies_are_apart_where_any_of_them_differs() -> None:
    copies = [torch.zeros(4) for _ in range(3)]
    copies[1][1] = 1.0
    copies[2][3] = -1e-30
    assert apart(copies).tolist() == [False, True, False, True]
    half = [c.bfloat16() for c in copies]
    assert apart(half).tolist() is True
    assert apart(half[:1] * 2).tolist() is False
