import gzip
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinboot.experiments import cli, truth
from twinboot.experiments.registry import EXPERIMENTS
from twinboot.experiments.runner.experiment import UnavailableError
from twinboot.experiments.runner.store import Run, carry_out
from twinboot.experiments.truth import tasks
from twinboot.experiments.truth.config import Config

SMALL = Config(
    methods=("fit", "error_bars", "dropout", "ensemble"),
    sizes=(60, 80),
    lrs=(0.01,),
    epochs=2,
    sets=6,
    scored=2,
    inputs=30,
    samples=4,
    members=(2,),
)
ROWS = ["fit", "error_bars", "error_bars, sigma", "MC dropout", "MC dropout, averaged", "ensemble of 2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return carry_out("truth", truth, SMALL, tmp_path_factory.mktemp("truth") / "run")


def test_it_is_registered_and_quick_needs_no_files() -> None:
    assert EXPERIMENTS["truth"] is truth
    assert truth.QUICK.data is None
    assert set(truth.QUICK.methods) <= set(Config().methods)


def test_there_is_a_part_for_each_block_of_plain_models_and_for_each_method_and_set() -> None:
    names = [part.name for part in truth.parts(SMALL)]
    assert names[:4] == ["60 0.01 truth 0", "60 0.01 truth 5", "60 0.01 fit 0", "60 0.01 error_bars 0"]
    assert len(names) == len(set(names)) == 2 * (2 + 2 * 4)


def test_every_method_is_scored_on_the_same_sets(run: Run) -> None:
    runs, draws, plain = run.tables["runs"], run.tables["draws"], run.tables["truth"]
    assert len(plain) == 2 * 6 * 30
    assert len(draws) == 2 * 2 * 30 * len(ROWS)
    assert runs["method"].value_counts().to_dict() == {"plain": 12, **dict.fromkeys(ROWS, 4)}
    found = truth.scored(run.tables)
    spread = found[found["method"] != "plain"]
    assert np.isfinite(spread[["ratio", "rank", "covered", "own_ratio", "cost", "rmse", "point_rmse"]]).all(axis=None)
    assert (spread["ratio"] > 0).all()
    assert spread["covered"].between(0, 1).all()
    assert found[found["method"] == "plain"]["ratio"].isna().all()
    assert (spread.groupby("method")["cost"].mean()["ensemble of 2"]) > 1


def test_numbers_verdicts_and_figure_show_every_cell_and_method(run: Run) -> None:
    shown = truth.numbers(SMALL, run.tables)
    assert [title.partition(",")[0] for title in shown] == ["60 samples", "80 samples"]
    for table in shown.values():
        assert table[""].tolist() == ["plain", *ROWS]
        assert not table.astype(str).apply(lambda column: column.str.contains("nan")).any(axis=None)
    assert {verdict.status for verdict in truth.verdicts(SMALL, run.tables)} == {"undecided"}
    drawn = truth.figure(SMALL, run.tables)
    drawn.savefig(io.BytesIO(), format="png")
    [legend] = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ROWS


def test_a_method_that_fails_on_a_set_is_left_out_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    real, config = truth.METHODS["ensemble"], replace(SMALL, methods=("dropout", "ensemble"), sizes=(60,))

    def fails_on_the_first(task: tasks.Task, plain: tasks.Plain, sizes: Any) -> Any:
        if task.seed == tasks.task_of(config, 60, 0.01, 0).seed:
            raise FloatingPointError("not finite.")
        return real(task, plain, sizes)

    monkeypatch.setitem(truth.METHODS, "ensemble", fails_on_the_first)
    tables = carry_out("truth", truth, config, tmp_path / "run").tables
    assert "left out: ensemble on set 0 of 60 samples: not finite." in capsys.readouterr().err
    [table] = truth.numbers(config, tables).values()
    assert table.set_index("")["sets"].to_dict() == {
        "plain": 6,
        "MC dropout": 2,
        "MC dropout, averaged": 2,
        "ensemble of 2": 1,
    }
    truth.figure(config, tables).savefig(io.BytesIO(), format="png")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"preset": "mnist"}, "unknown preset 'mnist'"),
        ({"methods": ()}, "methods must have at least one value"),
        ({"methods": ("fits",)}, "unknown method 'fits'"),
        ({"sizes": (60, 60)}, "sizes must have at least one value and none twice"),
        ({"sizes": (20,)}, "sizes must be at least 50"),
        ({"lrs": (0.0,)}, "lrs must be above 0"),
        ({"members": (1,)}, "members must be at least 2"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"samples": 1}, "samples must be at least 2"),
        ({"scored": 0}, "scored must be at least 1"),
        ({"inputs": 5}, "inputs must be at least 10"),
        ({"sets": 4, "scored": 5}, "sets must be at least 4, and at least scored"),
        ({"sets": 3, "scored": 1}, "sets must be at least 4"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config(**settings)


def idx(values: np.ndarray[Any, Any]) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return gzip.compress(header + values.astype(np.uint8).tobytes())


@pytest.fixture
def clothes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Fashion-MNIST with 500 images for training."""
    generator, folder = np.random.default_rng(0), tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name, n in (("train", 500), ("t10k", 60)):
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(idx(generator.integers(0, 256, (n, 28, 28))))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(idx(generator.integers(0, 10, n)))
    load = tasks.datasets.load
    monkeypatch.setattr(tasks.datasets, "load", lambda name, folder: load(name, folder, verify=False))
    return replace(SMALL, preset="fashion", data=str(tmp_path), sizes=(100,), sets=None, inputs=50, samples=2)


def test_sets_beyond_the_samples_are_refused(clothes: Config) -> None:
    """A slice beyond the end would be an empty training set."""
    assert truth.number_of_sets(clothes, 100) == 5
    assert truth.number_of_sets(clothes, 51) == 9
    assert truth.number_of_sets(SMALL, 10**6) == 6
    with pytest.raises(ValueError, match=r"make 5 disjoint sets of 100: 6 are needed"):
        truth.parts(replace(clothes, sets=6))
    with pytest.raises(ValueError, match=r"make 1 disjoint sets of 300: 4 are needed"):
        truth.parts(replace(clothes, sizes=(300,)))
    with pytest.raises(ValueError, match="there are 60 test inputs"):
        truth.parts(replace(clothes, inputs=70))


def test_classes_are_scored_too(clothes: Config, tmp_path: Path) -> None:
    config = replace(clothes, methods=("laplace", "swag", "bootstrap"))
    tables = carry_out("truth", truth, config, tmp_path / "run").tables
    found = truth.scored(tables)
    spread = found[found["method"] != "plain"]
    assert spread["method"].nunique() == 3
    columns = ["ratio", "rank", "covered", "covered_probs", "own_ratio", "nll", "accuracy", "point_nll"]
    assert np.isfinite(spread[columns]).all(axis=None)
    [table] = truth.numbers(config, tables).values()
    assert {"NLL", "accuracy", "spread ratio"} < set(table)


@pytest.mark.parametrize(("preset", "kind"), [("protein", "FILE"), ("fashion", "DIRECTORY"), ("cifar10", "DIRECTORY")])
def test_without_files_the_flag_is_named(preset: Any, kind: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(UnavailableError, match=f"the preset {preset} needs --data {kind}: "):
        truth.parts(Config(preset=preset))
    assert cli.main(["truth", "--preset", preset, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_another_file_under_the_same_name_is_refused(tmp_path: Path) -> None:
    names = tasks.PROTEIN, f"{tasks.PROTEIN}__test_idx"
    for seed in (0, 1):
        values = np.random.default_rng(seed).normal(size=(400, 10))
        np.savez(path := tmp_path / "sets.npz", **dict(zip(names, (values, np.arange(60)[None]), strict=True)))
        if seed == 0:
            config = replace(SMALL, preset="protein", data=str(path), sizes=(60,), sets=5)
            assert truth.parts(config)
    with pytest.raises(ValueError, match="not the file that the checksum belongs to"):
        truth.parts(config)
