from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy

from twinboot.experiments import cli, uci
from twinboot.experiments.registry import EXPERIMENTS
from twinboot.experiments.runner.experiment import Part, Tick, UnavailableError
from twinboot.experiments.runner.store import Run, RunError, carry_out
from twinboot.experiments.uci.methods import METHODS
from twinboot.experiments.uci.run import parts


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> uci.Config:
    """Two small sets with three splits and one, and few steps."""
    generator, sets = np.random.default_rng(0), {}
    for name, splits in (("flat", 3), ("steep set", 1)):
        x = generator.normal(size=(90, 2))
        target = (x @ [1.0, 2.0]) ** 2 + generator.normal(0, 0.1, 90)
        sets[name] = np.column_stack([x, target * (1 if name == "flat" else 1000)])
        sets[f"{name}__test_idx"] = np.stack([generator.permutation(90)[:9] for _ in range(splits)]).astype(np.int32)
    np.savez(path := tmp_path_factory.mktemp("sets") / "sets.npz", **sets)
    return uci.Config(data=str(path), splits=2, hidden=4, updates=6, epochs=2, samples=4)


@pytest.fixture(scope="module")
def ticks() -> dict[str, int]:
    return {}


@pytest.fixture(scope="module")
def run(config: uci.Config, tmp_path_factory: pytest.TempPathFactory, ticks: dict[str, int]) -> Run:
    def begin(part: Part) -> Tick:
        ticks[part.name] = 0

        def tick() -> None:
            ticks[part.name] += 1

        return tick

    return carry_out("uci", uci, config, tmp_path_factory.mktemp("uci") / "run", begin)


def test_there_is_a_part_for_each_split_and_all_sets_advance_together(
    config: uci.Config, run: Run, ticks: dict[str, int]
) -> None:
    found = parts(config)
    assert [part.name for part in found] == ["flat 0", "steep set 0", "flat 1"]
    assert [part.name for part in parts(replace(config, sets=("steep set",)))] == ["steep set 0"]
    assert ticks == {part.name: part.ticks for part in found}


def test_every_method_is_scored_on_the_same_splits(run: Run) -> None:
    runs = run.tables["runs"]
    assert len(runs) == 3 * len(METHODS)
    assert runs.groupby(["set", "split"])["method"].apply(set).map(lambda s: s == set(METHODS)).all()
    assert np.isfinite(runs[["rmse", "nll", "noise", "spread"]]).all(axis=None)
    assert runs["covered"].between(0, 1).all()
    assert (runs["rows"] == 81).all()
    assert (runs[runs["method"] == "single"]["used"] == 81 - round(0.135 * 81)).all()
    assert (runs[runs["method"] == "all"]["used"] == 81).all()
    assert ((runs["spread"] > 0) == (runs["method"] == "draws")).all()
    epochs = runs.pivot(index=["set", "split"], columns="method", values="epoch")
    assert (epochs["all"] == epochs["single"]).all()


def test_scores_are_in_the_units_of_the_target(run: Run) -> None:
    """The second set has a thousandfold target."""
    means = run.tables["runs"].groupby("set")["rmse"].mean()
    assert means["steep set"] > 100 * means["flat"]


def test_without_a_file_the_flag_is_named_and_reproduce_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    assert EXPERIMENTS["uci"] is uci
    with pytest.raises(UnavailableError, match=r"--data FILE, an \.npz file with .*NAME__test_idx for each set\.$"):
        parts(uci.QUICK)
    assert cli.main(["uci", "--quick", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(cli, "EXPERIMENTS", {"uci": uci, "toy": toy})
    assert cli.main(["reproduce", "--quick", "--out", str(tmp_path)]) == 0
    assert "left out: uci needs its data" in capsys.readouterr().err
    assert (tmp_path / "report.html").exists()


def test_bad_files_and_names_get_one_line_and_code_2(config: uci.Config, tmp_path: Path, capsys: Any) -> None:
    (bad := tmp_path / "bad.npz").write_text("no arrays")
    for flags, said in (
        (["--data", str(bad)], "is no .npy or .npz file of plain numbers."),
        (["--data", str(config.data), "--sets", "round"], "has no set 'round', only flat, steep set."),
        (["--data", str(tmp_path / "none.npz")], "can't read"),
    ):
        assert cli.main(["uci", *flags, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_is_not_continued_with_another_file_under_its_name(config: uci.Config, tmp_path: Path) -> None:
    path = tmp_path / "sets.npz"
    content = Path(str(config.data)).read_bytes()
    path.write_bytes(content)
    first = replace(config, data=str(path), checksum="")
    np.savez(path, flat=np.random.default_rng(1).normal(size=(90, 3)), flat__test_idx=np.arange(9)[None])
    with pytest.raises(ValueError, match="not the file that the checksum belongs to"):
        parts(first)
    (tmp_path / "run").mkdir()
    second = replace(config, data=str(path), checksum="")
    carry_out("uci", uci, second, tmp_path / "run")
    path.write_bytes(content)
    with pytest.raises(RunError, match="holds a run with checksum"):
        carry_out("uci", uci, first, tmp_path / "run")
