import math

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from twinboot import Bootstrap
from twinboot.experiments import gaussian

SMALL = gaussian.Config(sizes=(20, 100), seeds=600, replicas=(10, 20), falling=250)


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    found: dict[str, list[pd.DataFrame]] = {}
    for part in gaussian.parts(SMALL):
        ticks: list[int] = []
        for name, table in part.compute(lambda ticks=ticks: ticks.append(1)).items():
            found.setdefault(name, []).append(table)
        assert len(ticks) == part.ticks
    return {name: pd.concat(frames, ignore_index=True) for name, frames in found.items()}


def test_defaults_are_those_of_appendix_a2() -> None:
    config = gaussian.Config()
    assert (config.points, config.variance, config.epochs, config.batch) == (400, 120.0, 5, 200)
    assert (config.lr, config.stride, config.seed) == (0.07, 4, 7)
    assert config.stages["twins, few steps"] == 10
    assert config.seeds >= 200
    assert min(config.sizes) <= 50
    assert max(config.sizes) >= 5000


def test_closed_form_settles_where_the_docstring_says() -> None:
    config = gaussian.Config(constant=500, falling=5000)
    found, a = gaussian.expected(config), 2 * config.lr
    assert found["twins, constant rate"] == pytest.approx((2 - a) / (2 - 2 * a), rel=1e-6)
    assert found["twins"] == pytest.approx(1, rel=0.005)


def test_estimates_have_the_mean_of_the_closed_form(tables: dict[str, pd.DataFrame]) -> None:
    found = gaussian.summary(SMALL, tables["estimates"])
    assert len(found) == 2 * 5
    assert ((found["mean"] - found["expected"]).abs() < 4 * found["error"]).all()


def test_estimates_have_the_variance_of_theory(tables: dict[str, pd.DataFrame]) -> None:
    """sigma^2 over (B - 1) D degrees of freedom is nearly chi-squared, so its sample variance over n data sets has the
    relative variance (2 + 12 / degrees) / n."""
    found = gaussian.summary(SMALL, tables["estimates"]).dropna()
    assert set(found["trainings"]) == {2, 10, 20}
    width = ((2 + 12 / (2 * (found["trainings"] - 1))) / SMALL.seeds).pow(0.5)
    assert ((found["variance"] / found["theory"] - 1).abs() < 4 * width).all()


def test_picture_is_one_run_with_its_optima(tables: dict[str, pd.DataFrame]) -> None:
    path, optima = tables["path"], tables["optima"]
    assert path["step"].max() == 10
    assert path[path["step"] == 0][["w1", "w2"]].drop_duplicates().to_numpy().tolist() == [[-4.0, 3.0]]
    data = torch.randn(400, 2, generator=torch.Generator().manual_seed(7)) * math.sqrt(120)
    bootstrap = Bootstrap(400, seed=7)
    means = torch.stack([data[bootstrap.indices(r)].mean(0) for r in range(2)])
    torch.testing.assert_close(torch.tensor(optima[["w1", "w2"]].to_numpy()).float(), means)
    end = path[path["step"] == 10].sort_values("twin")[["w1", "w2"]].to_numpy()
    distance = torch.tensor(end).float() - means
    assert (distance.norm(dim=1) < 5 * 0.86**10 + 4 * math.sqrt(120 / 200)).all()  # the way left, and a batch's noise


def test_verdicts_agree_with_theory(tables: dict[str, pd.DataFrame]) -> None:
    unbiased, tracks, variance, cost = gaussian.verdicts(SMALL, tables)
    assert (unbiased.status, tracks.status, variance.status, cost.status) == ("held", "partly", "held", "partly")
    assert "22%" in tracks.evidence


def test_relative_variance_over_data_sets_is_the_closed_form() -> None:
    """Bootstrap means of normal data, without any training: 20,000 data sets of 20 points show the terms in 1 / M."""
    data = torch.randn(20_000, 20, 2, generator=torch.Generator().manual_seed(0))
    drawn = torch.randint(20, (20_000, 5, 20, 1), generator=torch.Generator().manual_seed(1)).expand(-1, -1, -1, 2)
    means = data[:, None].expand(-1, 5, -1, -1).gather(2, drawn).mean(2)
    estimate = means.var(1).mean(1)
    found = estimate.var() / estimate.mean() ** 2
    kurtosis = (estimate - estimate.mean()).pow(4).mean() / estimate.var() ** 2
    error = found * math.sqrt((kurtosis - 1) / len(estimate))
    assert abs(found - gaussian.relative_variance(5, 20)) < 4 * error
    assert abs(found - 2 / (2 * 4)) > 10 * error


def test_few_runs_decide_nothing(tables: dict[str, pd.DataFrame]) -> None:
    few = tables["estimates"][tables["estimates"]["seed"] < 5]
    config = gaussian.Config(sizes=(20, 100), seeds=5, replicas=(10, 20), falling=250)
    assert {verdict.status for verdict in gaussian.verdicts(config, tables | {"estimates": few})} == {"undecided"}


def test_a_biased_table_is_not_held(tables: dict[str, pd.DataFrame]) -> None:
    wrong = tables["estimates"].assign(sigma2=tables["estimates"]["sigma2"] * 2)
    unbiased, tracks, _, cost = gaussian.verdicts(SMALL, tables | {"estimates": wrong})
    assert {unbiased.status, tracks.status, cost.status} == {"not held"}


def test_it_runs_without_classical_bootstraps() -> None:
    config = gaussian.Config(sizes=(2,), seeds=3, replicas=(), falling=5)
    found = {name: table for part in gaussian.parts(config) for name, table in part.compute(lambda: None).items()}
    assert len(gaussian.verdicts(config, found)) == 4
    assert isinstance(gaussian.figure(config, found), Figure)


def test_figure_and_numbers(tables: dict[str, pd.DataFrame]) -> None:
    assert isinstance(gaussian.figure(SMALL, tables), Figure)
    overall, by_size = gaussian.numbers(SMALL, tables).values()
    assert list(overall["trainings"]) == [2, 2, 2, 10, 20]
    assert list(by_size["M"]) == [20, 100]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seeds": 1}, "seeds"),
        ({"sizes": (1,)}, "sizes"),
        ({"replicas": (1,)}, "replicas"),
        ({"lr": 0.7}, "past the mean"),
        ({"batch": 0}, "batch"),
        ({"sizes": (50, 50)}, "none twice"),
        ({"epochs": 30}, "constant"),
        ({"seed": 2**70}, "seed"),
    ],
)
def test_configs_that_make_no_sense_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gaussian.Config(**wrong)


def two_valued(config: gaussian.Config, low: float, high: float) -> pd.DataFrame:
    """Estimates of the twins at each stage, half of them `low` and half `high` in units of tau^2."""
    rows = [
        (size, seed, stage, gaussian.tau_squared(config, size) * (high if seed % 2 else low))
        for stage in config.stages
        for size in config.sizes
        for seed in range(config.seeds)
    ]
    return pd.DataFrame(rows, columns=["size", "seed", "estimator", "sigma2"])


FIFTY = gaussian.Config(sizes=(20, 100), seeds=50, replicas=(), falling=250)


def test_the_mean_over_sizes_has_the_error_of_a_mean_of_independent_means() -> None:
    """n values 1 ± s have the variance s^2 n / (n - 1), so the mean over two sizes has the error s / sqrt(2 n - 2)."""
    found = gaussian.pooled(FIFTY, two_valued(FIFTY, 0.5, 1.5))
    assert found["mean"].tolist() == pytest.approx([1.0] * 3)
    assert found["error"].tolist() == pytest.approx([0.5 / math.sqrt(98)] * 3)


def test_sigma_has_half_the_relative_error_of_its_square(tables: dict[str, pd.DataFrame]) -> None:
    """Here sigma^2 is 1.21 ± 0.05 and sigma 1.1 ± 0.025: four errors off, but two if its error were that of sigma^2."""
    estimates = two_valued(FIFTY, 0.71, 1.71)
    assert gaussian.pooled(FIFTY, estimates)["error"].tolist() == pytest.approx([0.0505] * 3, rel=1e-3)
    assert gaussian.verdicts(FIFTY, tables | {"estimates": estimates})[1].status == "not held"


@pytest.mark.parametrize(("ratio", "status"), [(1.4, "held"), (1.6, "partly")])
def test_two_samples_do_if_the_middle_half_of_sigma_is_within_a_factor_of_one_and_a_half(
    tables: dict[str, pd.DataFrame], ratio: float, status: str
) -> None:
    low = 2 / (1 + ratio**2)  # so that the mean is 1
    estimates = two_valued(FIFTY, low, low * ratio**2)
    assert gaussian.verdicts(FIFTY, tables | {"estimates": estimates})[3].status == status
