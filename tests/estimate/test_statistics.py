"""Statistics are the mean over all batches, and nothing else about the layers changes."""

from typing import Any

import pytest
import torch
from loops import assert_same_bits, seeded, snapshot
from torch import nn
from torch.utils.data import TensorDataset

from twinboot import fit
from twinboot.estimate.statistics import norm_layers, refill_statistics


def run(module: nn.Module, batch: Any, number: int) -> None:
    module(batch)


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


def test_each_batch_counts_the_same_and_frozen_layers_keep_what_they_have() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4, momentum=0.3), Frozen(4))
    assert norm_layers(module) == [module[0], module[1]]
    batches = torch.randn(3, 8, 4, generator=seeded(0))
    for _ in range(2):  # what was there before does not matter
        before = snapshot(module[1])
        refill_statistics(module, batches, run)
        torch.testing.assert_close(module[0].running_mean, batches.mean((0, 1)))
        torch.testing.assert_close(module[0].running_var, batches.var(1).mean(0))
        assert_same_bits(snapshot(module[1]), before)
        assert module[0].momentum == 0.3


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_that_keeps_statistics_gets_its_own_too(affine: bool) -> None:
    module = nn.Sequential(
        nn.InstanceNorm1d(4, momentum=0.3, affine=affine, track_running_stats=True), nn.InstanceNorm1d(4)
    )
    assert norm_layers(module) == [module[0]]  # the other one has none to keep
    batches = 3 + 2 * torch.randn(3, 8, 4, 50, generator=seeded(0))
    for _ in range(2):
        refill_statistics(module, batches, run)
        torch.testing.assert_close(module[0].running_mean, batches.mean((0, 1, 3)))
        torch.testing.assert_close(module[0].running_var, batches.var(3).mean((0, 1)))
        assert module[0].momentum == 0.3
        assert not module[0]._forward_pre_hooks


def test_a_layer_that_runs_twice_in_a_batch_has_the_mean_over_all_runs() -> None:
    layer, batches = nn.BatchNorm1d(4), torch.randn(6, 8, 4, generator=seeded(0))
    refill_statistics(nn.ModuleList([layer]), batches.view(3, 2, 8, 4), lambda _, pair, __: [layer(x) for x in pair])
    torch.testing.assert_close(layer.running_mean, batches.mean((0, 1)))


def test_twins_with_instance_norm_predict_as_well_as_plain_training() -> None:
    """Signals whose classes differ in shape, with an offset that only the running statistics know."""
    generator = seeded(0)
    labels = torch.arange(400) % 2
    waves = torch.linspace(0, 12, 40).sin() * (2 * labels[:, None] - 1)
    x = 5 + 0.5 * waves[:, None] + torch.randn(400, 1, 40, generator=generator)
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=True)
    model = nn.Sequential(norm, nn.Conv1d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    found = fit(model, TensorDataset(x, labels), epochs=8, progress=False)
    running = found.estimate.module[0].running_mean
    assert running.item() == pytest.approx(5, abs=0.1)
    assert max(found.history["accuracy"]) > 0.95


def test_an_error_on_the_way_leaves_momentum_and_evaluation() -> None:
    module = nn.BatchNorm1d(4)
    for batches, said in (([torch.zeros(4)], "expected 2D"), ([], "the loader gave no batch")):
        with pytest.raises(ValueError, match=said):
            refill_statistics(module, batches, run)
        assert module.momentum == 0.1
        assert not module.training
        assert not module._forward_pre_hooks
