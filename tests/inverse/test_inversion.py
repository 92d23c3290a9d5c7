import math

import pytest
import torch

from twinboot import Bootstrap, Inversion


def test_intervals_and_predictions_follow_sigma() -> None:
    field, sigma = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25])
    found = Inversion(field, sigma, 1, {}, Bootstrap(2, seed=1))
    low, high = found.interval(0.9)
    torch.testing.assert_close(high - field, 1.6449 * sigma, atol=1e-3, rtol=0)
    torch.testing.assert_close(field - low, high - field)
    draws = 4000
    prediction = found.predict(lambda v: torch.stack([v.sum(), v[0] - v[1]]), samples=draws)
    spread = math.sqrt(0.5**2 + 0.25**2)
    assert (prediction.std - spread).abs().max() < 4 * spread / math.sqrt(2 * draws)
    assert (prediction.mean - torch.tensor([-1.0, 3.0])).abs().max() < 4 * spread / math.sqrt(draws)
    exact = found.predict(lambda v: v * 2, samples=0)
    torch.testing.assert_close(exact.mean, field * 2)
    assert not exact.std.any()


def test_it_prints_as_one_line() -> None:
    found = Inversion(torch.zeros(2, 3), torch.full((2, 3), 0.25), 40, {}, Bootstrap(2, seed=1))
    assert repr(found) == "Inversion(field of shape (2, 3), sigma 0.25 in the rms, from step 40)"


@pytest.mark.parametrize("samples", [1, -1])
def test_a_spread_needs_two_samples(samples: int) -> None:
    found = Inversion(torch.zeros(2), torch.ones(2), 1, {}, Bootstrap(2, seed=1))
    with pytest.raises(ValueError, match="samples must be 0, for the field alone, or at least 2"):
        found.predict(lambda v: v, samples)


def test_an_operator_that_writes_leaves_the_result_as_it_is() -> None:
    found = Inversion(torch.ones(2), torch.ones(2), 1, {}, Bootstrap(2, seed=1))
    found.predict(lambda v: v.mul_(2), samples=0)
    assert torch.equal(found.field, torch.ones(2))
