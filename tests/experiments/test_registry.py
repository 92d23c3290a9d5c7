import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from twinboot.experiments.registry import EXPERIMENTS
from twinboot.experiments.runner.experiment import Part
from twinboot.experiments.runner.store import carry_out
from twinboot.experiments.wells import basins


def quick(name: str, folder: Path) -> Any:
    """The config of --quick, with data for the experiment that has none of its own."""
    experiment = EXPERIMENTS[name]
    if name == "fwi":
        pytest.importorskip("deepwave", reason="fwi needs the extra seismic")
    if name != "uci":
        return experiment.QUICK
    values = np.random.default_rng(0).normal(size=(90, 3))
    np.savez(folder / "sets.npz", one=values, one__test_idx=np.arange(18).reshape(2, 9))
    return experiment.Config(data=str(folder / "sets.npz"), splits=2)


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_part_can_be_sent_to_another_process(name: str, tmp_path: Path) -> None:
    parts = EXPERIMENTS[name].parts(quick(name, tmp_path))
    again: list[Part] = pickle.loads(pickle.dumps(parts))
    for part, sent in zip(parts, again, strict=True):
        assert (sent.name, sent.ticks, sent.resumes, sent.alone) == (part.name, part.ticks, part.resumes, part.alone)
        assert sent.compute.func is part.compute.func  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("basins", basins.Config(seeds=5, size=20, epochs=13)),
        ("gaussian", EXPERIMENTS["gaussian"].Config(sizes=(20, 40), seeds=4, replicas=(5,), falling=20)),
    ],
)
def test_parts_in_processes_of_their_own_give_the_same_tables(name: str, config: Any, tmp_path: Path) -> None:
    one, two = (carry_out(name, EXPERIMENTS[name], config, tmp_path / str(jobs), jobs=jobs) for jobs in (1, 2))
    assert list(one.tables) == list(two.tables)
    for table in one.tables:
        pd.testing.assert_frame_equal(one.tables[table], two.tables[table], check_exact=True)
