"""The epoch that is kept: the one whose estimate predicts unseen samples best, or the last where there are none."""

import copy
import math
from typing import Any

import pytest
import torch
from loops import assert_same_bits, classes, mlp
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, fit
from twinboot.training.epoch import Training
from twinboot.training.protocol import FIT
from twinboot.training.selection import Average, Selection


def training(cover: bool = False) -> Training:
    bootstrap = Bootstrap(60, cover=cover)
    options: dict[str, Any] = {"protocol": FIT, "batch_size": 8, "seed": 0}
    return Training(mlp(), classes(60), "classification", bootstrap=bootstrap, **options)


def looks(best: Selection, losses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """After each epoch the weights are another number, and the unseen loss is as given."""
    for epoch, loss in enumerate(losses, start=1):
        for p in best.run.twins.parameters():
            p.data.fill_(epoch)
        monkeypatch.setattr(best.run, "validate", lambda estimate, loss=loss: (loss, 0.5))
        best.look(epoch, 1.0, 0.01, 0.0)


@pytest.mark.parametrize(("cover", "kept"), [(False, 2), (True, 3)])
def test_the_epoch_with_the_lowest_loss_is_kept_or_the_last_where_none_is_loss_and_hit(
    cover: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = Selection(training(cover), Average(math.inf))
    looks(best, [3.0, 1.0, 2.0], monkeypatch)
    assert best.epoch == kept
    assert all((p == kept).all() for p in best.estimate.module.parameters())
    assert best.history["epoch"] == [1, 2, 3]
    assert best.history.get("unseen") == (None if cover else [3.0, 1.0, 2.0])


def test_a_state_goes_on_with_the_average_and_the_lowest_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, begun, resumed = (Selection(training(), Average(2.0)) for _ in range(3))
    looks(whole, [3.0, 1.0, 2.0], monkeypatch)
    looks(begun, [3.0, 1.0], monkeypatch)
    resumed.load_state_dict(begun.state_dict())
    for p in resumed.run.twins.parameters():
        p.data.fill_(3)
    monkeypatch.setattr(resumed.run, "validate", lambda estimate: (2.0, 0.5))
    last = resumed.look(3, 1.0, 0.01, 0.0)
    assert (resumed.epoch, resumed.lowest) == (whole.epoch, whole.lowest) == (2, 1.0)
    assert_same_bits(resumed.estimate.state_dict(), whole.estimate.state_dict())
    # 1, then 1 + 3/4 (2 - 1), then 1.75 + 3/5 (3 - 1.75), by the rule of selection.py with a power of 2.
    assert all(torch.allclose(p, torch.tensor(2.5)) for p in last.module.parameters())


def test_unseen_samples_that_are_not_finite_are_named() -> None:
    x, y = classes(120).tensors
    x = x.clone()
    x[Bootstrap(120, seed=0).unseen[0]] = math.nan
    with pytest.raises(FloatingPointError, match=r"in epoch 1: check the samples of bootstrap.unseen"):
        fit(mlp(), TensorDataset(x, y), epochs=1, progress=False)


# --- the average over the epochs


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
