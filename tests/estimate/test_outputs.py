"""Draws of a chain by noise on its outputs: for each input the distribution of draws of the weights."""

import math
from typing import Any

import pytest
import torch
from loops import assert_same_bits, mlp, seeded
from torch import Tensor, nn

from twinboot import Blocks, Estimate, Twins
from twinboot.estimate.outputs import ChainOfDraws


def estimate_of(model: nn.Module, groups: Any = "layer") -> Estimate:
    twins = Twins(model, groups=groups)
    twins.partition.sigma.copy_(0.2 + torch.rand(twins.partition.sigma.shape, generator=seeded(9)))
    return twins.estimate()


X = torch.randn(5, 4, generator=seeded(0))


@pytest.mark.parametrize("groups", ["layer", "tensor", "unit"])
def test_a_linear_layer_has_the_moments_of_drawn_weights(groups: str) -> None:
    """Variance sigma^2 |x|^2 + sigma'^2 and the mean of the model, within four standard errors."""
    model, samples = nn.Sequential(nn.Linear(4, 2)), 4000
    estimate = estimate_of(model, groups)
    of_weight, of_bias = (s.flatten() for s in estimate.partition.expand(list(estimate.module.parameters())))
    exact = of_weight**2 * X.square().sum(1, keepdim=True) + of_bias**2
    found = estimate.predict(X, samples, task="regression")
    assert ((found.std.square() / exact - 1).abs() < 4 * math.sqrt(2 / samples)).all()
    assert ((found.mean - model(X).detach()).abs() < 4 * (exact / samples).sqrt()).all()


@pytest.mark.parametrize("task", ["classification", "regression", "gaussian"])
def test_deep_chains_predict_as_with_drawn_weights(task: Any) -> None:
    """Means within 4.5 standard errors, and variances within four times sqrt(2 kappa / samples): the ratio of two
    estimates, of which each has a relative variance of (kurtosis - 1) / samples; outputs here have a kurtosis up to 7.
    """
    model, samples = nn.Sequential(nn.Flatten(), mlp(4, 8, 4)), 4000
    estimate = estimate_of(model)
    one, other = (estimate.predict(X, samples, task=task, vectorize=v) for v in (None, True))
    error = ((one.std.square() + other.std.square()) / samples).sqrt()
    assert ((one.mean - other.mean).abs() < 4.5 * error).all()
    assert ((one.std / other.std).log().abs() < 0.5 * 4 * math.sqrt(2 * 6 / samples)).all()


def test_a_prediction_does_not_depend_on_the_batch_and_one_seed_gives_one() -> None:
    estimate = estimate_of(mlp())
    whole = estimate.predict(X, 20, task="regression", seed=3)
    for i in range(5):
        alone = estimate.predict(X[i : i + 1], 20, task="regression", seed=3)
        torch.testing.assert_close((alone.mean[0], alone.std[0]), (whole.mean[i], whole.std[i]))
    assert_same_bits(estimate.predict(X, 20, task="regression", seed=3).std, whole.std)
    assert not torch.equal(estimate.predict(X, 20, task="regression", seed=4).std, whole.std)


def test_draws_are_smooth_functions_of_the_input() -> None:
    near = torch.stack([X[0], X[0] + 1e-3])
    found = estimate_of(mlp()).predict(near, 20, task="regression")
    torch.testing.assert_close(found.std[0], found.std[1], rtol=1e-2, atol=0)


def test_no_weights_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = estimate_of(mlp())
    monkeypatch.setattr(Estimate, "_draw", None)
    estimate.predict(X, 3, task="regression")
    with pytest.raises(TypeError, match="not callable"):
        estimate.predict(X, 3, task="regression", vectorize=False)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def half_frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (mlp(), "weight"),
        (mlp(), Blocks((2,))),
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), "layer"),
        (nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 3)), "layer"),
        (half_frozen(), "layer"),
        (Wrapped(), "layer"),
    ],
)
def test_other_models_get_drawn_weights(model: nn.Module, groups: Any) -> None:
    estimate = estimate_of(model, groups)
    assert ChainOfDraws.of(estimate.module, estimate.partition, 1.0) is None
    one, other = (estimate.predict(X, 3, task="regression", vectorize=v) for v in (None, False))
    torch.testing.assert_close((one.mean, one.std), (other.mean, other.std))


def test_inputs_that_are_no_vectors_get_drawn_weights() -> None:
    x = torch.randn(2, 5, 4, generator=seeded(1))
    estimate = estimate_of(mlp())
    one, other = (estimate.predict(x, 3, task="regression", vectorize=v) for v in (None, False))
    torch.testing.assert_close((one.mean, one.std), (other.mean, other.std))


def test_scores_are_not_compared_with_those_of_other_draws() -> None:
    estimate = estimate_of(mlp())
    estimate.task = "classification"
    data = torch.utils.data.TensorDataset(X, torch.arange(5) % 3)
    estimate.conformalize(data)
    assert estimate.predict(X).scores is not None
    assert estimate.predict(X, vectorize=True).scores is None
