"""Ideas for better estimates: what each does to sigma, and what is said of them."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from twinboot.experiments.runner.store import carry_out
from twinboot.experiments.seismic import estimates
from twinboot.experiments.seismic.descent import State
from twinboot.experiments.seismic.estimates import (
    DEFAULT,
    IDEAS,
    MORE,
    PRIOR,
    PUBLISHED,
    TASKS,
    Config,
    around,
    floored,
)
from twinboot.experiments.seismic.kernels import SIDE, Setting, problem


def state(sigma: torch.Tensor, field: torch.Tensor | None = None) -> State:
    fields = torch.zeros(1, SIDE, SIDE) if field is None else field[None]
    return State(fields, sigma[None], torch.ones(1))


def test_the_patches_around_share_their_variance() -> None:
    patches = torch.zeros(10, 10)
    patches[4, 4] = 3.0
    sigma = patches.repeat_interleave(3, 0).repeat_interleave(3, 1)
    found = around([], state(sigma))[0]
    assert found.shape == sigma.shape
    torch.testing.assert_close(found[9:18, 9:18], torch.ones(9, 9))  # 9 = 3^2 shared by nine
    assert not found[:9].any()
    even = torch.full((SIDE, SIDE), 0.5)
    torch.testing.assert_close(around([], state(even))[0], even)


def test_the_floor_is_the_prior_where_no_kernel_reaches_and_the_twins_sigma_where_that_is_more() -> None:
    given = problem(Setting(300, 0.3, 1.0, 1.0, 0.3), 0)
    field = torch.full((SIDE, SIDE), 0.4)
    found = floored([given], state(torch.zeros(SIDE, SIDE), field))[0]
    torch.testing.assert_close(found[0, 0].item(), 0.4)
    assert found[15, 15] < 0.3
    high = torch.full((SIDE, SIDE), 2.0)
    assert torch.equal(floored([given], state(high, field))[0], high)


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    config = Config(steps=25, seeds=2)
    run = carry_out("estimates", estimates, config, tmp_path)
    runs = run.tables["runs"]
    assert set(runs["idea"]) == set(IDEAS)
    assert len(runs) == len(IDEAS) * len(TASKS) * 2
    assert [verdict.status for verdict in estimates.verdicts(config, run.tables)] == ["undecided"] * 2
    assert [len(table) for table in estimates.numbers(config, run.tables).values()] == [len(IDEAS)] * len(TASKS)
    assert estimates.figure(config, run.tables).axes


def hand_made(**factors: float) -> dict[str, pd.DataFrame]:
    """Errors of 1 plus a little for each seed, times a factor for some ideas."""
    rows = [
        {
            "task": task,
            "idea": idea,
            "seed": seed,
            "error": factors.get({MORE: "four", "centered reset, to the end": "centered"}.get(idea, ""), 1.0)
            + 0.01 * seed,
            "correlation": 0.3,
            "sigma": 0.1,
            **{f"covered_{level}": 0.9 if idea == PRIOR else 0.5 for level in (0.5, 0.9, 0.95)},
        }
        for task in TASKS
        for idea in IDEAS
        for seed in range(5)
    ]
    return {"runs": pd.DataFrame(rows)}


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ({"four": 0.8, "centered": 0.8}, ["held", "held"]),
        ({"four": 1.0, "centered": 0.8}, ["partly", "held"]),
        ({"four": 0.8, "centered": 1.2}, ["held", "partly"]),
    ],
)
def test_a_limitation_holds_where_its_remedy_clearly_helps(factors: dict[str, float], expected: list[str]) -> None:
    found = estimates.verdicts(Config(seeds=5), hand_made(**factors))
    assert [verdict.status for verdict in found] == expected
    assert {DEFAULT, PUBLISHED} <= set(IDEAS)


@pytest.mark.parametrize("change", [{"steps": 0}, {"seeds": 1}, {"lr": 0.0}, {"decay": 1.5}])
def test_a_config_that_makes_no_sense_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be"):
        Config(**change)  # type: ignore[arg-type]
