import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import toy

from twinboot.experiments import cli, commands, uci
from twinboot.experiments.registry import EXPERIMENTS
from twinboot.experiments.runner.experiment import Part, Tick, UnavailableError
from twinboot.experiments.runner.store import Run, RunError, carry_out
from twinboot.experiments.uci import clearly_apart
from twinboot.experiments.uci.methods import METHODS

SPLITS = 12
SHIFT = np.random.default_rng(0).normal(0, 1.0, SPLITS)  # of a split, shared by the methods
JITTER = np.random.default_rng(1).normal(0, 0.01, SPLITS)  # of a method


def table(better: dict[str, float], covered: float = 0.9, splits: int = SPLITS) -> pd.DataFrame:
    """Runs of sets in which Twin-Boot's RMSE and NLL are lower than those of single networks by what is said."""
    frames = []
    for name, gain in better.items():
        for k, method in enumerate(METHODS):
            value = 10 + SHIFT + np.roll(JITTER, k) - gain * (method in ("mean", "draws"))
            frame = {"set": name, "split": range(SPLITS), "method": method, "rows": 90, "inputs": 3, "rmse": value}
            frame |= {"nll": value - 9, "covered": covered + np.roll(JITTER, k) / 10, "noise": 1.0, "spread": 0.5}
            frame |= {"epoch": 5, "used": 70, "seconds": 1.5}
            frames.append(pd.DataFrame(frame))
    runs = pd.concat(frames, ignore_index=True)
    return runs[runs["split"] < splits]


def test_differences_are_paired_by_split() -> None:
    """What splits share cancels: 0.02 is clear beside the methods' own jitter of 0.01, though splits differ by 1."""
    runs = table({"lower": 0.02, "even": 0.0, "higher": -0.02})
    assert clearly_apart(runs, "rmse", "draws") == (["lower"], ["higher"])


@pytest.mark.parametrize(
    ("better", "status"),
    [
        ({"a": 1, "b": 1, "c": 0}, "held"),
        ({"a": 1, "b": 1, "c": -1}, "partly"),
        ({"a": 1, "b": 0, "c": 0}, "partly"),
        ({"a": 1, "b": -1, "c": 0}, "not held"),
        ({"a": -1, "b": -1, "c": 0}, "not held"),
        ({"a": 0, "b": 0, "c": 0}, "not held"),
    ],
)
def test_lower_is_held_if_clear_in_most_sets_and_worse_in_none(better: dict[str, float], status: str) -> None:
    error, likelihood, _ = uci.verdicts(uci.Config(), {"runs": table(better)})
    assert error.status == likelihood.status == status
    lower = [name for name, gain in better.items() if gain == 1]
    higher = [name for name, gain in better.items() if gain == -1]
    assert f"Clearly lower for {', '.join(lower) or 'none'}; " in error.evidence
    assert f"wins clearly for {', '.join(higher) or 'none'}; of 3 sets" in error.evidence
    assert f"clearly lower in {len(lower)}, clearly higher in {len(higher)}" in error.evidence


@pytest.mark.parametrize(
    ("covered", "status"), [(0.9, "held"), (0.885, "held"), (0.87, "not held"), (0.93, "not held")]
)
def test_intervals_must_hold_what_they_say_within_two_points(covered: float, status: str) -> None:
    assert uci.verdicts(uci.Config(), {"runs": table({"a": 0, "b": 0}, covered)})[2].status == status


def test_half_of_the_sets_make_partly() -> None:
    runs = pd.concat([table({"a": 0}), table({"b": 0}, covered=0.8)])
    assert uci.verdicts(uci.Config(), {"runs": runs})[2].status == "partly"


def test_few_splits_decide_nothing() -> None:
    for splits, decided in ((4, False), (5, True)):
        found = uci.verdicts(uci.Config(splits=splits), {"runs": table({"a": 1}, splits=splits)})
        assert [verdict.status != "undecided" for verdict in found] == [decided] * 3
        assert all(verdict.ours for verdict in found)


def test_few_splits_of_the_file_decide_nothing_however_many_were_asked_for() -> None:
    runs = pd.concat([table({"a": 1}), table({"b": 1}, splits=4)])
    assert {verdict.status for verdict in uci.verdicts(uci.Config(), {"runs": runs})} == {"undecided"}


def test_numbers_and_figure_show_every_set_even_with_one_split() -> None:
    for splits in (SPLITS, 1):
        tables = {"runs": table({"a": 1, "long-name-of-a-set": -1}, splits=splits)}
        found = uci.numbers(uci.Config(), tables)
        assert all(shown["set"].tolist() == ["a", "long-name-of-a-set"] for shown in found.values())
        drawn = uci.figure(uci.Config(), tables)
        drawn.savefig(io.BytesIO(), format="png")
        [legend] = drawn.legends
        said = {text.get_text() for text in legend.get_texts()}
        assert said > set(METHODS.values()) - {METHODS["single"]}
        assert "single, stopped by a hold-out (the line at 0)" in said
        assert {"90%, as it should be", "even axis; beyond, logarithmic"} < said


def test_a_set_that_is_far_off_leaves_room_for_the_others() -> None:
    runs = table({"a": 1, "far off": 1})
    runs.loc[(runs["set"] == "far off") & (runs["method"] != "single"), "rmse"] *= 2
    errors = uci.figure(uci.Config(), {"runs": runs}).axes[0]
    near, far = (errors.transData.transform((x, 0))[0] - errors.transData.transform((0, 0))[0] for x in (5, 100))
    assert near > 0.3 * far  # on an even axis a twentieth


def test_numbers_have_two_digits_of_their_errors() -> None:
    runs = table({"a": 0}).assign(rmse=np.tile(np.arange(SPLITS), len(METHODS)) / 1000)
    shown = uci.numbers(uci.Config(), {"runs": runs})["RMSE, target's units: mean over splits ± standard error"]
    assert shown[METHODS["single"]].tolist() == ["0.0055 ± 0.0010"]
    assert shown["splits"].tolist() == [SPLITS]


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
    found = uci.parts(config)
    assert [part.name for part in found] == ["flat 0", "steep set 0", "flat 1"]
    assert [part.name for part in uci.parts(replace(config, sets=("steep set",)))] == ["steep set 0"]
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
        uci.parts(uci.QUICK)
    assert cli.main(["uci", "--quick", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(commands, "EXPERIMENTS", {"uci": uci, "toy": toy})
    assert cli.main(["reproduce", "--quick", "--out", str(tmp_path)]) == 0
    assert "left out: uci needs a file" in capsys.readouterr().err
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
        uci.parts(first)
    (tmp_path / "run").mkdir()
    second = replace(config, data=str(path), checksum="")
    carry_out("uci", uci, second, tmp_path / "run")
    path.write_bytes(content)
    with pytest.raises(RunError, match="holds a run with checksum"):
        carry_out("uci", uci, first, tmp_path / "run")
