"""Against closed forms. A standard error from m draws has a relative error of 1 / sqrt(2 m); four are allowed."""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from twinboot import Bootstrap, standard_errors


class Mean(nn.Module):
    def __init__(self, n: int = 1) -> None:
        super().__init__()
        self.m = nn.Parameter(torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        return self.m.expand(len(x), -1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def means(n: int = 80, k: int = 1) -> TensorDataset:
    return TensorDataset(torch.zeros(n, 1), normal(n, k))


def uneven(n: int = 300) -> TensorDataset:
    x = normal(n, 2)
    return TensorDataset(x, 1 + x @ torch.tensor([[2.0], [-1.0]]).double() + x[:, :1].abs() * normal(n, 1, seed=1))


def quiet(*arguments: Any, **options: Any) -> Any:
    return standard_errors(*arguments, progress=False, **options)


def test_the_mean_has_its_closed_form() -> None:
    """The bootstrap's standard error of a mean is exactly the standard deviation (by n) over sqrt(n)."""
    data = means(k=8)
    found = quiet(Mean(8), data, rounds=200)
    expected = data.tensors[1].std(0, correction=0) / math.sqrt(80)
    torch.testing.assert_close(found.estimate["m"], data.tensors[1].mean(0))
    ratios = found.se["m"] / expected
    assert (ratios - 1).abs().max() < 4 / math.sqrt(2 * 400)
    assert abs(ratios.mean() - 1) < 4 / math.sqrt(2 * 400 * 8)


def test_least_squares_have_the_sandwich_and_its_covariance() -> None:
    data = uneven()
    found = quiet(nn.Linear(2, 1), data, rounds=500)
    x, y = data.tensors
    design = torch.cat([x, torch.ones(300, 1).double()], 1)
    fit = torch.linalg.lstsq(design, y).solution
    inverse = torch.linalg.inv(design.T @ design)
    residuals = (y - design @ fit)[:, 0]
    hc0 = inverse @ (design.T @ (residuals.square()[:, None] * design)) @ inverse
    torch.testing.assert_close(found._center, fit[:, 0])
    torch.testing.assert_close(found.sandwich(), hc0)
    scale = hc0.diagonal().sqrt()
    # 1,000 draws: 4 standard errors are 9 %; the bootstrap of 300 data differs from its limit by about 3 / 300.
    assert (found.covariance() / scale / scale[:, None] - hc0 / scale / scale[:, None]).abs().max() < 0.25
    assert (found._se() / scale - 1).abs().max() < 4 / math.sqrt(2 * 1000) + 0.03


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        ("logistic", lambda eta: torch.bernoulli(eta.sigmoid(), generator=torch.Generator().manual_seed(3))),
        ("poisson", lambda eta: torch.poisson(eta.exp(), generator=torch.Generator().manual_seed(3))),
    ],
)
def test_likelihoods_have_the_inverse_information(loss: Any, target: Callable[[Tensor], Tensor]) -> None:
    x = normal(1000, 2)
    found = quiet(nn.Linear(2, 1), TensorDataset(x, target(0.5 * x.sum(1, keepdim=True))), loss, rounds=200)
    design = torch.cat([x, torch.ones(1000, 1).double()], 1)
    eta = design @ found._center
    weight = eta.exp() if loss == "poisson" else eta.sigmoid() * (1 - eta.sigmoid())
    expected = torch.linalg.inv(design.T @ (weight[:, None] * design)).diagonal().sqrt()
    # The likelihood is right, so sandwich and inverse information differ by 1 / sqrt(n) or so.
    assert (found._se() / expected - 1).abs().max() < 4 / math.sqrt(2 * 400) + 2 / math.sqrt(1000)


def test_clusters_and_blocks_are_drawn_together() -> None:
    """Ten copies of each sample: the standard error of the mean is that of 40 samples, not of 400."""
    once = normal(40, 1)
    data = TensorDataset(torch.zeros(400, 1), once.repeat_interleave(10, 0))
    expected = once.std(correction=0).item() / math.sqrt(40)
    clusters = quiet(Mean(), data, rounds=200, bootstrap=Bootstrap(400, clusters=torch.arange(400) // 10))
    plain = quiet(Mean(), data, rounds=200)
    assert clusters.se["m"].item() == pytest.approx(expected, rel=4 / math.sqrt(800))
    assert plain.se["m"].item() == pytest.approx(expected / math.sqrt(10), rel=4 / math.sqrt(800))
    assert clusters.df == 39
    assert "400 samples in 40 clusters" in clusters.notes[0]
    assert clusters.sandwich().sqrt().item() == pytest.approx(expected, rel=1e-9)
    blocks = quiet(Mean(), data, rounds=200, bootstrap=Bootstrap(400, block=40))
    assert 0.6 * expected < blocks.se["m"].item() < 1.4 * expected  # ten blocks


def test_strata_keep_shares() -> None:
    """Two groups that differ by 100: with strata the mean does not feel how many of each are drawn."""
    y = torch.cat([normal(50, 1), 100 + normal(50, 1, seed=1)])
    data, groups = TensorDataset(torch.zeros(100, 1), y), torch.arange(100) // 50
    found = quiet(Mean(), data, rounds=100, bootstrap=Bootstrap(100, strata=groups))
    assert found.se["m"].item() == pytest.approx(0.1, rel=0.35)


def test_many_at_once_are_the_same_as_two_twins_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data, start = uneven(60), nn.Linear(2, 1)
    at_once = quiet(start, data, rounds=10)
    monkeypatch.setattr("twinboot.parameters.local.Locals._can_be_vmapped", lambda self: False)
    one_by_one = quiet(start, data, rounds=10, replicas=2)
    torch.testing.assert_close(at_once.draws, one_by_one.draws, rtol=1e-6, atol=1e-8)


class Branch(nn.Module):
    """It looks at its parameter, which vmap does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.rate * x) if self.rate.item() < 5 else x


@pytest.mark.parametrize("loss", ["regression", lambda output, y: (output - y).square()[:, 0]])
def test_a_model_that_cannot_be_vmapped_works(loss: Any) -> None:
    x = normal(50, 1)
    y = torch.exp(0.3 * x) + 0.1 * normal(50, 1, seed=1)
    found = quiet(Branch(), TensorDataset(x, y), loss, rounds=20)
    slope = x * torch.exp(found.estimate["rate"] * x)
    residuals = y - torch.exp(found.estimate["rate"] * x)
    expected = ((slope * residuals).square().sum().sqrt() / slope.square().sum()).item()
    assert found.se["rate"].item() == pytest.approx(expected, rel=4 / math.sqrt(80))


def test_the_same_seed_gives_the_same_draws_and_no_global_generator_is_moved() -> None:
    before = torch.get_rng_state()
    one, two, other = (quiet(Mean(), means(), rounds=5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.draws, two.draws)
    assert not torch.equal(one.draws, other.draws)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fitted_model_keeps_its_parameters() -> None:
    data, model = means(), Mean()
    with torch.no_grad():
        model.m.fill_(data.tensors[1].mean().item())
    found = quiet(model, data, rounds=5)
    assert found.estimate["m"].item() == pytest.approx(model.m.item(), abs=1e-7)
    assert found.module.m.dtype == torch.float64


@pytest.mark.parametrize(("precision", "draws"), [(0.2, 32), (0.1, 64), (0.05, 224)])
def test_rounds_go_on_until_the_precision_is_reached(precision: float, draws: int) -> None:
    """1 / sqrt(2 (m - 1)) for normal draws; the mean of 80 is nearly normal. In steps of 32."""
    found = quiet(Mean(), means(), precision=precision)
    assert draws <= len(found.draws) <= 2 * draws
    assert found.precision <= precision


def test_progress_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    standard_errors(Mean(), means(), rounds=20)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"round 16 of 20: standard errors known to 1\d %, \d+ s left", lines[0])


def test_intervals_cover() -> None:
    """95 % intervals for the mean of 50 normal data, in 60 data sets. Binomial: 4 sqrt(.95 .05 / 60) = 11 %."""
    inside = {"t": 0.0, "percentile": 0.0, "bca": 0.0}
    for seed in range(60):
        data = TensorDataset(torch.zeros(50, 1), normal(50, 1, seed=seed))
        found = quiet(Mean(), data, rounds=50, replicas=100)
        for kind in inside:
            low, high = found.interval(0.95, kind)
            inside[kind] += float(low["m"] < 0 < high["m"]) / 60
    assert all(abs(share - 0.95) < 0.11 for share in inside.values()), inside


class Saturating(nn.Module):
    """Without data before it saturates, the rate is unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.tensor(1.0))
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.size * (1 - torch.exp(-self.rate * x[:, 0]))


def test_draws_that_run_away_are_said_and_not_averaged() -> None:
    """One sample alone determines the rate: without it, in a third of the samples, the rate goes anywhere."""
    x = torch.cat([torch.tensor([1.0]), torch.linspace(20, 30, 15)]).double()[:, None]
    y = (1 - torch.exp(-0.5 * x[:, 0])) + 0.02 * normal(16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = quiet(Saturating(), TensorDataset(x, y), rounds=50)
    said = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert any("do not determine the parameters" in sentence for sentence in said)
    assert any("rate" in sentence and "run away" in sentence for sentence in said)
    assert "rate" in found.runaway
    assert math.isnan(found.se["rate"].item())
    assert "run away" in str(found)


def test_few_data_are_noted() -> None:
    assert "any standard error is uncertain by about 24 %" in str(quiet(Mean(), means(10), rounds=10))
    assert "uncertain" not in str(quiet(Mean(), means(80), rounds=10))


def test_many_parameters_are_fitted_by_gradients() -> None:
    data = means(60, 400)
    found = quiet(Mean(400), data, rounds=5)
    torch.testing.assert_close(found.estimate["m"], data.tensors[1].mean(0), atol=1e-3, rtol=0)
    ratios = found.se["m"] / (data.tensors[1].std(0, correction=0) / math.sqrt(60))
    assert ratios.mean().item() == pytest.approx(1, abs=0.08)  # ten draws are biased by 2.7 %
    with pytest.raises(ValueError, match="second derivatives"):
        found.sandwich()


def test_draws_that_are_too_many_are_not_kept() -> None:
    kept, lost = (quiet(Mean(3), means(k=3), rounds=20, keep_draws=keep) for keep in (True, False))
    assert lost.draws is None
    torch.testing.assert_close(kept.se["m"], lost.se["m"])


def test_batches_give_the_same_standard_errors() -> None:
    data = uneven(400)
    whole = quiet(nn.Linear(2, 1), data, rounds=32)
    batches = quiet(nn.Linear(2, 1), data, rounds=32, batch_size=50, epochs=20, lr=0.05)
    # The same samples, so what differs is how well Adam has settled.
    torch.testing.assert_close(batches._se(), whole._se(), rtol=0.1, atol=0)
    assert ((batches._center - whole._center).abs() < 0.2 * whole._se()).all()


def test_batches_that_have_not_settled_are_said() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(nn.Linear(2, 1), uneven(), rounds=16, batch_size=50, epochs=1, lr=1e-3)
    said = " ".join(str(warning.message) for warning in caught)
    assert "the twins had not settled" in said
    assert "the fit has not settled" in said


class Collinear(TensorDataset):
    def __init__(self, y: Tensor) -> None:
        x = normal(len(y), 2)
        super().__init__(torch.cat([x, x.sum(1, keepdim=True)], 1), y)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: quiet(nn.Linear(3, 1), Collinear(normal(50, 1))), "the data do not determine weight"),
        (
            lambda: quiet(nn.Linear(3, 1), Collinear((normal(50, 1) > 0).double()), "logistic"),
            "do not determine weight",
        ),
        (
            lambda: quiet(nn.Linear(2, 2), TensorDataset(normal(50, 2), torch.arange(50) % 2), "classification"),
            "weight",
        ),
        (
            lambda: quiet(nn.Linear(1, 1), TensorDataset(normal(50, 1), (normal(50, 1) > 0).double()), "logistic"),
            "has not come to a minimum",
        ),
        (lambda: quiet(nn.Linear(3, 1), Collinear(normal(4, 1))), "4 data cannot determine 4 parameters"),
        (lambda: quiet(Mean(), TensorDataset(torch.zeros(9, 1), torch.ones(9, 1))), "all targets are the same"),
        (lambda: quiet(Mean(), means(), rounds=1), "rounds must be a whole number of at least 2"),
        (lambda: quiet(Mean(), means(), precision=0), "precision must be a finite number above 0"),
        (lambda: quiet(Mean(), means(), replicas=1), "replicas must be a whole number of at least 2"),
        (lambda: quiet(Mean(), means(), bootstrap=3), "bootstrap must be a Bootstrap or None"),
        (lambda: quiet(Mean(), means(), bootstrap=Bootstrap(9)), "draws from 9 samples, but the dataset has 80"),
        (lambda: quiet(Mean(), means(), bootstrap=Bootstrap(80, kind="split")), "not kind='split'"),
        (lambda: quiet(Mean(), means(), bootstrap=Bootstrap(80, cover=True)), "leave out cover=True"),
        (lambda: quiet("model", means()), "model must be a torch.nn.Module"),
        (lambda: quiet(nn.Linear(5, 1), uneven()), "the model cannot read the inputs of the samples: "),
    ],
)
def test_bad_input_gets_one_sentence(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError, FloatingPointError, RuntimeError), match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


class Rows(Dataset[Any]):
    """Not a TensorDataset."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> Any:
        return torch.tensor([place / 40.0]), torch.tensor([2 * place / 40.0 + (-1) ** place * 0.1])


def test_any_map_style_dataset_serves() -> None:
    found = quiet(nn.Linear(1, 1), Rows(), rounds=5)
    assert found.estimate["weight"].item() == pytest.approx(2, abs=0.1)
