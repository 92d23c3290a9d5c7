"""The scale of weight noise that spreads predictions as much as the twins differ, against closed forms."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loops import seeded
from torch import nn
from torch.utils.data import TensorDataset

from twinboot import Twins
from twinboot._core.seeds import seeded as from_seed
from twinboot.estimate.spread import DRAWS, PRECISION, WIDEST, match, match_spread_, values_of, variance
from twinboot.training.epoch import Training
from twinboot.training.protocol import FIT, Protocol, complete


@pytest.mark.parametrize("models", [2, 3, 8])
def test_the_variance_is_the_unbiased_one_averaged_over_inputs(models: int) -> None:
    values = torch.randn(models, 20, 3, generator=seeded(0), dtype=torch.float64)
    assert variance(list(values)) == pytest.approx(values.var(0).mean().item(), rel=1e-12)


def test_two_models_have_half_their_squared_distance() -> None:
    first, second = torch.randn(2, 50, 4, generator=seeded(1), dtype=torch.float64)
    assert variance([first, second]) == pytest.approx(((first - second).square() / 2).mean().item(), rel=1e-12)


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("exact", [0.03, 1.0, 2.5, 40.0])
def test_a_power_law_is_inverted(exact: float, power: float) -> None:
    found = match(lambda scale: 7 * scale**power, 7 * exact**power)
    assert abs(math.log(found / exact)) < PRECISION


def test_a_spread_that_saturates_is_inverted_below_its_limit() -> None:
    found = match(lambda scale: 1 - math.exp(-(scale**2)), 0.5)
    assert abs(math.log(found / math.sqrt(math.log(2)))) < PRECISION


@pytest.mark.parametrize("exact", [0.5, 1.3, 2.5])
def test_few_spreads_are_computed_and_the_scale_is_that_of_a_plain_bisection(exact: float) -> None:
    """Each costs 16 passes over all samples. A bisection of [1/64, 64] to 1 % needs 10, and three at first."""
    asked = []

    def saturating(scale: float) -> float:
        asked.append(scale)
        return 1 - math.exp(-0.3 * scale**1.6)

    found = match(saturating, saturating(exact))
    assert len(asked) - 1 <= 8
    low, high = math.log(1 / WIDEST), math.log(WIDEST)
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if math.exp(middle) < exact else (low, middle)
    assert found == math.exp((low + high) / 2)


def test_a_spread_that_no_noise_reaches_gets_the_widest_scale_and_a_warning() -> None:
    with pytest.warns(UserWarning, match="no weight noise spreads the predictions as much .* scale was set to 64"):
        assert match(lambda scale: 1 - math.exp(-(scale**2)), 2.0) == WIDEST


def test_a_tiny_spread_is_extrapolated_as_a_square() -> None:
    assert match(lambda scale: scale**2, 1e-8) == pytest.approx(1e-4)
    assert match(lambda scale: scale**2, 0.0) == 0


def test_without_sigma_the_scale_stays_1() -> None:
    assert match(lambda scale: 0.0, 1.0) == 1


@pytest.mark.parametrize(("spread", "target"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf)])
def test_where_predictions_are_not_finite_the_scale_stays_1_and_a_warning_says_so(spread: float, target: float) -> None:
    with pytest.warns(UserWarning, match="look for bad samples"):
        assert match(lambda scale: spread * scale, target) == 1


@pytest.mark.parametrize("beyond", [math.inf, math.nan])
def test_draws_that_overflow_get_a_smaller_scale(beyond: float) -> None:
    found = match(lambda scale: 4 * scale**2 if scale < 0.9 else beyond, 1.0)
    assert abs(math.log(found / 0.5)) < PRECISION


def test_empty_batches_do_not_count() -> None:
    """As a sampler of a user's own may give."""
    twins = Twins(nn.Linear(4, 3))
    with torch.no_grad():
        for p in twins[0].parameters():
            p.add_(0.3)
    twins.update()
    estimates = [twins.estimate(), twins.estimate()]
    x = torch.randn(50, 4, generator=seeded(9))
    for estimate, inputs in zip(estimates, ([x], [x[:0], x, x[:0]]), strict=True):
        estimate.task = "classification"
        match_spread_(estimate, twins, inputs, seed=0)
    assert estimates[0].scale == estimates[1].scale != 1


def test_what_spreads_are_probabilities_means_or_values() -> None:
    outputs = torch.randn(5, 4, generator=seeded(2))
    torch.testing.assert_close(values_of(outputs, "classification"), outputs.double().softmax(1))
    torch.testing.assert_close(values_of(outputs, "gaussian"), outputs[:, :2].double())
    for task in ("regression", None):
        torch.testing.assert_close(values_of(outputs, task), outputs.double())  # type: ignore[arg-type]
    wrapped: Any = SimpleNamespace(logits=outputs)  # as Hugging Face models return
    torch.testing.assert_close(values_of(wrapped, "classification"), outputs.double().softmax(1))


def test_the_matched_scale_of_a_linear_model_is_the_closed_form() -> None:
    """Predictions of draws have the variance (scale * sigma)^2 (|x|^2 + 1), those of twins |x (w_1 - w_2)|^2 / 2."""
    n, wide = 400, 50
    x = torch.randn(n, wide, generator=seeded(3))
    data = TensorDataset(x, torch.zeros(n, 1))
    protocol = complete(Protocol(noise=0.0), FIT, "fit")
    run = Training(nn.Linear(wide, 1), data, "regression", protocol=protocol, batch_size=64, bootstrap=None, seed=0)
    with torch.no_grad():
        for seed, twin in enumerate(run.twins):
            for p in twin.parameters():
                p.add_(torch.randn(p.shape, generator=seeded(seed + 4)))
    run.twins.update()
    run.twins.partition.sigma.mul_(0.2)  # the scale has to make up for it
    unseen = x[run.bootstrap.unseen]
    first, second = (twin(unseen).detach() for twin in run.twins)
    per_scale = (float(run.twins.sigma["(model)"]) ** 2) * (unseen.square().sum(1) + 1).mean().item()
    exact = math.sqrt(((first - second).square() / 2).mean().item() / per_scale)
    estimate = run.estimate()
    run.match_spread_(estimate)
    assert estimate.centered
    # 16 draws of 51 weights: a variance with 15 * 51 degrees of freedom, and half its relative error for the scale.
    assert abs(math.log(estimate.scale / exact)) < 4 * math.sqrt(2 / ((DRAWS - 1) * (wide + 1))) / 2 + PRECISION


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_centered_draws_spread_predictions_as_the_twins_do(task: Any) -> None:
    """Predictions by the draws that chose the scale, up to the precision of the search."""
    with from_seed(6):
        twins = Twins(nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3)))
    with torch.no_grad():
        for seed, twin in enumerate(twins):
            for p in twin.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=seeded(seed + 7)))
    twins.update()
    estimate = twins.estimate()
    estimate.task = task
    x = torch.randn(300, 4, generator=seeded(9))
    match_spread_(estimate, twins, x.split(100), seed=0)
    with torch.no_grad():
        first, second = (values_of(twin(x), task) for twin in twins)
    apart = (first - second).square().mean() / 2
    found = estimate.predict(x, DRAWS, vectorize=False)
    assert abs(math.log(found.std.square().mean() / apart)) < 2 * PRECISION  # of a square


def test_the_scale_does_not_depend_on_what_is_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale(kept: int) -> float:
        monkeypatch.setattr("twinboot.estimate.centered.MOST_OUTPUTS", kept)
        with from_seed(6):
            twins = Twins(nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3)))
        with torch.no_grad():
            for p in twins[0].parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=seeded(7)))
        twins.update()
        estimate = twins.estimate()
        estimate.task = "classification"
        match_spread_(estimate, twins, torch.randn(50, 4, generator=seeded(9)).split(12), seed=0)
        return estimate.scale

    assert scale(1) == pytest.approx(scale(2**26), rel=1e-6)
