"""The priors of `invert`: their residuals, their eigenvalues, and what is refused."""

import math
from typing import Any

import pytest
import torch
from loops import seeded
from torch import Tensor

from twinboot import Dense, Edges, GaussianProcess, Near, Residuals, Smooth, invert
from twinboot.inverse.priors import Prior, as_priors

SHAPES = [(7,), (5, 6), (4, 5, 6)]


def information(prior: Prior, shape: tuple[int, ...]) -> Tensor:
    """R'R, by the derivatives of the residuals."""
    zero = torch.zeros(shape, dtype=torch.double)
    jacobian = torch.autograd.functional.jacobian(prior.residuals(zero), zero).flatten(1)
    return jacobian.T @ jacobian


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "prior",
    [
        *(Smooth(1), Smooth(2), Smooth(3), Smooth(2, axes=[-1]), Near(), Edges(0.1)),
        *(GaussianProcess(2.0, smoothness=smoothness) for smoothness in (0.5, 1.5, 2.5)),
    ],
)
def test_the_spectrum_is_that_of_the_second_derivatives(prior: Prior, shape: tuple[int, ...]) -> None:
    spectrum = prior.spectrum(shape)
    assert spectrum is not None
    fields = torch.randn(2, *shape, generator=seeded(0), dtype=torch.double)
    whole = information(prior, shape) + 0.1 * torch.eye(math.prod(shape), dtype=torch.double)
    expected = torch.linalg.solve(whole, fields.flatten(1).T).T.view_as(fields)
    torch.testing.assert_close(spectrum.inverse(fields, spectrum.values + 0.1), expected)


def test_smooth_does_not_see_polynomials_below_its_order() -> None:
    place = torch.arange(9.0)
    for order in (1, 2, 3):
        residuals = Smooth(order).residuals(place)
        assert not residuals(place ** (order - 1)).any()
        assert residuals(place**order).all()


def test_axes_that_are_too_short_have_no_differences() -> None:
    assert Smooth(2).residuals(torch.zeros(2, 5))(torch.zeros(2, 5)).shape == (2 * 3,)
    with pytest.raises(ValueError, match=r"a field of shape \(2, 2\) has no differences of order 2: give a lower"):
        Smooth(2).residuals(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="axes must be axes of the field, 0 to 1, not"):
        Smooth(1, axes=[2]).residuals(torch.zeros(4, 4))


@pytest.mark.parametrize("smoothness", [0.5, 1.5, 2.5, math.inf])
def test_a_gaussian_process_has_the_covariance_of_its_kernel(smoothness: float) -> None:
    """The inverse of R'R is the product of the kernels along the axes, here with a length for each. A Matern kernel of
    smoothness s has correlation K_s(sqrt(2 s) d) (sqrt(2 s) d)^s 2^(1 - s) / Gamma(s) at distance d (scipy)."""
    from scipy.special import gamma, kv

    prior, shape = GaussianProcess(length=(1.5, 2.0), smoothness=smoothness), (4, 5)
    covariance = torch.linalg.inv(information(prior, shape)).view(*shape, *shape)

    def kernel(d: float) -> float:
        if math.isinf(smoothness):
            return math.exp(-(d**2) / 2)
        x = math.sqrt(2 * smoothness) * d
        return float(kv(smoothness, x) * x**smoothness * 2 ** (1 - smoothness) / gamma(smoothness)) if x else 1.0

    tolerance = 1e-4 if math.isinf(smoothness) else 1e-7  # the smallest variances are raised a little
    for i, j in [(0, 0), (1, 0), (3, 2), (2, 4)]:
        assert abs(covariance[0, 0, i, j].item() - kernel(i / 1.5) * kernel(j / 2)) < tolerance


def test_the_lengths_that_are_tried_go_with_the_size_of_the_field() -> None:
    tried = [prior.length for prior in GaussianProcess().candidates(torch.zeros(20, 32))]  # type: ignore[attr-defined]
    assert tried == [16, 8, 4, 2]
    assert len(GaussianProcess().candidates(torch.zeros(2))) == 1
    assert GaussianProcess(length=3.0).candidates(torch.zeros(9)) == [GaussianProcess(length=3.0)]


def test_a_prior_that_was_found_can_be_given_again() -> None:
    found = GaussianProcess(length=3.0).weighted(7.3)
    assert isinstance(found, GaussianProcess)
    assert found == GaussianProcess(length=3.0, std=found.std)
    assert found.std == pytest.approx(7.3**-0.5)


def test_edges_are_squares_for_small_differences_and_linear_for_jumps() -> None:
    """The square of a residual is 2 scale^2 (sqrt(1 + (d / scale)^2) - 1)."""
    steps = torch.tensor([1e-4, 0.1, 100.0], dtype=torch.double)
    field = torch.cat([torch.zeros(1, dtype=torch.double), steps.cumsum(0)])
    squares = Edges(scale=0.1).residuals(field)(field).square()
    torch.testing.assert_close(squares, 0.02 * ((1 + (steps / 0.1) ** 2).sqrt() - 1), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(squares[0].sqrt(), steps[0], rtol=1e-3, atol=0)
    assert abs(squares[2] / (0.2 * 100) - 1) < 0.01


@pytest.mark.parametrize("prior", [1.0, "found", 3, torch.tensor(2.0)])
def test_the_former_numbers_and_names_are_refused_with_what_to_use(prior: Any) -> None:
    with pytest.raises(TypeError, match=r"^prior must be GaussianProcess\(\), .* is Near\(std=\.\.\.\)\.$"):
        invert(Dense(torch.eye(3)), torch.ones(3), torch.zeros(3), prior=prior)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_priors([1.0]), "prior must be GaussianProcess"),
        (lambda: as_priors(Smooth), "prior must be GaussianProcess"),
        (lambda: Smooth(order=0), "order must be a whole number of at least 1"),
        (lambda: Smooth(weight=-1.0), 'weight must be a number above 0 or "unseen", not -1.0'),
        (lambda: Smooth(weight="found"), 'weight must be a number above 0 or "unseen"'),  # type: ignore[arg-type]
        (lambda: Near(std=0.0), "std must be a finite number above 0"),
        (lambda: Near(std=1.0, weight=2.0), "std or weight, not both"),
        (lambda: GaussianProcess(length=0.0), "length must be a finite number above 0"),
        (lambda: GaussianProcess(length="long"), "length must be a number of cells or"),  # type: ignore[arg-type]
        (lambda: GaussianProcess(smoothness=2.0), "smoothness must be 0.5, 1.5, 2.5 or math.inf, not 2.0"),
        (lambda: GaussianProcess(smoothness=[2.5]), "smoothness must be 0.5"),  # type: ignore[arg-type]
        (lambda: GaussianProcess(std=1.0, weight=2.0), "GaussianProcess takes std or weight, not both"),
        (lambda: GaussianProcess(length=(1.0, 2.0)).spectrum((3,)), "length has 2 numbers, but the field has 1 axes"),
        (lambda: Edges(scale=-1.0), "scale must be a finite number above 0"),
        (lambda: Residuals(3), "function must be a function"),  # type: ignore[arg-type]
        (lambda: Residuals(lambda v: [v]).residuals(torch.zeros(2)), "must give a tensor of residuals"),  # type: ignore[arg-type,return-value]
        (lambda: Residuals(lambda v: v / 0 * 0).residuals(torch.zeros(2)), "residuals that are not finite"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_none_and_no_priors_are_no_prior() -> None:
    assert as_priors(None) == as_priors([]) == ()
    [one, other] = as_priors([Near(), torch.diff])
    assert one == Near()
    assert isinstance(other, Residuals)
