import pandas as pd
import pytest
from matplotlib.figure import Figure

from twinboot.experiments.wells import basins

SMALL = basins.Config(seeds=300)


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    [part] = basins.parts(SMALL)
    return part.compute(lambda: None)


def test_defaults_have_enough_seeds_and_the_papers_schedule() -> None:
    config = basins.Config()
    assert config.seeds >= 100
    assert (config.resets, config.epochs) == ((1, 2, 6, 12), 40)


def test_resets_keep_twins_together_that_would_part(tables: dict[str, pd.DataFrame]) -> None:
    """Without resets about as many split as for a first pull that decides, 1/3; the noise that sigma drives, as wide as
    the split, brings some of them together again. With resets most of those are gone."""
    found = basins.summary(tables["runs"])
    assert list(found.index) == ["none", "mean", "sample", "centered"]
    none = found.loc["none"]
    assert 0.2 < none["apart"] < 1 / 3 + 4 * none["apart_error"]
    for reset in ("mean", "sample", "centered"):
        assert found.loc[reset, "apart"] + 4 * found.loc[reset, "apart_error"] < none["apart"]
    assert none["sigma_apart"] > 10 * basins.exact_line(SMALL)


def test_sigma_in_one_well_is_the_exact_one(tables: dict[str, pd.DataFrame]) -> None:
    """To the order of 1 / M, which the line leaves out, and four standard errors."""
    found, exact = basins.summary(tables["runs"]), basins.exact_line(SMALL)
    assert abs(found.loc["mean", "sigma"] / exact - 1) < 4 * found.loc["mean", "sigma_error"] / exact + 1 / SMALL.size


def test_picture_shows_a_run_that_splits_without_resets(tables: dict[str, pd.DataFrame]) -> None:
    paths, runs = tables["paths"], tables["runs"]
    [shown] = paths["run"].unique()
    own = runs[(runs["reset"] == "none") & (runs["seed"] == shown)].iloc[0]
    assert {own["well_1"], own["well_2"]} == {"left", "right"}
    last = paths[(paths["reset"] == "none") & (paths["step"] == paths["step"].max())]
    assert last["sigma"].unique() == pytest.approx([own["sigma"]])


def test_verdicts_figure_and_numbers(tables: dict[str, pd.DataFrame]) -> None:
    splits, keeps, measures = basins.verdicts(SMALL, tables)
    assert splits.status == "partly"
    assert keeps.status in ("held", "partly")
    assert measures.status == "held"
    assert isinstance(basins.figure(SMALL, tables), Figure)
    [legend] = basins.figure(SMALL, tables).legends
    said = {text.get_text() for text in legend.get_texts()}
    assert said == {
        *("the wells, $\\mu_1$ and $\\mu_2$", "start", "mean at a reset", "mean loss for endless data"),
        *(f"twin {k}{end}" for k in (1, 2) for end in ("", ", end")),
        *("$\\sigma$, every 40 steps", "$\\sigma$ at the end"),
    }
    [shown] = basins.numbers(SMALL, tables).values()
    assert list(shown["reset"]) == ["no reset", "mean reset", "sampling reset", "centered reset"]


def test_runs_that_are_not_down_in_their_well_are_named(tables: dict[str, pd.DataFrame]) -> None:
    """They can double the root mean square, which nobody would understand."""
    runs = tables["runs"]
    runs = runs[(runs["well_1"] != runs["well_2"]) | (runs["sigma"] < 5 * basins.exact_line(SMALL))]
    [plain] = basins.numbers(SMALL, {"runs": runs})
    assert plain.endswith(f"median {basins.MEDIAN * basins.exact_line(SMALL):.4f}")
    strays = pd.DataFrame({"reset": ["sample", "none", "sample"], "seed": 300, "well_1": "left", "well_2": "left"})
    lost = pd.DataFrame({"reset": ["mean"], "seed": 300, "well_1": "neither", "well_2": "neither", "sigma": 9.0})
    [title] = basins.numbers(SMALL, {"runs": pd.concat([runs, strays.assign(sigma=[0.8, 0.7, 0.6]), lost])})
    said = "still on their way into the same well (no reset: sigma 0.70; sampling reset: sigma 0.60, 0.80)"
    assert title == f"{plain}; the rms includes runs whose twins are {said}"


def test_few_runs_decide_nothing(tables: dict[str, pd.DataFrame]) -> None:
    few = {name: table[table["seed"] < 5] if name == "runs" else table for name, table in tables.items()}
    statuses = [verdict.status for verdict in basins.verdicts(basins.Config(seeds=5), few)]
    assert statuses == ["undecided"] * 3


def test_resets_that_do_nothing_are_not_held(tables: dict[str, pd.DataFrame]) -> None:
    runs = tables["runs"]
    none = runs[runs["reset"] == "none"]
    same = pd.concat([none.assign(reset=reset) for reset in ("none", "mean", "sample", "centered")])
    assert basins.verdicts(SMALL, tables | {"runs": same})[1].status == "not held"


def test_a_twin_in_neither_well_counts_as_lost_and_not_as_apart() -> None:
    wells = [("left", "left", 0.1), ("left", "right", 2.0), ("left", "neither", 5.0), ("neither", "neither", 7.0)]
    runs = pd.DataFrame(wells, columns=["well_1", "well_2", "sigma"]).assign(reset="none")
    found = basins.summary(runs).loc["none"]
    assert (found["apart"], found["lost"]) == (0.25, 0.5)
    assert (found["sigma"], found["sigma_apart"], found["sigma_median"]) == pytest.approx((0.1, 2.0, 0.1))


@pytest.mark.parametrize(("apart", "error"), [(0, 1.5 / 100), (100, 1.5 / 100), (1, 1.5 / 100), (50, 0.05)])
def test_the_error_of_a_share_is_binomial_and_at_the_rim_that_of_three_runs_in_all(apart: int, error: float) -> None:
    """Two errors are then 3 of the 100 runs, which chance may have kept away."""
    other = ["right"] * apart + ["left"] * (100 - apart)
    runs = pd.DataFrame({"reset": "none", "well_1": "left", "well_2": other, "sigma": 0.1})
    assert basins.summary(runs).loc["none", "apart_error"] == pytest.approx(error)
