"""A run that is killed in the middle of an epoch and goes on from its checkpoint equals the run that was not."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from loops import assert_same_bits

# The run as a user would write it: its own process, a checkpoint after each step, a kill that gives no warning.
SCRIPT = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path

    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    from twinboot import Bootstrap, PairedLoader, Twins, resets

    def main(folder, resample, workers, kill_after, epochs=3):
        checkpoint = Path(folder) / "checkpoint.pt"
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
        parts = {"twins": twins, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        if checkpoint.exists():
            for name, state in torch.load(checkpoint, weights_only=True).items():
                parts[name].load_state_dict(state)
        due, done = resets.every(1), 0
        for epoch in range(loader.epoch, epochs + 1):
            for pair in loader:
                with twins.sampled():
                    loss = 0
                    for twin, (x, y, *weight) in zip(twins, pair):
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
        torch.save({name: part.state_dict() for name, part in parts.items()}, Path(folder) / "final.pt")

    if __name__ == "__main__":
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    """
)


def run(folder: Path, resample: str, workers: int, kill_after: int) -> int:
    folder.mkdir(exist_ok=True)
    script = folder.parent / "run.py"
    script.write_text(SCRIPT)
    # One thread: sums of floats depend on the number of threads, and that is all that may change them.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [str(folder), resample, str(workers), str(kill_after)]
    return subprocess.run([sys.executable, str(script), *arguments], env=environment, timeout=120).returncode


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
