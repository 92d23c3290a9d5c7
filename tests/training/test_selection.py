"""The epoch that is kept: the one whose estimate predicts unseen samples best, or the last where there are none."""

import math
from typing import Any

import pytest
import torch
from loops import assert_same_bits, classes, mlp
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, fit
from twinboot.training.averaging import Average
from twinboot.training.epoch import Training
from twinboot.training.selection import Best


def training(cover: bool = False) -> Training:
    bootstrap = Bootstrap(60, cover=cover)
    options: dict[str, Any] = {"batch_size": 8, "groups": "layer", "resample": "counts", "seed": 0}
    return Training(mlp(), classes(60), "classification", bootstrap=bootstrap, **options)


def looks(best: Best, losses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """After each epoch the weights are another number, and the unseen loss is as given."""
    for epoch, loss in enumerate(losses, start=1):
        for p in best.run.twins.parameters():
            p.data.fill_(epoch)
        monkeypatch.setattr(best.run, "judge", lambda estimate, loss=loss: (loss, 0.5))
        best.look(epoch, 1.0, 0.01, 0.0)


@pytest.mark.parametrize(("cover", "kept"), [(False, 2), (True, 3)])
def test_the_epoch_with_the_lowest_loss_is_kept_or_the_last_where_none_is_judged(
    cover: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = Best(training(cover), Average(math.inf))
    looks(best, [3.0, 1.0, 2.0], monkeypatch)
    assert best.epoch == kept
    assert all((p == kept).all() for p in best.estimate.module.parameters())
    assert best.history["epoch"] == [1, 2, 3]
    assert best.history.get("unseen") == (None if cover else [3.0, 1.0, 2.0])


def test_a_state_goes_on_with_the_average_and_the_lowest_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, begun, resumed = (Best(training(), Average(2.0)) for _ in range(3))
    looks(whole, [3.0, 1.0, 2.0], monkeypatch)
    looks(begun, [3.0, 1.0], monkeypatch)
    resumed.load_state_dict(begun.state_dict())
    for p in resumed.run.twins.parameters():
        p.data.fill_(3)
    monkeypatch.setattr(resumed.run, "judge", lambda estimate: (2.0, 0.5))
    last = resumed.look(3, 1.0, 0.01, 0.0)
    assert (resumed.epoch, resumed.lowest) == (whole.epoch, whole.lowest) == (2, 1.0)
    assert_same_bits(resumed.estimate.state_dict(), whole.estimate.state_dict())
    # 1, then 1 + 3/4 (2 - 1), then 1.75 + 3/5 (3 - 1.75), by the rule of averaging.py with a power of 2.
    assert all(torch.allclose(p, torch.tensor(2.5)) for p in last.module.parameters())


def test_unseen_samples_that_are_not_finite_are_named() -> None:
    x, y = classes(120).tensors
    x = x.clone()
    x[Bootstrap(120, seed=0).unseen[0]] = math.nan
    with pytest.raises(FloatingPointError, match=r"in epoch 1: look for bad ones among those of bootstrap.unseen"):
        fit(mlp(), TensorDataset(x, y), epochs=1, progress=False)
