"""The least-squares solver against closed forms."""

import pytest
import torch
from loops import seeded
from torch import Tensor

from twinboot.inverse.solver import evaluate, least_squares


def identity(fields: Tensor) -> Tensor:
    return fields


def silent() -> None:
    pass


def test_each_member_of_a_linear_problem_is_at_its_own_minimum() -> None:
    matrix = torch.randn(3, 30, 8, generator=seeded(0), dtype=torch.double)
    observed = torch.randn(3, 30, generator=seeded(1), dtype=torch.double)
    steps = []
    found = least_squares(
        lambda v: torch.einsum("bij,bj->bi", matrix, v) - observed,
        torch.zeros(3, 8, dtype=torch.double),
        identity,
        100,
        lambda: steps.append(1),
    )
    torch.testing.assert_close(found, torch.linalg.lstsq(matrix, observed).solution, atol=1e-2, rtol=0)
    assert len(steps) <= 8 + 6  # as many as conjugate gradients need, and the window that ends the search


def test_a_nonlinear_problem_ends_where_the_gradient_is_zero() -> None:
    matrix = torch.randn(40, 6, generator=seeded(2), dtype=torch.double)
    observed = (3 * torch.randn(40, generator=seeded(3), dtype=torch.double)).tanh()

    def residuals(v: Tensor) -> Tensor:
        return 100 * ((v @ matrix.T).tanh() - observed)

    found = least_squares(residuals, torch.zeros(2, 6, dtype=torch.double), lambda g: g / 1e5, 300, silent)
    before, after = (evaluate(residuals, v)[1].norm() for v in (torch.zeros_like(found), found))
    assert after < 1e-3 * before


def test_steps_into_a_region_without_finite_values_are_shortened() -> None:
    def residuals(v: Tensor) -> Tensor:
        return (v + 1).log() - torch.tensor([-3.0, 0.5])  # NaN below -1

    found = least_squares(residuals, torch.zeros(1, 2), lambda g: 10 * g, 200, silent)
    torch.testing.assert_close(found, torch.tensor([[-3.0, 0.5]]).exp() - 1, atol=0.03, rtol=0)


def test_a_start_without_finite_values_is_refused() -> None:
    with pytest.raises(FloatingPointError, match="not finite at the start"):
        least_squares(lambda v: v * torch.nan, torch.zeros(1, 2), identity, 10, silent)
