"""The image experiment as a whole, on the embedded digits."""

import dataclasses
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pytest
import torch

from twinboot import metrics
from twinboot.experiments import datasets, images
from twinboot.experiments.experiment import UnavailableError
from twinboot.experiments.images import BASE, OURS, Config
from twinboot.experiments.images_config import PRESETS
from twinboot.experiments.images_run import chosen, parts
from twinboot.experiments.store import Run, carry_out

SMALL = Config(methods=("hold-out", "twins", "twins-draws"), epochs=2, seeds=2, samples=2)


@cache
def small() -> Run:
    with TemporaryDirectory() as directory:
        return carry_out("images", images, SMALL, Path(directory) / "images")


def test_each_row_has_all_scores_for_each_seed() -> None:
    rows = small().tables["rows"]
    assert set(rows.groupby("row").size()) == {2}
    assert {BASE, OURS} <= set(rows["row"])
    measured = [*metrics.scores(torch.tensor([[0.6, 0.4], [0.7, 0.3]]), torch.tensor([0, 1])), "gap"]
    assert rows[measured].notna().all(axis=None)
    assert (rows["accuracy"] > 0.2).all()  # ten classes


def test_a_reliability_diagram_holds_all_test_images_and_its_calibration_error() -> None:
    bins, rows = small().tables["bins"], small().tables["rows"]
    for (row, seed), own in bins.groupby(["row", "seed"]):
        assert own["share"].sum() == pytest.approx(1)
        gap = (own["share"] * (own["confidence"] - own["accuracy"]).abs()).sum()
        scored = rows[(rows["row"] == row) & (rows["seed"] == seed)]["ece"].item()
        assert gap == pytest.approx(scored, abs=1e-4)


def test_sigma_is_told_for_each_layer_and_epoch_and_the_figure_and_verdicts_come_from_the_tables() -> None:
    run = small()
    sigma = run.tables["sigma"]
    layers = {"conv1_1", "conv2_1", "conv3_1", "linear1", "classifier"}
    assert set(sigma["layer"]) == layers
    assert len(sigma) == 2 * 2 * 2 * len(layers)  # methods, seeds, epochs
    drawn = images.figure(run.config, run.tables)
    assert [len(part.axes) for part in drawn.subfigs] == [3, 2, 2]
    assert [label.get_text() for label in drawn.subfigs[1].axes[1].get_yticklabels()] == list(
        dict.fromkeys(sigma["layer"])
    )
    numbers = images.numbers(run.config, run.tables)
    table = next(iter(numbers.values()))
    assert list(table.iloc[:, 0]) == list(dict.fromkeys(run.tables["rows"]["row"]))
    assert all(
        v.status == "undecided"
        for v in images.verdicts(run.config, run.tables)
        if "Sigma" not in v.claim and "classifier" not in v.claim
    )


def test_a_row_that_beats_twin_boot_is_marked_as_such() -> None:
    run = small()
    rows = run.tables["rows"].copy()
    rows.loc[rows["row"] == BASE, ["nll", "accuracy"]] = 0.01, 0.0
    table = next(iter(images.numbers(run.config, {**run.tables, "rows": rows}).values())).set_index("")
    assert "NLL" in table.loc[BASE, "beats Twin-Boot in"]
    assert "accuracy" not in table.loc[BASE, "beats Twin-Boot in"]
    assert table.loc[OURS, "beats Twin-Boot in"] == ""


def test_presets_and_overrides() -> None:
    assert chosen(Config()) == (PRESETS["digits"].methods, PRESETS["digits"].epochs, PRESETS["digits"].seeds)
    assert chosen(SMALL) == (SMALL.methods, 2, 2)
    assert PRESETS["cifar10"].normalisation == "weight"  # Appendix A.4
    assert PRESETS["cifar10"].width == 1
    assert [part.name for part in parts(SMALL)][:2] == ["seed 0 hold-out", "seed 1 hold-out"]
    assert parts(SMALL)[-1].name == "cost"


def test_a_preset_of_files_says_where_they_should_be(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="the preset cifar10-5k needs files of cifar10: give --data"):
        parts(Config(preset="cifar10-5k"))
    with pytest.raises(UnavailableError, match="holds no files of cifar10"):
        parts(Config(preset="cifar10-5k", data=str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"preset": "imagenet"}, "unknown preset 'imagenet': use digits, cifar10-5k"),
        ({"methods": ("twin",)}, "unknown method 'twin': use hold-out"),
        ({"methods": ("twins", "twins")}, "none twice"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"samples": 1}, "samples must be at least 2"),
        ({"rate": 0.0}, "rate must be above 0"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(Config(), **change)


def test_augmentation_is_at_work_in_training_alone() -> None:
    layer, x = datasets.Augment(padding=2), torch.rand(8, 3, 8, 8)
    assert torch.equal(layer.eval()(x), x)
    assert not torch.equal(layer.train()(x), x)


def test_a_run_with_augmentation_is_told_to_the_end(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, augment=True, seeds=1, epochs=3, methods=("hold-out", "twins"))
    run = carry_out("images", images, config, tmp_path / "images")
    assert set(run.tables["sigma"]["layer"]) == set(small().tables["sigma"]["layer"])
    assert len(images.verdicts(run.config, run.tables)) == 4


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(UnavailableError, match="the device 'nowhere' can't be used"):
        parts(Config(device="nowhere"))


def test_enough_seeds_of_the_papers_images_decide() -> None:
    run = small()
    tables = {
        name: pd.concat([table.assign(seed=table["seed"] + 2 * k) for k in range(2)])
        for name, table in run.tables.items()
        if "seed" in table
    }
    tables["turns"] = run.tables["turns"]
    tables["rows"].loc[tables["rows"]["row"] == OURS, ["nll", "ece"]] = 0.01
    config = dataclasses.replace(run.config, preset="cifar10-5k", seeds=4)
    gap, calibrated, _ = images.verdicts(config, tables)
    assert calibrated.status == "held"
    assert gap.status != "undecided"
