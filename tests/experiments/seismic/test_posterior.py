import io
import math
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from loops import seeded

from twinboot.experiments.registry import EXPERIMENTS
from twinboot.experiments.runner.store import Run, carry_out
from twinboot.experiments.seismic import operator, posterior, regimes
from twinboot.experiments.seismic.descent import LEVELS
from twinboot.experiments.seismic.kernels import SIDE, Problem, Setting, problem, slopes
from twinboot.experiments.seismic.posterior import (
    AXES,
    HELD,
    LAPLACE,
    ORACLE,
    PERTURBED,
    PRIOR,
    RESAMPLED,
    ROWS,
    SMALL,
    TWINS,
    Small,
    Tikhonov,
)

TINY = posterior.Config(
    rows=(60,), noise=(0.3,), beta=(1.0,), width=(1.0,), steps=3, rounds=2, exact_rounds=2, mala=100
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory: Path = tmp_path_factory.mktemp("posterior") / "run"
    return carry_out("posterior", posterior, TINY, directory, lambda part: lambda: None)


def test_tasks_are_those_of_the_map_of_regimes() -> None:
    ours, theirs = posterior.Config(), regimes.Config()
    for name in (*AXES, "steps", "lr", "decay", "seed"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert len(posterior.settings(ours)) == 48
    assert EXPERIMENTS["posterior"] is posterior


@cache
def given(seed: int = 0) -> Problem:
    return problem(Setting(120, 0.3, 1.0, 1.0, 0.8), seed)


@pytest.mark.parametrize("weight", [1e-3, 0.1, 10.0])
def test_tikhonov_by_one_decomposition_is_that_of_the_normal_equations(weight: float) -> None:
    """The response, the degrees of freedom and the posterior variance, each from its definition."""
    p, w = given(), torch.tensor(weight, dtype=torch.double)
    rows, y = p.kernels.double(), p.observed.double()
    inverse = torch.linalg.inv(rows.T @ rows + w * slopes())
    solved = Tikhonov(p)
    u = inverse @ rows.T @ y
    torch.testing.assert_close(solved.response(w), u, atol=1e-6, rtol=1e-5)
    squares, free = solved.residual(w)
    assert free.item() == pytest.approx(120 - torch.trace(rows @ inverse @ rows.T).item(), rel=1e-6)
    assert squares.item() == pytest.approx((rows @ u - y).square().sum().item(), rel=1e-5)
    variance = squares / free * inverse.diagonal()
    sigma = variance.sqrt() / (1 - u.clamp(-0.999, 0.999).square())
    torch.testing.assert_close(solved.sigma(w).flatten(), sigma.float(), atol=1e-5, rtol=1e-4)


def test_the_oracle_is_no_worse_than_any_weight_and_gcv_knows_no_truth() -> None:
    p = given()
    solved = Tikhonov(p)
    errors = [(solved.field(weight) - p.truth).square().mean().item() for weight in solved.weights]
    best = (posterior.tikhonov_by_truth(p) - p.truth).square().mean().item()
    assert best == min(errors)
    assert errors[0] > best < errors[-1]  # the weights reach far enough on both sides
    field, _ = posterior.tikhonov_by_gcv(p)
    assert best <= (field - p.truth).square().mean().item() < min(errors[0], errors[-1])


def linear() -> Small:
    return posterior.small(0, 0.0)


def test_the_mode_has_no_slope_and_the_curvature_is_that_of_the_loss() -> None:
    for made in (linear(), posterior.small(0, 2.0)):
        mode = made.mode().requires_grad_()
        [slope] = torch.autograd.grad(made.loss(mode[None]).sum(), mode)
        assert slope.abs().max() < 1e-8
    data, prior = linear().curvature(linear().mode())
    hessian = torch.autograd.functional.hessian(lambda v: linear().loss(v[None]).sum(), linear().mode())
    torch.testing.assert_close(data + prior, hessian)


def test_the_small_problem_has_a_side_that_is_hardly_measured() -> None:
    sigma = posterior.exact_sigma(linear()).view(SMALL, SMALL)
    assert sigma[:, -1].mean() > 1.5 * sigma[:, 2].mean()


def test_mala_finds_the_exact_posterior_of_a_linear_problem() -> None:
    """64 chains with a correlation time of some tens of steps: a few thousand independent draws, so 2 % each."""
    sigma, accepted = posterior.by_mala(linear(), 2000)
    exact = posterior.exact_sigma(linear())
    assert (sigma / exact - 1).square().mean().sqrt() < 0.03
    assert 0.4 < accepted < 0.75  # 0.574 is the best for many dimensions


def test_the_sandwich_is_the_spread_of_minima_over_resampled_measurements() -> None:
    """2,000 minima in closed form, whose standard deviations are known to 1 / sqrt(4000) = 1.6 %; beyond that the
    sandwich is exact up to terms of the order of 1 / M."""
    made = linear()
    generator = seeded(1)
    _, prior = made.curvature(made.mode())
    root = torch.linalg.cholesky(prior + 1e-9 * torch.eye(SMALL**2, dtype=torch.double))
    n, found = len(made.observed), []
    for _ in range(2000):
        counts = torch.bincount(torch.randint(n, (n,), generator=generator), minlength=n).double()
        rows = made.rows * counts[:, None] / made.noise**2
        noise = root @ torch.randn(SMALL**2, generator=generator, dtype=torch.double)
        found.append(torch.linalg.solve(made.rows.T @ rows + prior, rows.T @ made.observed + noise))
    ratio = torch.stack(found).std(0) / posterior.sandwich_sigma(made)
    assert (ratio - 1).square().mean().sqrt() < 0.05


@pytest.mark.parametrize("kind", [PERTURBED, RESAMPLED])
def test_sigma_of_invert_is_that_of_the_exact_posterior(kind: str) -> None:
    """`invert` itself. With 120 draws a standard deviation is known to 1 / sqrt(238) = 6.5 %, in the root mean square
    over 100 correlated cells; the sandwich adds terms of the order of 1 / M."""
    made = linear()
    expected = posterior.exact_sigma(made) if kind == PERTURBED else posterior.sandwich_sigma(made)
    sigma = posterior.by_invert(made, 60, kind, 0)
    assert (sigma / expected - 1).square().mean().sqrt() < 1.5 / math.sqrt(238)


def test_scores_of_invert_are_those_of_its_own_intervals() -> None:
    p = given()
    found = posterior.by_prior(p, 3, 0)
    half = {level: found.interval(level)[1] - found.field for level in LEVELS}
    row = posterior.score(p, found.field, found.sigma, half)
    low, high = found.interval(0.9)
    assert row["covered_0.9"] == pytest.approx(((low < p.truth) & (p.truth < high)).float().mean().item())
    assert row["error"] == pytest.approx((found.field - p.truth).square().mean().item())
    assert operator(p)(found.field).shape == p.observed.shape
    assert set(posterior.score(p, found.field)) == {"error"}


def test_every_method_has_every_task_and_seed(run: Run) -> None:
    runs = run.tables["runs"]
    assert set(runs["method"]) == set(ROWS)
    assert len(runs) == len(ROWS) * 2 * 2  # spreads and seeds
    assert set(runs[runs["covered_0.9"].notna()]["method"]) == {PRIOR, TWINS, LAPLACE}
    assert len(run.tables["exact"]) == 4 * SMALL**2


def test_numbers_and_figure_are_of_all_tasks(run: Run) -> None:
    shown, exact, tasks = posterior.numbers(TINY, run.tables).values()
    assert shown["method"].tolist() == list(ROWS)
    assert len(exact) == 4
    assert len(tasks) == 2
    drawn = posterior.figure(TINY, run.tables)
    drawn.savefig(io.BytesIO(), format="png")
    assert len(drawn.axes) == 3


def test_few_tasks_decide_nothing_but_the_exact_posterior(run: Run) -> None:
    *tasks, exact = posterior.verdicts(TINY, run.tables)
    assert [verdict.status for verdict in tasks] == ["undecided"] * 3
    assert exact.status != "undecided"


def tables(hold: float = 0.9, error: float = 0.5, oracle: float = 0.5, off: float = 1.0) -> dict[str, pd.DataFrame]:
    """48 tasks with these means; in every third the intervals of the prior hold nine tenths whatever is asked."""
    errors = {PRIOR: error, TWINS: 1.0, HELD: 2.0, ORACLE: oracle, LAPLACE: 0.6}
    frames = []
    config = posterior.Config()
    for k, task in enumerate(product(*(getattr(config, name) for name in AXES))):
        for method in ROWS:
            share = (0.9 if k % 3 == 0 else hold) if method == PRIOR else 0.6
            row = dict(zip(AXES, task, strict=True)) | {"method": method, "seed": 0, "error": errors[method]}
            known = method in (PRIOR, TWINS, LAPLACE)
            row |= {f"covered_{level}": share if known else math.nan for level in LEVELS}
            frames.append(row | {"correlation": 0.3, "seconds": 1.0, "length": 8.0})
    exact = [
        pd.DataFrame({"case": case, "kind": kind, "truth": 1.0, "sigma": off, "expected": 1.0}, index=range(4))
        for case, kind in product(("linear", "tanh"), (PERTURBED, RESAMPLED))
    ]
    return {"runs": pd.DataFrame(frames), "exact": pd.concat(exact)}


@pytest.mark.parametrize(
    ("change", "number", "status"),
    [
        ({}, 0, "held"),
        ({"hold": 0.8}, 0, "not held"),  # 16 of 48
        ({"hold": 0.97}, 0, "not held"),
        ({}, 1, "held"),
        ({"error": 1.1}, 1, "not held"),
        ({}, 2, "held"),
        ({"oracle": 0.4}, 2, "not held"),
        ({}, 3, "held"),
        ({"off": 1.1}, 3, "partly"),
        ({"off": 0.8}, 3, "not held"),
    ],
)
def test_a_claim_is_judged_by_its_own_number(change: dict[str, Any], number: int, status: str) -> None:
    assert posterior.verdicts(posterior.Config(), tables(**change))[number].status == status


def test_the_evidence_says_how_many_tasks_and_which() -> None:
    made = tables()
    runs = made["runs"]
    wrong = (runs["method"] == PRIOR) & (runs["spread"] == 0.7)
    runs.loc[wrong, "covered_0.9"] = 0.7
    first = posterior.verdicts(posterior.Config(), made)[0]
    assert first.status == "partly"
    assert first.evidence.startswith("In 24 of 48 tasks; fewer in 24, more in 0.")
    assert "Of the tasks with fewer: spread 0.7 in 100%." in first.evidence


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ()}, "rows must have at least one value"),
        ({"noise": (0.0,)}, "noise must be above 0"),
        ({"rows": (49,)}, "rows must be at least 50"),
        ({"rounds": 1}, "rounds must be at least 2, not 1"),
        ({"mala": 99}, "mala must be at least 100, not 99"),
        ({"decay": 1.1}, "decay must be at most 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        posterior.Config(**change)


def test_the_response_of_the_oracle_is_in_the_units_of_the_field() -> None:
    p = problem(Setting(2000, 0.01, 3.0, 1.0, 1.0), 0)
    assert np.sqrt((posterior.tikhonov_by_truth(p) - p.truth).square().mean().item()) < 0.3 * p.truth.std().item()
    assert posterior.tikhonov_by_gcv(p)[1].shape == (SIDE, SIDE)
