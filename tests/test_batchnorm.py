"""Statistics are taken anew, over all batches alike, and nothing else about the layers changes."""

from typing import Any

import pytest
import torch
from loops import assert_same_bits, seeded, snapshot
from torch import nn

from twinboot.batchnorm import fresh_statistics, layers


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


def test_each_batch_counts_the_same_and_frozen_layers_keep_what_they_have() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4, momentum=0.3), Frozen(4))
    assert layers(module) == [module[0], module[1]]
    batches = torch.randn(3, 8, 4, generator=seeded(0))
    for _ in range(2):  # what was there before does not matter
        before = snapshot(module[1])
        with fresh_statistics(module):
            for batch in batches:
                module(batch)
        torch.testing.assert_close(module[0].running_mean, batches.mean((0, 1)))
        torch.testing.assert_close(module[0].running_var, batches.var(1).mean(0))
        assert_same_bits(snapshot(module[1]), before)
        assert module[0].momentum == 0.3


def test_an_error_on_the_way_leaves_momentum_and_evaluation() -> None:
    module = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="expected 2D"), fresh_statistics(module):
        module(torch.zeros(4))
    assert module.momentum == 0.1
    assert not module.training
