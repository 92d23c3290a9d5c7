import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from twinboot import fit
from twinboot._core.seeds import seeded
from twinboot.experiments.truth import config, methods
from twinboot.experiments.truth.config import Config
from twinboot.experiments.truth.methods import METHODS, best_prior, by_laplace, gauss_newton, swag_draw
from twinboot.experiments.truth.tasks import Plain, Task, plain, task_of, train

CONFIG = Config(sizes=(60,), lrs=(0.01,), epochs=4, samples=5, inputs=12)


def first() -> tuple[Task, Plain]:
    return task_of(CONFIG, 60, 0.01, 0), plain(CONFIG, 60, 0.01, 0)


def test_every_method_of_the_config_is_there() -> None:
    assert set(METHODS) == set(config.METHODS)


ROWS = {
    "fit": {"fit": (5, math.inf)},
    "error_bars": {"error_bars": (6, 5), "error_bars, sigma": (5, math.inf)},
    "dropout": {"MC dropout": (5, math.inf), "MC dropout, averaged": (5, math.inf)},
    "ensemble": {"ensemble of 2": (2, 1), "ensemble of 3": (3, 2)},
    "bootstrap": {"bootstrap of 2": (2, 1), "bootstrap of 3": (3, 2)},
    "ivon": {"IVON": (5, math.inf)},
    "laplace": {"Laplace, last layer": (5, math.inf)},
    "swag": {"SWAG": (5, math.inf)},
}


@pytest.mark.parametrize("name", ROWS)
def test_each_method_has_a_spread_and_leaves_the_plain_model_alone(name: str) -> None:
    if name == "ivon":
        pytest.importorskip("ivon", reason="ivon needs the extra compare")
    task, trained = first()
    before = task.predict(trained.model)
    found = METHODS[name](task, trained, (2, 3))
    assert {row: (len(own.draws), own.df) for row, own in found.items()} == ROWS[name]
    for own in found.values():
        assert own.draws.shape[1:] == own.point.shape == (12, 1)
        assert (own.draws.std(0) > 0).all()
        assert own.seconds > 0
    assert torch.equal(task.predict(trained.model), before)
    again = METHODS[name](task, trained, (2, 3))
    assert all(torch.equal(own.draws, again[row].draws) for row, own in found.items())


def test_error_bars_and_laplace_keep_the_prediction_of_the_plain_model() -> None:
    task, trained = first()
    for name in ("error_bars", "laplace"):
        for own in METHODS[name](task, trained, (2,)).values():
            assert torch.equal(own.point, task.predict(trained.model))


@pytest.mark.parametrize("spread", [0.3, 0.0])
def test_only_draws_with_a_matched_spread_are_centered(spread: float) -> None:
    task, _ = first()
    data = TensorDataset(task.x, task.y)
    estimate = fit(task.network(0.0, 0), data, "regression", epochs=2, spread=spread, progress=False).estimate
    drawn, point = methods._of_estimate(task, estimate), task.predict(estimate.module)
    assert torch.allclose(drawn.mean(0), point) == estimate.centered == (spread > 0)


def test_the_plain_model_is_the_first_of_an_ensemble_and_small_ones_are_parts_of_large_ones() -> None:
    task, trained = first()
    found = METHODS["ensemble"](task, trained, (2, 3))
    assert torch.equal(found["ensemble of 3"].draws[0], task.predict(trained.model))
    for name in ("ensemble", "bootstrap"):
        two, three = METHODS[name](task, trained, (2, 3)).values()
        assert torch.equal(two.draws, three.draws[:2])
        assert two.seconds < three.seconds


def test_the_average_weights_later_epochs_as_fit_does() -> None:
    """After t epochs the weight of epoch s is proportional to (s + 7)! / (s - 1)!, about s^8."""
    average = torch.zeros(())
    for count, value in enumerate((0.0, 0.0, 1.0)):
        average = methods._later_ones_more(average, torch.tensor(value), count) if count else torch.tensor(value)
    raw = [math.factorial(s + 7) / math.factorial(s - 1) for s in (1, 2, 3)]
    assert average.item() == pytest.approx(raw[2] / sum(raw), rel=1e-5)


def linear_task(kind: Any, outputs: int, n: int = 200) -> tuple[Task, Plain, Tensor]:
    """A linear model, which is a last layer alone, at the least squares or near the maximum of the likelihood."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    layer = nn.Linear(2, outputs)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outputs, 2, generator=generator))
        layer.bias.copy_(torch.randn(outputs, generator=generator))
    y = layer(x).detach() + 0.5 * torch.randn(n, outputs, generator=generator)
    y = y if kind == "regression" else torch.randint(outputs, (n,), generator=generator)
    task = Task(kind, x, y, x[:20], lambda dropout, seed: layer, 1, 32, 3, 0.1, samples=4000, seed=0)
    return task, Plain(nn.Sequential(nn.Identity(), layer), 1.0), torch.cat([x, torch.ones(n, 1)], 1).double()


def test_for_a_linear_classifier_the_matrix_of_laplace_is_the_hessian() -> None:
    task, model, inputs = linear_task("classification", 3)
    layer = model.model[1]  # type: ignore[index]
    weights = torch.cat([layer.weight, layer.bias[:, None]], 1).detach().double()

    def loss(flat: Tensor) -> Tensor:
        return nn.functional.cross_entropy(inputs @ flat.view(3, 3).T, task.y, reduction="sum")

    hessian = torch.autograd.functional.hessian(loss, weights.flatten())
    torch.testing.assert_close(gauss_newton(task, model, inputs), hessian, rtol=1e-5, atol=1e-5)


def test_for_a_linear_regression_laplace_has_the_variance_of_least_squares() -> None:
    """The prior is broad beside 200 samples: it changes the precision by less than 3 %, and the noise is one of a grid
    with steps of 6 %, so at most 3 % off."""
    task, model, inputs = linear_task("regression", 1)
    noise = (task.predict(model.model, task.x) - task.y).square().sum() / (200 - 3)
    expected = noise * (inputs[:20] @ (inputs.T @ inputs).inverse() * inputs[:20]).sum(1)
    [found] = by_laplace(task, model, (2,)).values()
    ratio = found.draws[..., 0].var(0) / expected
    assert ((ratio - 1).abs() < 4 * math.sqrt(2 / 4000) + 0.06).all()


def test_the_prior_of_laplace_has_the_largest_marginal_likelihood() -> None:
    """For eigenvalues far above it, it is that of the weights: their number divided by their squared norm."""
    weights = torch.full((100,), 0.5, dtype=torch.float64)
    step = (methods.PRECISIONS[1] / methods.PRECISIONS[0]).item()
    found, noise = best_prior(torch.full((100,), 1e9, dtype=torch.float64), weights, 50, 0.0)
    assert 4 / step < found < 4 * step
    assert noise == 1


def test_the_noise_of_laplace_counts_the_parameters_that_were_fitted() -> None:
    """With a prior that is broad, n * residual / (n - parameters) maximises the marginal likelihood."""
    n, parameters, residual = 100, 40, 0.3
    weights = torch.full((parameters,), 100.0, dtype=torch.float64)
    step = (methods.NOISES[1] / methods.NOISES[0]).item()
    _, noise = best_prior(torch.full((parameters,), 1e6, dtype=torch.float64), weights, n, residual)
    expected = n * residual / (n - parameters)
    assert expected / step < noise < expected * step


def test_draws_of_swag_have_half_of_both_covariances() -> None:
    snapshots = torch.tensor([[1.0, 0.0], [3.0, 2.0], [2.0, 4.0]])
    generator, n = torch.Generator().manual_seed(0), 20_000
    draws = torch.stack([swag_draw(snapshots, generator) for _ in range(n)])
    covariance = (torch.cov(snapshots.T, correction=0).diag().diag() + torch.cov(snapshots.T)) / 2
    error = (covariance.diag()[:, None] * covariance.diag() + covariance.square()).div(n).sqrt()
    assert ((torch.cov(draws.T) - covariance).abs() < 4 * error).all()
    assert ((draws.mean(0) - snapshots.mean(0)).abs() < 4 * covariance.diag().div(n).sqrt()).all()


def test_fit_gets_the_settings_of_the_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    task, trained = first()
    asked: dict[str, Any] = {}
    real = methods.fit

    def fit(model: nn.Module, dataset: TensorDataset, loss: str, **settings: Any) -> Any:
        asked.update(settings, loss=loss, n=len(dataset))
        return real(model, dataset, loss, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(methods, "fit", fit)
    METHODS["fit"](replace(task, lr=0.02), trained, (2,))
    assert (asked["n"], asked["loss"], asked["epochs"], asked["batch_size"]) == (60, "regression", 4, 32)
    assert asked["optimizer"]([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("name", list(ROWS))
def test_networks_with_batchnorm_and_channels_last_have_a_spread(name: str) -> None:
    if name == "ivon":
        pytest.importorskip("ivon", reason="ivon needs the extra compare")

    def network(dropout: float, seed: int) -> nn.Module:
        with seeded(seed):
            layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(dropout), nn.Flatten()]
            model = nn.Sequential(*layers, nn.Linear(4 * 4 * 4, 3))
        return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return,call-overload]

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(80, 3, 6, 6, generator=generator), torch.randint(3, (80,), generator=generator)
    task = Task("classification", x, y, x[:10], network, 3, 32, 3, 0.01, samples=4, seed=0)
    model, _ = train(task, 0)
    for own in METHODS[name](task, Plain(model, 1.0), (2, 3)).values():
        assert (own.draws.sum(2) - 1).abs().max() < 1e-9
        assert (own.draws.std(0) > 0).all()
