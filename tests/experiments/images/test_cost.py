import pandas as pd
import pytest
import torch

from twinboot.experiments import networks
from twinboot.experiments.images.contenders import METHODS
from twinboot.experiments.images.cost import KINDS, TURNS, kinds, ratios, turns
from twinboot.experiments.images.task import Task
from twinboot.training.selection import Average

TABLE = pd.DataFrame(
    {"kind": ["single", "twins"] * 3, "turn": [1, 1, 2, 2, 3, 3], "seconds": [1.0, 1.3, 2.0, 2.4, 1.0, 1.5]}
)


def test_each_turn_is_compared_with_itself() -> None:
    found = ratios(TABLE)
    assert tuple(found.loc["twins"]) == pytest.approx((1.3, 1.2, 1.5))
    assert tuple(found.loc["single"]) == (1, 1, 1)


def test_each_method_has_a_kind_of_epochs() -> None:
    assert set(KINDS) == set(METHODS)
    assert kinds(("hold-out", "twins")) == ["single", "twins"]


def test_an_epoch_of_each_kind_is_timed_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    averaged: list[int] = []
    take = Average.take
    monkeypatch.setattr(Average, "take", lambda *args: (averaged.append(1), take(*args)))
    task = Task(
        torch.randn(40, 1, 8, 8),
        torch.arange(40) % 3,
        lambda dropout=0.0, seed=0: networks.small(3, 1, 0.125, "batch", dropout, seed),
        epochs=2,
        batch=8,
        rate=0.001,
        samples=2,
        seed=0,
    )
    ticks: list[int] = []
    found = turns(task, ("dropout", "twins", "twins-draws"), lambda: ticks.append(1))
    assert list(found["kind"]) == TURNS * ["single", "dropout", "twins", "twins-draws"]
    assert (found["seconds"] > 0).all()
    assert len(ticks) == 4 * (TURNS + 1)
    assert len(averaged) == 2 * (TURNS + 1)  # for each kind of twins, as in `fit`
