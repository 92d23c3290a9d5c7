from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twinboot.experiments.fwi.survey import layered, read, smoothed


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A file of 20 x 30 velocities."""
    np.savez(path := tmp_path / "model.npz", velocity=np.linspace(1500, 3000, 600, dtype=np.float32).reshape(20, 30))
    return str(path)


def test_the_layered_model_is_rock_with_layers_a_fault_and_a_lens() -> None:
    made = layered()
    assert made.min() == 1500
    assert made.max() == 3500
    assert len(made.unique()) == 5
    assert (made[8, 14:23] == 1900).all()  # the lens is slower than what lies above it
    assert made[7, 14:23].max() > made[8, 14:23].max()
    assert (made.diff(dim=1) != 0).any(0).sum() >= 4  # layers dip, or are cut


def test_blurring_keeps_a_constant_and_the_mean_of_what_is_inside() -> None:
    assert torch.allclose(smoothed(torch.full((12, 15), 2000.0), 3.0), torch.full((12, 15), 2000.0))
    spike = torch.zeros(41, 41)
    spike[20, 20] = 1
    found = smoothed(spike, 2.0)
    assert found.sum().item() == pytest.approx(1)
    row = found.sum(1)
    assert (row * (torch.arange(41) - 20) ** 2).sum().sqrt().item() == pytest.approx(2, rel=0.01)


def test_a_window_of_a_file_is_read_and_coarsened(model: str, tmp_path: Path) -> None:
    cells = np.load(model)["velocity"]
    assert torch.equal(read(model), torch.from_numpy(cells))
    assert np.array_equal(read(model, (2, 3, 14, 26)), cells[2:16, 3:29])
    np.save(large := tmp_path / "large.npy", np.arange(1500.0, 1500 + 150 * 300 / 10, 0.1).reshape(150, 300)[:, :299])
    assert np.array_equal(read(str(large)), np.load(large)[:60, 99:199].astype(np.float32))
    assert np.array_equal(read(str(large), coarsen=2), np.load(large)[:120:2, 49:249:2].astype(np.float32))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (np.full((20, 30), np.nan), "not finite"),
        (np.full((20, 30), 2.5), "no velocities of rock and water in m/s"),
        (np.full((20, 30, 2), 2000.0), "two dimensions"),
        (np.full((20, 30), "rock"), "two dimensions"),
        (np.full((20, 30), 2000j), "two dimensions"),
        (np.full((20, 30), None), "no .npy or .npz file of plain numbers"),  # would be unpickled
        (np.zeros((0, 30)), "no velocities"),
        (np.full((5, 30), 2000.0), "too few"),
    ],
)
def test_a_file_without_velocities_is_refused_in_one_sentence(content: Any, said: str, tmp_path: Path) -> None:
    np.save(path := tmp_path / "model.npy", content, allow_pickle=True)
    with pytest.raises(ValueError, match=said) as refused:
        read(str(path))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
