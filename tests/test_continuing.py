"""A run that is killed in the middle of an epoch and goes on from its checkpoint equals the run that was not."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import assert_same_bits
from processes import ended
from torch import nn
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, PairedLoader, Twins, resets


def train(folder: Path, resample: Any, workers: int, kill_after: int, epochs: int = 3) -> None:
    """The loop as a user would write it, with a checkpoint after each step and a kill that gives no warning."""
    # Sums of floats depend on the number of threads, and that is all that may change them.
    torch.set_num_threads(1)
    checkpoint = folder / "checkpoint.pt"
    torch.manual_seed(0)
    x = torch.randn(90, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    torch.manual_seed(len(os.listdir(folder)))  # a resumed process starts with another global state
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    if not checkpoint.exists():
        for p in model.parameters():
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(5))
    twins = Twins(model, groups="unit")
    optimizer = torch.optim.Adam(twins.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = PairedLoader(data, Bootstrap(90), 16, resample, num_workers=workers)
    parts: dict[str, Any] = {"twins": twins, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    if checkpoint.exists():
        for name, state in torch.load(checkpoint, weights_only=True).items():
            parts[name].load_state_dict(state)
    due, done = resets.every(1), 0
    for epoch in range(loader.epoch, epochs + 1):
        for pair in loader:
            with twins.sampled():
                loss = torch.zeros(())
                for twin, (x, y, *weight) in zip(twins, pair, strict=True):
                    w = weight[0] if weight else torch.ones(len(y))
                    loss = loss + (w * F.cross_entropy(twin(x), y, reduction="none")).mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            twins.update()
            torch.save({name: part.state_dict() for name, part in parts.items()}, str(checkpoint) + ".new")
            os.replace(str(checkpoint) + ".new", checkpoint)
            done += 1
            if done == kill_after:
                os.kill(os.getpid(), 9)
        if due(epoch):
            twins.reset()
    torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "final.pt")


def run(folder: Path, resample: str, workers: int, kill_after: int) -> int | None:
    folder.mkdir(exist_ok=True)
    return ended(train, folder, resample, workers, kill_after)


@pytest.mark.parametrize(("resample", "workers"), [("draws", 0), ("counts", 0), ("draws", 2), ("counts", 2)])
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, resample: str, workers: int) -> None:
    assert run(tmp_path / "whole", resample, workers, kill_after=0) == 0
    # In the middle of the first epoch, then at the very end of one (before its reset), then to the end.
    steps = {"draws": 6, "counts": 4}[resample]
    assert run(tmp_path / "broken", resample, workers, kill_after=2) == -9
    assert run(tmp_path / "broken", resample, workers, kill_after=steps - 2) == -9
    assert run(tmp_path / "broken", resample, workers, kill_after=0) == 0
    whole, broken = (torch.load(tmp_path / name / "final.pt", weights_only=True) for name in ("whole", "broken"))
    assert whole["loader"]["epoch"] == 4
    assert_same_bits(broken, whole)
