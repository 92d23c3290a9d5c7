import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch.func import grad, hessian

from twinboot import Bootstrap
from twinboot._core.seeds import derive
from twinboot.experiments.wells.landscape import (
    WELLS,
    Setting,
    curvatures,
    exact_line,
    loss,
    mean_landscape,
    paper_line,
    potential,
    resampled,
    rms,
    steps,
    train,
)


def silent() -> None:
    pass


@pytest.mark.parametrize("width", [0.3, 0.5, 0.7])
def test_curvatures_are_those_of_the_potential_at_a_well(width: float) -> None:
    found = hessian(lambda w: potential(w, width))(WELLS[1].double())
    torch.testing.assert_close(found, torch.diag(curvatures(width)))


def test_mean_landscape_is_the_convolution_with_the_data() -> None:
    """A Gaussian well seen through Gaussian shifts is a wider and shallower Gaussian well."""
    width, noise = 0.5, 0.3
    wide = math.sqrt(width**2 + noise**2)
    for w in torch.randn(20, 2, dtype=torch.float64):
        found = mean_landscape(width, noise, "shift")(w)
        torch.testing.assert_close(found, potential(w, wide) * width**2 / wide**2)


@pytest.mark.parametrize(("width", "noise"), [(0.1, 0.3), (0.05, 0.3), (0.3, 0.8), (0.5, 0.02)])
def test_mean_landscape_is_exact_for_wells_much_narrower_or_wider_than_the_noise(width: float, noise: float) -> None:
    wide, w = math.hypot(width, noise), torch.tensor([0.7, 0.2], dtype=torch.float64)
    torch.testing.assert_close(mean_landscape(width, noise, "shift")(w), potential(w, wide) * width**2 / wide**2)


@pytest.mark.parametrize("datum", ["tilt", "matched"])
def test_data_that_pull_leave_the_mean_landscape_as_it_is(datum: str) -> None:
    w = torch.tensor([0.3, -0.2], dtype=torch.float64)
    torch.testing.assert_close(mean_landscape(0.5, 0.3, datum)(w), potential(w, 0.5))


def test_exact_line_in_the_limits_where_it_is_known() -> None:
    """Narrow wells do not feel each other, so H = I / width^2; small noise moves the landscape as a whole."""
    narrow = Setting(width=0.2, noise=0.001, size=10_000)
    unit = narrow.noise / math.sqrt(narrow.size)
    assert exact_line(replace(narrow, datum="shift")) == pytest.approx(unit, rel=1e-3)
    assert exact_line(replace(narrow, datum="tilt")) == pytest.approx(unit * 0.2**2, rel=1e-3)
    assert exact_line(replace(narrow, datum="matched")) == pytest.approx(unit * 0.2, rel=1e-3)
    assert paper_line(narrow) == pytest.approx(unit * 0.2, rel=1e-3)


def test_paper_line_is_the_formula_of_appendix_a3() -> None:
    bw, d, m, s = 0.5, 2.0, 400, 0.3
    epsilon = math.exp(-(d**2) / (2 * bw**2))
    across = (1 + epsilon) / bw**2
    along = (1 + epsilon) / bw**2 - epsilon * d**2 / bw**4
    theory = math.sqrt((1 / across + 1 / along) / 2) * s / math.sqrt(m)
    assert paper_line(Setting(width=bw, size=m, noise=s)) == pytest.approx(theory)


def test_noise_that_merges_the_wells_is_refused() -> None:
    with pytest.raises(ValueError, match="no two wells"):
        exact_line(Setting(noise=1.2))


def test_samples_are_bootstrap_samples_of_each_runs_own_data() -> None:
    data = torch.arange(60.0).view(20, 3, 1)
    for twin, sample in enumerate(resampled(data, seed=5)):
        for run in range(3):
            counts = Bootstrap(20, seed=derive(5, "run", run)).counts[twin]
            drawn = torch.bincount((sample[:, run, 0] - run).long() // 3, minlength=20)
            assert drawn.tolist() == counts.tolist()


def test_a_run_among_many_is_the_run_alone() -> None:
    """Full batch, no noise on the weights, one reset to the mean: done by hand for one of the runs."""
    setting = Setting(
        size=12, batch=12, epochs=3, resets=(2,), rate_steps=(1,), lr=0.3, seed=3, start=(0.2, 0.1), seeds=4
    )
    trained = train(setting, "mean", silent, noise_scale=0.0)
    data = torch.randn(12, 4, 2, generator=torch.Generator().manual_seed(3)) * setting.noise
    samples = [sample[:, 2] for sample in resampled(data, seed=3)]
    slope = grad(lambda w, x: loss(w, x, setting.width, "shift").mean())
    w = [torch.tensor([0.2, 0.1])] * 2
    for epoch, lr in ((1, 0.3), (2, 0.03), (3, 0.03)):
        w = [v - lr * slope(v, x) for v, x in zip(w, samples, strict=True)]
        if epoch == 2:
            w = [(w[0] + w[1]) / 2] * 2
    torch.testing.assert_close(trained.weights[:, 2], torch.stack(w))
    torch.testing.assert_close(trained.sigma[2], ((w[0] - w[1]).square().sum() / 4).sqrt())


def test_a_third_of_the_pairs_split_where_the_first_pull_decides() -> None:
    """From the middle of the ridge a twin goes where its sample's mean lies. Means of two samples of the same data have
    the correlation 1/2, so their signs differ with probability 1/2 - asin(1/2) / pi = 1/3."""
    runs = 2000
    setting = Setting(size=50, batch=50, lr=0.5, epochs=120, rate_steps=(), start=(0.0, 0.0), seeds=runs)
    trained = train(setting, "none", silent, noise_scale=0.0)
    left = trained.weights[:, :, 0] < 0
    apart = (left[0] != left[1]).float().mean().item()
    assert abs(apart - 1 / 3) < 4 * math.sqrt(2 / 9 / runs)


def test_twins_in_one_well_have_the_exact_sigma() -> None:
    runs = 400
    setting = Setting(size=200, epochs=30, rate_steps=(15, 22), resets=(1, 2), seeds=runs)
    trained = train(setting, "sample", silent)
    squared = trained.sigma.square()
    error = squared.std().item() / math.sqrt(runs)
    assert abs(squared.mean().item() - exact_line(setting) ** 2) < 4 * error


def test_every_step_ticks_and_is_on_the_path() -> None:
    setting, ticks = Setting(size=25, epochs=2, seeds=3), []
    trained = train(setting, "centered", lambda: ticks.append(1), keep_path=True)
    assert len(ticks) == steps(setting) == 6
    assert trained.path.shape == (7, 2, 3, 2)
    assert trained.path_sigma.shape == (7, 3)


def test_wells_are_told_by_the_nearest_and_none_from_afar() -> None:
    trained = train(Setting(size=10, epochs=1, seeds=3), "none", silent)
    trained.weights[0] = torch.tensor([[-0.9, 0.1], [0.2, 0.0], [5.0, 0.0]])
    assert trained.wells(0.5)[0].tolist() == [0, 1, -1]


def test_epochs_count_from_one_and_starts_lie_near_the_wells() -> None:
    with pytest.raises(ValueError, match="counted from 1"):
        Setting(resets=(0,))
    with pytest.raises(ValueError, match="no slope"):
        Setting(start=(50.0, 50.0))


@pytest.mark.parametrize("field", ["width", "noise", "size", "batch", "lr", "epochs"])
def test_settings_that_make_no_sense_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Setting(**{field: 0})


def test_exact_line_has_what_a_bootstrap_of_few_data_misses() -> None:
    few, many = exact_line(Setting(size=2)) ** 2 * 2, exact_line(Setting(size=10**6)) ** 2 * 10**6
    assert few == pytest.approx(many / 2, rel=1e-5)


def test_rms_and_its_error_by_hand() -> None:
    root, error = rms(pd.Series([1.0, 2.0, 3.0]))
    assert root == pytest.approx(math.sqrt(14 / 3))
    assert error == pytest.approx(math.sqrt(49 / 3 / 3) / 2 / root)  # squares 1, 4, 9: their variance is 49 / 3


def test_samples_are_in_random_order() -> None:
    """The first half of a sample has the mean of all data, 9.5, with the variance (20^2 - 1) / 12 of each of its draws;
    were the sample sorted, it would be near 5."""
    runs = 300
    data = torch.arange(20.0).view(20, 1, 1).expand(20, runs, 1)
    for sample in resampled(data, seed=5):
        half = sample[:10].mean().item()
        assert abs(half - 9.5) < 4 * math.sqrt(399 / 12 / (10 * runs))
