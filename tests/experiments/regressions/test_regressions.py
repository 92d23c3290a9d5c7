from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from twinboot.experiments import regressions
from twinboot.experiments.regressions import Config, coverage, summary
from twinboot.experiments.runner.store import carry_out

PARAMETERS = ["intercept", "slope[0]", "slope[1]"]


def runs(sets: int = 200, se: float = 1.0, covered: float = 0.95, n: int = 200) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frames = []
    for number in range(sets):
        inside = float(number < covered * sets)
        frame = {"task": "linear", "n": n, "set": number, "parameter": PARAMETERS, "closed": 1.0}
        frame |= {"estimate": rng.normal(size=3), "se": se, "quantile_se": se, "robust_se": 1.0}
        frames.append(pd.DataFrame({**frame, "t": inside, "percentile": inside, "bca": inside, "robust": inside}))
    return pd.concat(frames, ignore_index=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["held", "held"]),
        ({"covered": 0.92}, ["not held", "held"]),
        ({"se": 1.5}, ["held", "not held"]),
        ({"sets": 50}, ["undecided", "undecided"]),
    ],
)
def test_verdicts(changes: dict[str, float], expected: list[str]) -> None:
    table = runs(**changes)  # type: ignore[arg-type]
    config = Config(sets=table["set"].nunique())
    assert [verdict.status for verdict in regressions.verdicts(config, {"runs": table})] == expected


def test_coverage_is_averaged_over_parameters_and_has_an_error_over_sets() -> None:
    [row] = coverage(runs()).to_dict("records")
    assert row["t"] == pytest.approx(0.95)
    assert row["t_error"] == pytest.approx(np.sqrt(0.95 * 0.05 / 199), rel=0.01)  # the parameters agree here
    assert summary(runs())["se"].mean() == pytest.approx(1, abs=0.15)


def test_a_quick_run(tmp_path: Path) -> None:
    pytest.importorskip("statsmodels", reason="the extra compare is not installed")
    config = Config(tasks=("linear", "clusters"), sizes=(200,), sets=3, rounds=50)
    run = carry_out("regressions", regressions, config, tmp_path)
    found = summary(run.tables["runs"])
    assert len(found) == 6
    # 100 draws each: the mean of three standard errors is known to about 4 %.
    assert (found["se"] / found["robust_se"] - 1).abs().max() < 0.2
    assert regressions.figure(config, run.tables).axes
    assert [verdict.status for verdict in regressions.verdicts(config, run.tables)] == ["undecided"] * 2


def test_unknown_tasks_and_small_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown task 'ridge'"):
        Config(tasks=("ridge",))
    with pytest.raises(ValueError, match="sizes must be at least 50"):
        Config(sizes=(20,))
