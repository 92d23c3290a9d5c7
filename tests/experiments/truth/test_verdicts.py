import numpy as np
import pandas as pd
import pytest

from twinboot.experiments.truth.verdicts import DROPOUT, judge

JITTER = np.random.default_rng(0).normal(0, 0.01, 5)


def scored(cells: dict[tuple[int, float], float], column: str, method: str = "fit", sets: int = 5) -> pd.DataFrame:
    """Scores in which a method has these values in a column, and is right otherwise."""
    frames = []
    for (size, lr), value in cells.items():
        for row in ("plain", DROPOUT, method):
            right = {"ratio": 1.0, "rank": 0.7, "covered": 0.9}
            right |= {column: value} if row == method else {}
            frame = pd.DataFrame({"set": range(5), **{name: v + JITTER for name, v in right.items()}})
            frames.append(frame.assign(size=size, lr=lr, method=row))
    found = pd.concat(frames)
    found.loc[found["method"] == "plain", ["ratio", "rank", "covered"]] = np.nan
    return found[found["set"] < sets]


CELLS = ((500, 0.001), (500, 0.003), (1000, 0.001))


@pytest.mark.parametrize("method", ["fit", "error_bars"])
@pytest.mark.parametrize(
    ("column", "values", "status"),
    [
        ("ratio", (0.83, 1.0, 1.22), "held"),
        ("ratio", (0.75, 1.0, 1.22), "partly"),
        ("ratio", (0.75, 1.3, 1.22), "not held"),
        ("rank", (0.75, 0.7, 0.7), "held"),
        ("rank", (0.6, 0.7, 0.7), "partly"),
        ("rank", (0.6, 0.6, 0.7), "not held"),
        ("covered", (0.87, 0.93, 0.9), "held"),
        ("covered", (0.83, 0.93, 0.9), "partly"),
        ("covered", (0.83, 0.97, 0.9), "not held"),
    ],
)
def test_a_claim_must_hold_in_every_cell(method: str, column: str, values: tuple[float, ...], status: str) -> None:
    found = judge(scored(dict(zip(CELLS, values, strict=True)), column, method))
    assert len(found) == 3
    assert all(verdict.ours and method in verdict.claim for verdict in found)
    expected = {"ratio": 0, "rank": 1, "covered": 2}[column]
    assert [verdict.status for verdict in found] == [status if k == expected else "held" for k in range(3)]
    assert "(N 500, lr 0.003)" in found[0].evidence


def test_few_sets_decide_nothing() -> None:
    assert {verdict.status for verdict in judge(scored({(500, 0.1): 3.0}, "ratio", sets=4))} == {"undecided"}


def test_methods_that_were_not_run_are_not_judged() -> None:
    found = scored({(500, 0.1): 1.0}, "ratio")
    assert judge(found[found["method"] != "fit"]) == []
    assert len(judge(found[found["method"] != DROPOUT])) == 2
