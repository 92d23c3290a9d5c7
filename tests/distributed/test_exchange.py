from typing import Any
from unittest import mock

import pytest
import torch
from loops import assert_same_bits, seeded
from processes import together
from torch import Tensor, distributed

from twinboot.distributed import exchange


def tensors(rank: int) -> list[Tensor]:
    """Several dtypes and orders of memory, a number without dimensions and one that is not finite."""
    generator = seeded(rank)
    made = [torch.randn(s, generator=generator) for s in ((3, 4), (), (2, 3, 4, 5), (7,), (30,), (2,))]
    made[2] = made[2].to(memory_format=torch.channels_last)
    made[3] = made[3].bfloat16()
    made[5][rank % 2] = -torch.inf
    made.append(torch.randn(6, 8, generator=generator)[::2, ::3])  # not contiguous
    return [*made, torch.randn(2, 1, generator=generator).expand(2, 3)]  # entries that share their memory


def gathered(bucket: int) -> list[Any]:
    rank = distributed.get_rank()
    own, group = tensors(rank), distributed.group.WORLD
    assert group is not None
    with mock.patch.object(exchange, "AT_ONCE", bucket):
        found = list(exchange.gather_each(own, group))
    assert all(copies[rank] is t for copies, t in zip(found, own, strict=True))
    assert all(copy.stride() == found[2][rank].stride() for copy in found[2])  # sums then have the same order
    same = [exchange.same_everywhere(n, [group], torch.device("cpu")) for n in (5, rank)]
    for t in (others := tensors(rank)):
        exchange.copy_first_(t, group)
    return [found, same, others]


@pytest.mark.parametrize("bucket", [1, 20, 10**6])
def test_all_ranks_have_the_tensors_of_all_bit_for_bit_in_buckets_of_any_size(bucket: int) -> None:
    of_ranks = [tensors(rank) for rank in range(3)]
    for found, same, copied in together(gathered, bucket, ranks=3):
        assert_same_bits(found, [list(copies) for copies in zip(*of_ranks, strict=True)])
        assert same == [True, False]
        assert_same_bits(copied, of_ranks[0])
