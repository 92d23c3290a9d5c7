import io
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from twinboot.experiments.registry import EXPERIMENTS
from twinboot.experiments.runner.experiment import Part, Tick
from twinboot.experiments.runner.store import Run, carry_out
from twinboot.experiments.seismic import regimes
from twinboot.experiments.seismic.kernels import Setting, problem
from twinboot.experiments.seismic.regimes import AXES, COMPARISONS, END, OURS, PAPER, STOPPED

TINY = regimes.Config(rows=(64, 80), noise=(0.3,), beta=(1.0,), width=(1.0,), spread=(0.7, 1.0), seeds=2, steps=3)
HAND = regimes.Config(rows=(64,), noise=(0.3,), beta=(1.0,), width=(1.0, 2.0), spread=(0.7, 1.0), seeds=4)
TASKS = [(64, 0.3, 1.0, width, spread) for width in (1.0, 2.0) for spread in (0.7, 1.0)]
STATES = [(run, state) for run in regimes.RUNS for state in ("last", "clear")]


@pytest.fixture(scope="module")
def ticks() -> dict[str, int]:
    return {}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ticks: dict[str, int]) -> Run:
    def begin(part: Part) -> Tick:
        ticks[part.name] = 0

        def tick() -> None:
            ticks[part.name] += 1

        return tick

    directory: Path = tmp_path_factory.mktemp("regimes") / "run"
    return carry_out("regimes", regimes, TINY, directory, begin)


def table(**changes: list[float]) -> pd.DataFrame:
    """Runs of four tasks in which every error is 1 but for a little of each seed's own, plus what is named by
    `run_state`: for each task the change of its error."""
    jitter = np.random.default_rng(0).normal(0, 0.01, (len(STATES), 4))
    rows = []
    for k, (run, state) in enumerate(STATES):
        change = changes.get(f"{run}_{state}".replace("-", "_"), [0.0] * 4)
        for place, task in enumerate(TASKS):
            for seed in range(4):
                error = 1 + jitter[k, seed] + change[place]
                rows.append(
                    dict(zip(AXES, task, strict=True)) | {"run": run, "state": state, "seed": seed, "error": error}
                )
    return pd.DataFrame(rows)


def test_a_change_is_clear_where_its_interval_leaves_zero_out() -> None:
    found = regimes.compare(table(sample_last=[-0.5, 0.5, 0.0, 0.0]), PAPER, END)
    assert list(found[list(AXES)].itertuples(index=False, name=None)) == TASKS
    assert found["clear"].tolist() == [-1, 1, 0, 0]
    assert found["change"].tolist() == pytest.approx([-0.5, 0.5, 0, 0], abs=0.03)


def test_a_change_is_paired_by_seed_and_relative_to_the_other() -> None:
    """Seeds that differ much among each other, but all by the same between the two; by hand from four differences."""
    runs = table()
    runs = runs[(runs["width"] == 1.0) & (runs["spread"] == 0.7)].copy()
    base = runs["seed"].map({0: 1.0, 1: 5.0, 2: 20.0, 3: 2.0})
    gain = runs["seed"].map({0: 0.4, 1: 0.5, 2: 0.6, 3: 0.5})
    runs["error"] = base - np.where((runs["run"] == "centered") & (runs["state"] == "clear"), gain, 0.0)
    [found] = regimes.compare(runs.sample(frac=1, random_state=0), OURS, STOPPED).itertuples()
    assert found.clear == -1
    assert found.change == pytest.approx(-0.5 / 7)


def test_half_a_width_of_student_decides_what_is_clear() -> None:
    """Four differences of mean m and standard deviation s: 3.182 s / 2 on either side."""
    for mean, clear in ((-3.25 / 2, -1), (-3.10 / 2, 0), (3.25 / 2, 1)):
        runs = table()
        values = np.array([-1.0, 1.0, -1.0, 1.0]) / np.sqrt(4 / 3) + mean  # of standard deviation 1
        runs["error"] = 10.0
        ours = (runs["run"] == "sample") & (runs["state"] == "last")
        runs.loc[ours, "error"] = 10 + values[runs.loc[ours, "seed"]]
        assert set(regimes.compare(runs, PAPER, END)["clear"]) == {clear}


def test_one_seed_makes_nothing_clear() -> None:
    runs = table(sample_last=[-0.5] * 4)
    assert set(regimes.compare(runs[runs["seed"] == 0], PAPER, END)["clear"]) == {0}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ([-0.5] * 4, "held"),
        ([-0.5, 0.0, 0.0, 0.0], "not held"),  # one of four may be chance
        ([-0.5, -0.5, 0.5, 0.0], "held"),  # as may be one loss
        ([0.5, 0.5, 0.0, 0.0], "not held"),
        ([0.0] * 4, "not held"),
    ],
)
def test_both_claims_are_held_where_wins_are_more_than_chance_gives(changes: list[float], status: str) -> None:
    paper, ours = regimes.verdicts(HAND, {"runs": table(sample_last=changes)})
    assert paper.status == status
    assert ours.status == "not held"
    wins, losses = sum(c < 0 for c in changes), sum(c > 0 for c in changes)
    assert paper.evidence.startswith(f"Clearly in {wins} of 4 tasks, the other way in {losses}")
    paper, ours = regimes.verdicts(HAND, {"runs": table(centered_clear=changes)})
    assert ours.status == status
    assert paper.status == "not held"


def test_a_loss_against_a_hold_out_is_a_loss() -> None:
    runs = table(centered_clear=[-0.3] * 4, hold_out_clear=[-0.6] * 4)
    assert regimes.verdicts(HAND, {"runs": runs})[1].status == "partly"


def test_two_seeds_decide_nothing() -> None:
    runs = table(sample_last=[-0.5] * 4, centered_clear=[-0.5] * 4)
    config = regimes.Config(seeds=2)
    found = regimes.verdicts(config, {"runs": runs[runs["seed"] < 2]})
    assert [verdict.status for verdict in found] == ["undecided"] * 2


def test_what_all_wins_have_in_common_is_said() -> None:
    first, _ = regimes.verdicts(HAND, {"runs": table(sample_last=[-0.5, -0.7, 0.0, 0.0])})
    assert "All 2 that are clearly won have rows 64 and noise 0.3 and beta 1 and width 1." in first.evidence
    assert "(rows 64, noise 0.3, beta 1, width 1, spread 1)" in first.evidence  # where it is best


def test_numbers_count_the_tasks_and_give_each_ones_errors() -> None:
    counts, errors = regimes.numbers(HAND, {"runs": table(sample_last=[-0.5, -0.5, 0.5, 0.0])}).values()
    columns = ["tasks", "clearly lower error", "undecided", "clearly higher"]
    assert counts[columns].to_numpy().tolist() == [[4, 2, 1, 1], [4, 0, 4, 0], [4, 0, 4, 0]]
    assert list(errors[list(AXES)].itertuples(index=False, name=None)) == TASKS
    assert errors["sample, end"].astype(float).tolist() == pytest.approx([0.5, 0.5, 1.5, 1.0], abs=0.03)
    assert errors["Adam, end"].astype(float).tolist() == pytest.approx([1.0] * 4, abs=0.03)
    assert len(errors.columns) == len(AXES) + 2 + 6


def test_a_square_of_the_map_has_the_colour_and_number_of_its_task() -> None:
    drawn = regimes.figure(HAND, {"runs": table(sample_last=[-0.5, 0.5, 0.0, -0.25])})
    colours = dict(enumerate(patch.get_facecolor() for patch in drawn.legends[0].get_patches()))
    said = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert said == ["clearly lower error", "lower, not clearly", "higher, not clearly", "clearly higher error"]
    panel = drawn.axes[0]
    assert all(panel.images[0].cmap(shade) == colour for shade, colour in colours.items())
    shades = np.asarray(panel.images[0].get_array())
    assert shades.shape == (1, 4)
    assert shades[0, [0, 1, 3]].tolist() == [0, 3, 0]
    assert shades[0, 2] in (1, 2)
    numbers = [float(text.get_text()) for text in panel.texts]
    assert numbers == pytest.approx([-50, 50, 0, -25], abs=3)
    assert [label.get_text() for label in panel.get_xticklabels()][1] == "width 1\nspread 1"


def test_a_tiny_run_has_each_task_seed_and_state_once(run: Run) -> None:
    runs = run.tables["runs"]
    assert len(runs) == 2 * 2 * 2 * len(STATES)
    assert not runs.duplicated([*AXES, "run", "state", "seed"]).any()
    assert (runs[runs["state"] == "last"]["step"] == 3).all()
    assert np.isfinite(runs["error"]).all()


def test_a_row_is_labelled_with_the_task_it_is_of(run: Run) -> None:
    """After three small steps the error is near the mean square of that seed's truth, and the test loss near that of
    the field that is zero, which depends on the task."""
    runs = run.tables["runs"]
    for row in runs[(runs["run"] == "standard") & (runs["state"] == "last")].itertuples():
        made = problem(Setting(row.rows, row.noise, row.beta, row.width, row.spread), row.seed)
        assert row.error == pytest.approx(made.truth.square().mean().item(), rel=0.03)
        assert row.train == pytest.approx(made.observed.square().mean().item(), rel=0.03)


def test_each_part_ticks_as_often_as_it_says(run: Run, ticks: dict[str, int]) -> None:
    assert ticks == {part.name: part.ticks for part in regimes.parts(TINY)}


def test_a_tiny_run_has_numbers_verdicts_and_a_figure(run: Run) -> None:
    counts, errors = regimes.numbers(TINY, run.tables).values()
    assert counts["tasks"].tolist() == [4] * len(COMPARISONS)
    assert len(errors) == 4
    assert [verdict.status for verdict in regimes.verdicts(TINY, run.tables)] == ["undecided"] * 2
    drawn = regimes.figure(TINY, run.tables)
    assert isinstance(drawn, Figure)
    drawn.savefig(io.BytesIO(), format="png")


def test_the_map_is_over_what_the_paper_leaves_open() -> None:
    config = regimes.Config()
    assert all(len(getattr(config, name)) > 1 for name in AXES)
    assert 4096 in config.rows
    assert EXPERIMENTS["regimes"] is regimes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: (1.0, 0.0)}, f"{name} must be above 0") for name in ("noise", "beta", "width", "spread")),
        *(({name: ()}, f"{name} must have at least one value and none twice") for name in AXES),
        ({"noise": (0.3, 0.3)}, "noise must have at least one value and none twice"),
        ({"rows": (49, 300)}, "rows must be at least 50"),
        ({"spread": (1.5,)}, "spread at most 1"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"decay": 1.1}, "decay must be at most 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"seeds": 1}, "seeds must be at least 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regimes.Config(**change)


MAP = regimes.Config()
PAIRS = {pair for both in regimes.COMPARISONS.values() for pair in both}


def map_runs(change: dict[tuple[str, str], list[float]]) -> pd.DataFrame:
    """Runs with an error of 1, and for some of them so much more in the first tasks, nearly the same in each seed."""
    rows = []
    tasks = list(product(*(getattr(MAP, name) for name in AXES)))
    for k, task in enumerate(tasks):
        for run, state in PAIRS:
            more = dict(enumerate(change.get((run, state), []))).get(k, 0.0)
            for seed in range(4):
                error = 1 + more + 1e-3 * (seed % 2) * (more != 0)
                rows.append(
                    {**dict(zip(AXES, task, strict=True)), "run": run, "state": state, "seed": seed, "error": error}
                )
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("wins", "losses", "status"),
    [
        (1, 23, "not held"),
        (3, 0, "not held"),  # which chance may give
        (4, 0, "held"),
        (8, 3, "held"),
        (8, 5, "partly"),
        (5, 5, "not held"),
        (0, 0, "not held"),
    ],
)
def test_wins_count_where_they_are_more_than_chance_gives_and_than_losses(wins: int, losses: int, status: str) -> None:
    tables = {"runs": map_runs({PAPER: [-0.2] * wins + [0.2] * losses})}
    paper, _ = regimes.verdicts(MAP, tables)
    assert paper.status == status
    assert f"Clearly in {wins} of 48 tasks, the other way in {losses}" in paper.evidence
    assert "By chance 1.2 are expected in each direction." in paper.evidence


def test_chance_is_that_of_the_binomial_distribution() -> None:
    for tasks in (8, 48, 100):
        share = [math.comb(tasks, k) * 0.025**k * 0.975 ** (tasks - k) for k in range(tasks + 1)]
        most = regimes.by_chance(tasks)
        assert sum(share[: most + 1]) >= 0.95 > sum(share[:most])


def test_the_best_is_the_best_of_what_is_clear() -> None:
    tables = {"runs": map_runs({PAPER: [-0.1, -0.2]})}
    unclear = (tables["runs"]["run"] == PAPER[0]) & (tables["runs"]["noise"] == 0.3)
    tables["runs"].loc[unclear, "error"] -= 0.9 * (tables["runs"]["seed"] == 0)
    paper, _ = regimes.verdicts(MAP, tables)
    assert "at best by -20% (rows 300, noise 0.03, beta 1, width 1, spread 1)" in paper.evidence


def test_what_wins_have_in_common_names_them_and_needs_two() -> None:
    one, two = ({"runs": map_runs({STOPPED: [0.2] * n})} for n in (1, 2))
    assert "All" not in regimes.verdicts(MAP, one)[1].evidence
    expected = "All 2 that are clearly won against Adam stopped by a hold-out have rows 300 and noise 0.03 and beta 1"
    assert expected in regimes.verdicts(MAP, two)[1].evidence


def test_a_claim_about_two_maps_is_held_partly_where_they_differ() -> None:
    assert regimes.verdicts(MAP, {"runs": map_runs({STOPPED: [0.2] * 8})})[1].status == "partly"
    assert regimes.verdicts(MAP, {"runs": map_runs({STOPPED: [0.2] * 8, regimes.END: [0.2] * 8})})[1].status == "held"


def test_the_map_tells_changes_to_a_tenth_of_a_per_cent_and_names_its_axes() -> None:
    drawn = regimes.figure(MAP, {"runs": map_runs({PAPER: [-0.2, 0.004]})})
    first = drawn.axes[0]
    told = {text.get_text() for text in first.texts}
    assert all(len(text.partition(".")[2]) == 1 for text in told)
    assert "tanh(beta v)" in first.get_ylabel()
    assert "M measurements" in first.get_ylabel()
