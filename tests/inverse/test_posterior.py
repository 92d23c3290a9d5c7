"""Draws of `invert` with a prior against the posteriors of linear problems with Gaussian noise."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from loops import assert_same_bits, seeded
from torch import Tensor

from twinboot import (
    Blocks,
    Bootstrap,
    Dense,
    Edges,
    GaussianProcess,
    Inversion,
    Near,
    Protocol,
    Residuals,
    Smooth,
    invert,
    resets,
)

CELLS, NOISE, WEIGHT, STD = 12, 0.5, 4.0, 2.0
PRIORS = [Smooth(order=1, weight=WEIGHT), Near(std=STD)]


def problem(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix and noisy measurements of a field from the prior. The last cells are not measured."""
    generator = seeded(seed)
    matrix = torch.randn(rows, CELLS, generator=generator, dtype=torch.double)
    matrix[:, -3:] = 0
    precision = prior_precision()
    field = torch.linalg.cholesky(torch.linalg.inv(precision)) @ torch.randn(CELLS, generator=generator).double()
    return matrix, matrix @ field + NOISE * torch.randn(rows, generator=generator, dtype=torch.double)


def prior_precision() -> Tensor:
    differences = torch.eye(CELLS, dtype=torch.double).diff(dim=0)
    return WEIGHT * differences.T @ differences + torch.eye(CELLS, dtype=torch.double) / STD**2


def exact(matrix: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the posterior."""
    covariance = torch.linalg.inv(matrix.T @ matrix / NOISE**2 + prior_precision())
    return covariance @ matrix.T @ observed / NOISE**2, covariance


def run(matrix: Tensor, observed: Tensor, **options: Any) -> Inversion:
    start = torch.zeros(CELLS, dtype=torch.double)
    return invert(Dense(matrix), observed, start, **{"prior": PRIORS, "noise_std": NOISE, **options})


def parametric(rows: int, **options: Any) -> Bootstrap:
    return Bootstrap(rows, kind="parametric", **options)


def test_draws_with_perturbed_measurements_are_from_the_exact_posterior() -> None:
    """With D draws, D |whitened mean|^2 is chi-squared with as many degrees of freedom as cells, and the entries of the
    whitened covariance have a standard deviation of at most sqrt(2 / D)."""
    matrix, observed = problem(15)
    mean, covariance = exact(matrix, observed)
    found = run(matrix, observed, rounds=200, bootstrap=parametric(15))
    torch.testing.assert_close(found.field, mean, atol=0.02, rtol=0)
    assert found.draws is not None
    number = len(found.draws)
    assert number == 400
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), (found.draws - mean).T, upper=False)
    assert number * whitened.mean(1).square().sum() < CELLS + 4 * math.sqrt(2 * CELLS)
    assert (whitened.cov() - torch.eye(CELLS)).abs().max() < 4.5 * math.sqrt(2 / number)
    # sigma of each cell has a relative error of 1 / sqrt(2 D) = 3.5 %
    ratio = found.sigma / covariance.diag().sqrt() - 1
    assert ratio.square().mean().sqrt() < 0.05
    assert found.df is not None
    assert (found.df == number - 1).all()


def test_draws_with_resampled_rows_have_the_covariance_of_the_sandwich() -> None:
    """H^-1 (A' diag(e^2) A / s^4 + prior) H^-1, e the residuals. The bootstrap of n rows adds terms of the order of
    cells / n, 2 % here, and D draws an error of 1 / sqrt(2 D) = 3.5 %."""
    matrix, observed = problem(600)
    mean, covariance = exact(matrix, observed)
    residual = observed - matrix @ mean
    meat = (matrix.T * residual**2) @ matrix / NOISE**4 + prior_precision()
    sandwich = (covariance @ meat @ covariance).diag().sqrt()
    found = run(matrix, observed, rounds=200)
    torch.testing.assert_close(found.field, mean, atol=0.02, rtol=0)
    assert (found.sigma / sandwich - 1).square().mean().sqrt() < 0.02 + 4 * 0.035 / math.sqrt(2)
    assert (found.sigma[-1] / covariance[-1, -1].sqrt() - 1).abs() < 4 * 0.035  # not measured: the prior's


def test_several_priors_are_their_stacked_residuals() -> None:
    def stacked(v: Tensor) -> Tensor:
        return torch.cat([math.sqrt(WEIGHT) * v.diff(), v / STD])

    matrix, observed = problem(15)
    several, one = (run(matrix, observed, prior=p) for p in (PRIORS, Residuals(stacked, weight=1.0)))
    torch.testing.assert_close(several.field, one.field, atol=0.02, rtol=0)


def test_near_is_about_the_initial_field() -> None:
    start = torch.full((CELLS,), 3.0, dtype=torch.double)
    matrix, observed = problem(15)
    found = invert(Dense(matrix), observed, start, prior=Near(std=STD), noise_std=NOISE)
    assert (found.field[-3:] - 3).abs().max() < 0.01


@pytest.mark.parametrize("shape", [(40,), (8, 9), (4, 5, 6)])
def test_weight_length_and_noise_are_found_for_fields_of_one_to_three_dimensions(shape: tuple[int, ...]) -> None:
    cells = math.prod(shape)
    matrix = torch.randn(3 * cells, cells, generator=seeded(1))
    place = torch.linspace(0, 3, cells).view(shape)
    observed = matrix @ place.sin().flatten() + 0.5 * torch.randn(3 * cells, generator=seeded(2))
    found = invert(lambda v: matrix @ v.flatten(), observed, torch.zeros(shape), prior=GaussianProcess(), rounds=2)
    assert found.field.shape == found.sigma.shape == shape
    [prior] = found.prior
    assert isinstance(prior, GaussianProcess)
    assert prior.length in found.history["length"]
    assert prior.std is not None
    assert isinstance(prior.weight, float)
    assert len(found.history["weight"]) == len(found.history["unseen"]) > 10
    assert found.noise_std is not None
    # n - p of the n = 3 cells measurements are left, at least 2/3: a relative error of sqrt(1 / (2 (n - p)))
    assert abs(found.noise_std / 0.5 - 1) < 4 * math.sqrt(1 / (4 * cells))


def test_intervals_hold_the_share_of_cells_that_they_say_of_fields_from_the_prior() -> None:
    """Random walks seen through noise: 90 % intervals over 8 walks of 150 cells. The errors of a walk are correlated
    over about five cells, so the share has a standard deviation of sqrt(0.9 * 0.1 * 5 / 1200) = 0.02."""
    held = []
    for seed in range(8):
        truth = torch.randn(150, generator=seeded(seed)).cumsum(0) * 0.3
        observed = truth.repeat(2) + torch.randn(300, generator=seeded(100 + seed))
        found = invert(lambda v: v.repeat(2), observed, torch.zeros(150), prior=Smooth(order=1), rounds=20, seed=seed)
        low, high = found.interval(0.9)
        held.append(((low < truth) & (truth < high)).float().mean())
        [prior] = found.prior
        assert 1 / 10 < float(prior.weight) * 0.09 < 10
    assert abs(torch.stack(held).mean() - 0.9) < 4 * 0.02


def test_the_length_of_a_gaussian_process_is_found_with_its_std_given_or_not() -> None:
    """A field from the prior itself, 24 x 24 cells with a length of 3 and a standard deviation of 2, seen through noise
    of 1. It has about (24 / 6)^2 = 16 independent parts, so its standard deviation is known to 18 %."""
    shape, prior = (24, 24), GaussianProcess(length=3.0)
    kernel = prior.spectrum(shape)
    white = torch.randn(1, *shape, generator=seeded(0))
    truth = 2 * kernel.components(white / kernel.values.sqrt().to(white), back=True)[0]
    observed = truth + torch.randn(shape, generator=seeded(1))
    for std in (None, 2.0):
        found = invert(lambda v: v.flatten(), observed.flatten(), torch.zeros(shape), prior=GaussianProcess(std=std))
        [chosen] = found.prior
        assert isinstance(chosen, GaussianProcess)
        assert chosen.length in (1.5, 3.0, 6.0)  # 12 was tried too
        assert chosen.std is not None
        assert chosen.std == std if std else abs(math.log(chosen.std / 2)) < 4 * 0.18


def test_measurements_that_depend_on_each_other_keep_the_weight_of_cross_validation() -> None:
    """Each measurement is there four times. To the evidence these are four, and to folds of clusters one."""
    truth = torch.linspace(0, 6, 40).sin()
    once = truth + 0.5 * torch.randn(40, generator=seeded(0))
    options: Any = {"prior": GaussianProcess(length=8.0), "rounds": 1}
    clustered = Bootstrap(160, clusters=torch.arange(40).repeat(4))
    found = invert(lambda v: v.repeat(4), once.repeat(4), torch.zeros(40), bootstrap=clustered, **options)
    [prior], tried = found.prior, found.history
    best = tried["weight"][tried["unseen"].index(min(tried["unseen"]))]
    assert found.noise_std is not None
    assert abs(math.log10(float(prior.weight) / best)) < 1  # in units of the noise it is the same
    assert (found.field - truth).square().mean() < (once - truth).square().mean()


def test_sigma_has_a_group_or_each_cell_its_own() -> None:
    matrix, observed = problem(60)
    two, cells, groups = (
        run(matrix, observed, rounds=rounds, protocol=protocol)
        for rounds, protocol in ((0, None), (3, None), (3, Protocol(groups=Blocks((6,)))))
    )
    assert len(two.sigma.unique()) == 4  # blocks of three
    assert two.df is not None
    assert (two.df == 3).all()
    assert len(cells.sigma.unique()) == CELLS
    torch.testing.assert_close(groups.sigma.square()[0], cells.sigma.square()[:6].mean())
    assert groups.df is not None
    assert (groups.df == 5 * 6).all()


def test_draws_are_kept_on_request_and_change_nothing_else() -> None:
    matrix, observed = problem(60)
    kept, dropped = (run(matrix, observed, rounds=4, keep_draws=keep) for keep in (True, False))
    assert dropped.draws is None
    assert kept.draws is not None
    assert kept.draws.shape == (8, CELLS)
    assert_same_bits(kept.sigma, dropped.sigma)
    torch.testing.assert_close(kept.sigma, kept.draws.std(0))


def test_the_same_seed_gives_the_same_draws_and_rounds_differ() -> None:
    matrix, observed = problem(60)
    first, again, other = (run(matrix, observed, rounds=3, seed=seed).draws for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert_same_bits(first, again)
    assert other is not None
    assert not torch.equal(first, other)
    assert len(first[:, 0].unique()) == 6


def test_probabilities_are_shares_of_draws_and_predictions_keep_correlations() -> None:
    matrix, observed = problem(60)
    found = run(matrix, observed, rounds=50)
    assert found.draws is not None
    middle = found.draws[:, 0].median().item()
    share = found.probability(lambda v: v > middle)
    assert share.shape == (CELLS,)
    assert share[0] == (found.draws[:, 0] > middle).float().mean()
    assert found.probability(lambda v: v.max() > -100) == 1
    # Neighbours that are not measured are nearly equal: their difference varies less than independent cells would.
    difference = found.predict(lambda v: (v[-1] - v[-2]).view(1), samples=100)
    assert difference.std < 0.7 * (found.sigma[-1] ** 2 + found.sigma[-2] ** 2).sqrt()
    assert len(found.sample(100).unique(dim=0)) == 100
    alone = run(matrix, observed)
    width = 4 * math.sqrt(0.25 / 1000)
    assert (alone.probability(lambda v: v > alone.field) - 0.5).abs().max() < width


@pytest.mark.parametrize("batch_size", [None, 30])
def test_an_optimizer_finds_nearly_the_same_field_with_and_without_batches(batch_size: int | None) -> None:
    matrix, observed = problem(60)
    mean, covariance = exact(matrix, observed)
    adam = partial(torch.optim.Adam, lr=0.05)
    found = run(matrix, observed, steps=600, decay=0.993, rounds=1, optimizer=adam, batch_size=batch_size)
    assert ((found.field - mean) / covariance.diag().sqrt()).square().mean() < 0.1


class Rows:
    """An operator with `rows` that is not `Dense`, and counts the rows that it computes."""

    def __init__(self, matrix: Tensor, counted: list[int]) -> None:
        self.matrix, self.counted = matrix, counted

    def __call__(self, field: Tensor) -> Tensor:
        self.counted.append(len(self.matrix))
        return self.matrix @ field.flatten()

    def rows(self, index: Tensor | slice) -> "Rows":
        return Rows(self.matrix[index], self.counted)


def test_an_operator_with_rows_computes_those_that_count_and_gives_the_same_result() -> None:
    matrix, observed = problem(60)
    start, counted = torch.zeros(CELLS, dtype=torch.double), list[int]()
    options: Any = {"prior": Smooth(order=1), "rounds": 1}
    found = invert(Rows(matrix, counted), observed, start, **options)
    whole = invert(lambda v: matrix @ v, observed, start, **options)
    torch.testing.assert_close(found.field, whole.field, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found.sigma, whole.sigma, atol=1e-3, rtol=1e-2)
    assert {48, 12} <= set(counted)  # four parts of five, and the fifth


def test_an_operator_that_vmap_refuses_and_a_prior_that_it_refuses_give_the_same_result() -> None:
    matrix, observed = problem(60)

    def stubborn(v: Tensor) -> Tensor:
        assert v.sum().item() is not None  # item() is refused under vmap
        return matrix @ v

    def prior(v: Tensor) -> Tensor:
        assert v.sum().item() is not None
        return v.diff()

    start = torch.zeros(CELLS, dtype=torch.double)
    plain = invert(lambda v: matrix @ v, observed, start, prior=torch.diff)
    other = invert(stubborn, observed, start, prior=prior)
    torch.testing.assert_close(plain.field, other.field, atol=1e-4, rtol=1e-3)


def test_measurements_for_calibration_change_nothing() -> None:
    matrix, observed = problem(60)
    bootstrap = Bootstrap(60, calibration=0.5)
    changed = observed.clone()
    changed[bootstrap.calibration] += 100
    first, second = (run(matrix, y, bootstrap=bootstrap, rounds=2) for y in (observed, changed))
    torch.testing.assert_close(first.field, second.field)
    torch.testing.assert_close(first.sigma, second.sigma)


def test_edges_keep_a_jump_that_smoothness_blurs() -> None:
    truth = (torch.arange(60) > 30).float()
    observed = truth.repeat(4) + 0.3 * torch.randn(240, generator=seeded(0))
    errors = [
        (invert(lambda v: v.repeat(4), observed, torch.zeros(60), prior=prior).field - truth).square().mean()
        for prior in (Edges(scale=0.02), Smooth(order=1))
    ]
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": None, "rounds": 2}, "rounds, noise_std and keep_draws need a prior"),
        ({"prior": None}, "rounds, noise_std and keep_draws need a prior"),
        ({"rounds": -1}, "rounds must be a whole number of at least 0"),
        ({"noise_std": 0.0}, "noise_std must be a finite number above 0"),
        ({"stop": None}, "with a prior there is no early stop"),
        ({"patience": 5}, "with a prior there is no early stop"),
        ({"protocol": Protocol(reset=resets.every(2))}, "invert with a prior has no setting 'reset'"),
        ({"protocol": Protocol(noise=0.5)}, "invert with a prior has no setting 'noise'"),
        ({"bootstrap": Bootstrap(15, kind="split")}, "gives each twin half of the measurements"),
        ({"prior": None, "noise_std": None, "bootstrap": parametric(15)}, "needs a prior"),
    ],
)
def test_what_does_not_go_together_is_refused(options: Any, message: str) -> None:
    matrix, observed = problem(15)
    with pytest.raises(ValueError, match=message):
        run(matrix, observed, **options)


def test_progress_is_lines_or_calls(capsys: pytest.CaptureFixture[str]) -> None:
    matrix, observed = problem(15)
    told: list[int] = []
    found = run(matrix, observed, progress=told.append)
    assert told == list(range(1, found.best_step + 1))
    assert capsys.readouterr().err == ""
    run(matrix, observed, prior=Smooth(order=1), rounds=2, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Smooth(order=1, weight='unseen', axes=None): weight ")
    assert lines[-1].startswith("4 of 4 draws, ")
