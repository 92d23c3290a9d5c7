import math
from dataclasses import replace

import pandas as pd
import pytest
from matplotlib.figure import Figure

from twinboot.experiments.wells import sweeps

SMALL = sweeps.Config(
    seeds=150,
    size=100,
    sizes=(50, 200),
    noises=(0.1, 0.4),
    rates=(0.05, 0.2),
    batches=(5, 25),
    epochs=30,
    rate_steps=(16, 23),
)


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    parts = [part.compute(lambda: None)["sigma"] for part in sweeps.parts(SMALL)]
    return {"sigma": pd.concat(parts, ignore_index=True)}


def test_defaults_follow_the_paper_and_have_enough_seeds() -> None:
    config = sweeps.Config()
    assert (config.resets, config.epochs, config.reset) == ((1, 2, 6, 12), 40, "mean")
    assert config.seeds >= 50


def test_sigma_lies_on_the_exact_line_for_every_size_noise_and_datum(tables: dict[str, pd.DataFrame]) -> None:
    """Within four standard errors, and the order of 1 / M that the line leaves out."""
    found = sweeps.summary(SMALL, tables["sigma"])
    data = found[found["sweep"].isin(["size", "noise", "datum"])]
    sizes = data["value"].where(data["sweep"] == "size", SMALL.size).astype(float)
    assert len(data) == 7
    assert found["rms"].gt(0).all()
    assert ((data["rms"] - data["exact"]).abs() < 4 * data["error"] + data["exact"] / sizes).all()
    assert (data["apart"] == 0).all()


def test_sigma_is_flat_in_rate_and_batch(tables: dict[str, pd.DataFrame]) -> None:
    """On the same data only the noise that is left at the end differs: the margin of the verdict, and four errors."""
    found = sweeps.summary(SMALL, tables["sigma"])
    flat = found[found["sweep"].isin(["lr", "batch"])]
    assert len(flat) == 4
    assert ((flat["ratio"] - 1).abs() < 0.05 + 4 * flat["ratio_error"]).all()
    assert (flat["ratio_error"] < flat["error"] / flat["rms"]).all()  # what pairing is for


def test_papers_line_holds_only_if_the_pull_matches_the_curvature(tables: dict[str, pd.DataFrame]) -> None:
    found = sweeps.summary(SMALL, tables["sigma"])
    ways = found[found["sweep"] == "datum"].set_index("value")
    ratio = ways["rms"] / ways["paper"]
    assert abs(ratio["matched"] - 1) < 4 * ways.loc["matched", "error"] / ways.loc["matched", "paper"] + 0.01
    assert ratio["shift"] > 1.5
    assert ratio["tilt"] < 0.75


def test_verdicts_figure_and_numbers(tables: dict[str, pd.DataFrame]) -> None:
    size, noise, lr, batch, dashed = sweeps.verdicts(SMALL, tables)
    assert [v.status for v in (size, noise, lr, batch, dashed)] == ["held", "partly", "held", "held", "partly"]
    assert "smear the wells" in noise.evidence
    assert isinstance(sweeps.figure(SMALL, tables), Figure)
    [legend] = sweeps.figure(SMALL, tables).legends
    said = {text.get_text() for text in legend.get_texts()}
    assert said == {
        *("mean over seeds", "mean ± std of seeds", "rms over seeds ± 2 errors"),
        *("exact (sandwich)", "paper's line", "value in the other panels"),
    }
    [shown] = sweeps.numbers(SMALL, tables).values()
    assert len(shown) == 11


def test_what_is_off_is_said_with_its_reason(tables: dict[str, pd.DataFrame]) -> None:
    sigma = tables["sigma"].copy()
    lost, small = sigma["point"] == "lr-0.2", sigma["point"] == "batch-25"
    sigma.loc[lost, "sigma"] *= 3
    sigma.loc[lost, "one_well"] = False
    sigma.loc[small, "sigma"] /= 3
    _, _, lr, batch, _ = sweeps.verdicts(SMALL, {"sigma": sigma})
    assert lr.status == batch.status == "partly"
    assert "lr = 0.2" in lr.evidence
    assert "not in one well" in lr.evidence
    assert "too few or too small" in batch.evidence


def test_sigma_that_ignores_the_number_of_data_is_not_held(tables: dict[str, pd.DataFrame]) -> None:
    sigma = tables["sigma"].copy()
    sigma.loc[sigma["point"].str.startswith("size"), "sigma"] *= math.sqrt(2)
    assert sweeps.verdicts(SMALL, {"sigma": sigma})[0].status == "not held"


def test_points_that_are_the_base_setting_run_once() -> None:
    config = sweeps.Config(sizes=(50,), noises=(0.3,), rates=(0.1, 0.2), batches=(10,))
    names = [part.name for part in sweeps.parts(config)]
    assert names == ["size-50", "noise-0.3", "base", "lr-0.2", "datum-tilt", "datum-matched"]


def test_wrong_points_are_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match="noise"):
        sweeps.Config(noises=(0.1, -1.0))
    with pytest.raises(ValueError, match="at least one value"):
        sweeps.Config(rates=())
    with pytest.raises(ValueError, match="no two wells"):
        sweeps.parts(sweeps.Config(noises=(1.5,)))


def test_the_ratio_to_the_base_setting_and_its_error_by_hand() -> None:
    """Squares 5, 11 on 1, 3: the ratio of the means is 4, its residuals are 1 and -1, so its standard error is
    sqrt(2) / 2 / sqrt(2) = 1/2; the root is 2, and its error 1/2 / (2 * 2)."""
    config = sweeps.Config(seeds=2, sizes=(50,), noises=(0.2,), rates=(0.2,), batches=(5,))
    squares = {part.name: (5.0, 11.0) if part.name == "lr-0.2" else (1.0, 3.0) for part in sweeps.parts(config)}
    rows = [(name, math.sqrt(square), True) for name, both in squares.items() for square in both]
    found = sweeps.summary(config, pd.DataFrame(rows, columns=["point", "sigma", "one_well"])).set_index("sweep")
    assert found.loc["lr", ["ratio", "ratio_error"]].tolist() == pytest.approx([2.0, 1 / 8])
    assert found.loc["batch", ["ratio", "ratio_error"]].tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize(("noise", "bends"), [(0.3, False), (0.33, True)])
def test_the_bend_of_the_exact_line_is_told_from_a_tenth_on(noise: float, bends: bool) -> None:
    config = sweeps.Config(seeds=100, sizes=(50,), noises=(noise,), rates=(0.2,), batches=(5,))
    point = next(setting for name, setting in sweeps.points(config) if name == "noise")
    little = replace(point, noise=0.003)
    assert (sweeps.exact_line(point) / sweeps.exact_line(little) > 1.1 * noise / 0.003) == bends
    names = [part.name for part in sweeps.parts(config)]
    far_off = pd.DataFrame(
        {"point": name, "sigma": 1.0 + i / 1000, "one_well": True} for name in names for i in range(100)
    )
    size, told, *_ = sweeps.verdicts(config, {"sigma": far_off})
    assert (size.status, told.status) == ("not held", "not held")
    assert ("smear the wells" in told.evidence) == bends
    assert "smear the wells" not in size.evidence  # which is off too, but its line is straight
