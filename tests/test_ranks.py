from pathlib import Path
from typing import Any

import torch
from loops import assert_same_bits, classes
from processes import together
from torch import nn

from twinboot import fit, ranks


def test_without_other_processes_there_is_one_rank_and_nothing_to_add_to_a_seed() -> None:
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
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    data = classes(90)
    log = f"{folder}/log-{ranks.share()[0]}.csv" if folder else None
    found = fit(model, data, epochs=epochs, batch_size=8, checkpoint=folder, log=log, progress=False)
    del found.history["seconds"]
    return {**found.history, "best": found.best_epoch, "estimate": found.estimate.state_dict()}


def test_the_mean_over_ranks() -> None:
    assert together(mean_of_ranks, ranks=3) == [1.0] * 3


def mean_of_ranks() -> float:
    return ranks.mean(torch.tensor(float(ranks.share()[0]))).item()
