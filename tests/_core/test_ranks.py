from pathlib import Path
from typing import Any

import pytest
import torch
from loops import assert_same_bits, seeded
from processes import together
from torch import nn
from torch.utils.data import TensorDataset

from twinboot import fit
from twinboot._core import ranks


def test_one_process_is_rank_0_of_1_and_adds_nothing_to_a_seed() -> None:
    assert ranks.share() == (0, 1)
    assert ranks.own() == ()


def test_each_process_knows_its_share() -> None:
    assert together(asked, ranks=3) == [[(0, 3), ()], [(1, 3), (1,)], [(2, 3), (2,)]]


def asked() -> list[tuple[int, ...]]:
    return [ranks.share(), ranks.own()]


def test_ranks_fit_one_estimate_and_go_on_from_the_checkpoint_of_the_first(tmp_path: Path) -> None:
    whole = together(fitted, 4, None)
    assert_same_bits(whole[0], whole[1])
    assert whole[0]["train"][-1] < whole[0]["train"][0]
    folder = tmp_path / "run"
    together(fitted, 2, str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["epoch-1.pt", "epoch-2.pt", "log-0.csv"]
    for continued in together(fitted, 4, str(folder)):
        assert_same_bits(continued, whole[0])


def fitted(epochs: int, folder: str | None) -> dict[str, Any]:
    if folder:
        Path(folder).mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    x = torch.randn(90, 4, generator=seeded(1))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    log = f"{folder}/log-{ranks.share()[0]}.csv" if folder else None
    options: dict[str, Any] = {"progress": False, "optimizer": lambda p: torch.optim.Adam(p, 0.02)}
    found = fit(model, data, epochs=epochs, batch_size=8, checkpoint=folder, log=log, **options)
    del found.history["seconds"]
    return {**found.history, "best": found.best_epoch, "estimate": found.estimate.state_dict()}


def test_the_mean_over_ranks() -> None:
    assert together(mean_of_ranks, ranks=3) == [1.0] * 3


def mean_of_ranks() -> float:
    own = torch.tensor(float(ranks.share()[0]))
    found = ranks.mean(own).item()
    assert own.item() == ranks.share()[0]
    return found


def test_all_ranks_refuse_checkpoints_that_differ(tmp_path: Path) -> None:
    for said in together(refused, str(tmp_path)):
        assert said == f"the ranks do not find the same checkpoints: {tmp_path}/"


def refused(folder: str) -> str:
    own = Path(folder) / str(ranks.share()[0])  # as without a common disk, where the first rank alone writes
    own.mkdir()
    fitted(1, str(own))
    with pytest.raises(ValueError, match="must be one directory for all") as error:
        fitted(2, str(own))
    return str(error.value).split(own.name + " must")[0]
