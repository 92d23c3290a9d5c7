import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from twinboot.experiments import nist
from twinboot.experiments.nist import Config, scores, verdict_of
from twinboot.experiments.runner.store import carry_out


def tables(
    *, error: float = 1e-9, se: float = 1.0, said: str = "", few: bool = False, tails: float = 1.0
) -> dict[str, pd.DataFrame]:
    """One set with two parameters, whose classical standard errors are 1; the first start finds nothing."""
    rows: list[dict[str, Any]] = []
    for start in (1, 2):
        for parameter, certified in (("b1", 2.0), ("b2", -3.0)):
            rows.append(
                {
                    "set": "toy",
                    "level": "lower",
                    "samples": 20,
                    "start": start,
                    "parameter": parameter,
                    "certified": certified,
                    "deviation": 0.8,
                    "estimate": math.nan if start == 1 else certified * (1 + error),
                    "se": math.nan if start == 1 else se if parameter == "b2" else 1.0,
                    "quantile_se": 1.0,
                    "sandwich": 0.9,
                    "few": few,
                    "said": "it did not come to a minimum." if start == 1 else said or math.nan,
                    "seconds": 0.1,
                }
            )
    classical = {"set": "toy", "parameter": ["b1", "b2"], "se": 1.0, "lost": 0.0, "seconds": 2.0}
    classical |= {"quantile_se": [1.0, 1 / tails]}
    return {"twins": pd.DataFrame(rows), "classical": pd.DataFrame(classical)}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "right"),
        ({"se": 1.14}, "right"),
        ({"se": 1.16}, "wrong"),
        ({"se": 1.16, "few": True}, "few"),
        ({"se": 0.1, "tails": 5.0}, "rare"),
        ({"se": math.nan, "said": "b2 runs away."}, "said"),
        ({"error": 1e-5}, "wrong"),
    ],
)
def test_a_set_is_right_or_says_why_not(changes: dict[str, Any], word: str) -> None:
    found = scores(tables(**changes))
    assert verdict_of(found) == word
    assert (found["start"] == 2).all()


def test_digits_count_from_the_worst_parameter() -> None:
    assert scores(tables(error=1e-4))["digits"].min() == pytest.approx(4, abs=1e-6)


def test_a_quick_run_finds_the_certified_estimates(tmp_path: Path) -> None:
    config = Config(sets=("Misra1a",), rounds=50, fits=100)
    run = carry_out("nist", nist, config, tmp_path)
    found = scores(run.tables)
    assert found["digits"].min() > 6
    # 100 draws and 100 fits: four standard errors of the ratio are 4 * sqrt(2 / 200).
    assert (found["se_ratio"] - 1).abs().max() < 0.45
    assert nist.verdicts(config, run.tables)[0].status == "held"
    assert len(nist.numbers(config, run.tables)) == 3
    assert nist.figure(config, run.tables).axes


def test_other_files_and_unknown_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no set 'Filip'"):
        nist.parts(Config(sets=("Filip",)))
    (tmp_path / "a.dat").write_text("one")
    config = Config(data=str(tmp_path))
    (tmp_path / "a.dat").write_text("two")
    with pytest.raises(ValueError, match="is not a file of NIST's nonlinear regressions"):
        nist.parts(config)
