import math

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
