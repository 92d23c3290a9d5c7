import io

import numpy as np
import pandas as pd
import pytest

from twinboot.experiments import uci
from twinboot.experiments.uci import differences
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
    """What splits share cancels: the interval is that of the methods' own jitter."""
    mean, half = differences(table({"a": 0.5}), "rmse", "draws")["a"]
    own = np.roll(JITTER, 3) - JITTER
    assert mean == pytest.approx(own.mean() - 0.5)
    assert half == pytest.approx(2.201 * own.std(ddof=1) / np.sqrt(SPLITS), rel=1e-3)  # Student, 11 degrees of freedom


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
