"""What is said of the map of regimes, from made-up results of its runs."""

import math
from itertools import product

import pandas as pd
import pytest

from twinboot.experiments.seismic import regimes
from twinboot.experiments.seismic.regimes import AXES, PAPER, STOPPED, Config, by_chance, verdicts

CONFIG = Config()
RUNS = {pair for both in regimes.COMPARISONS.values() for pair in both}


def runs(change: dict[tuple[str, str], list[float]]) -> pd.DataFrame:
    """Runs with an error of 1, and for some of them so much more in the first tasks, nearly the same in each seed."""
    rows = []
    tasks = list(product(*(getattr(CONFIG, name) for name in AXES)))
    for k, task in enumerate(tasks):
        for run, state in RUNS:
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
    tables = {"runs": runs({PAPER: [-0.2] * wins + [0.2] * losses})}
    paper, _ = verdicts(CONFIG, tables)
    assert paper.status == status
    assert f"Clearly in {wins} of 48 tasks, the other way in {losses}" in paper.evidence
    assert "By chance 1.2 are expected in each direction." in paper.evidence


def test_chance_is_that_of_the_binomial_distribution() -> None:
    for tasks in (8, 48, 100):
        share = [math.comb(tasks, k) * 0.025**k * 0.975 ** (tasks - k) for k in range(tasks + 1)]
        most = by_chance(tasks)
        assert sum(share[: most + 1]) >= 0.95 > sum(share[:most])


def test_the_best_is_the_best_of_what_is_clear() -> None:
    tables = {"runs": runs({PAPER: [-0.1, -0.2]})}
    unclear = (tables["runs"]["run"] == PAPER[0]) & (tables["runs"]["noise"] == 0.3)
    tables["runs"].loc[unclear, "error"] -= 0.9 * (tables["runs"]["seed"] == 0)
    paper, _ = verdicts(CONFIG, tables)
    assert "at best by -20% (rows 300, noise 0.03, beta 1, width 1, spread 1)" in paper.evidence


def test_what_wins_have_in_common_names_them_and_needs_two() -> None:
    one, two = ({"runs": runs({STOPPED: [0.2] * n})} for n in (1, 2))
    assert "All" not in verdicts(CONFIG, one)[1].evidence
    expected = "All 2 that are clearly won against one that stops by a hold-out have rows 300 and noise 0.03 and beta 1"
    assert expected in verdicts(CONFIG, two)[1].evidence


def test_a_claim_about_two_maps_is_held_partly_where_they_differ() -> None:
    assert verdicts(CONFIG, {"runs": runs({STOPPED: [0.2] * 8})})[1].status == "partly"
    assert verdicts(CONFIG, {"runs": runs({STOPPED: [0.2] * 8, regimes.END: [0.2] * 8})})[1].status == "held"


def test_the_map_tells_changes_to_a_tenth_of_a_per_cent_and_names_its_axes() -> None:
    drawn = regimes.figure(CONFIG, {"runs": runs({PAPER: [-0.2, 0.004]})})
    first = drawn.axes[0]
    told = {text.get_text() for text in first.texts}
    assert all(len(text.partition(".")[2]) == 1 for text in told)
    assert "tanh(beta v)" in first.get_ylabel()
    assert "M measurements" in first.get_ylabel()
