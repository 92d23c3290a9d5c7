import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from twinboot.parameters.local import Locals
from twinboot.parameters.problem import Problem

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(30, 2, generator=GENERATOR).double()
Y = (X.sum(1, keepdim=True) > 0).double()


def curved() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()


@pytest.mark.parametrize("loss", ["regression", "logistic"])
def test_all_at_once_is_the_same_as_one_by_one(loss: str) -> None:
    problem = Problem(curved(), TensorDataset(X, Y), loss)  # type: ignore[arg-type]
    members = problem.start + 0.1 * torch.randn(4, problem.size, generator=GENERATOR).double()
    weights = torch.randint(0, 3, (4, 30), generator=GENERATOR).double()
    one, other = (Locals(problem, vmapped)(members, weights) for vmapped in (True, False))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.abs(), b.abs())  # the signs of a triangle's rows are free


def test_the_triangle_of_squares_is_the_root_of_gauss_and_newtons_curvature() -> None:
    problem = Problem(nn.Linear(2, 1), TensorDataset(X, Y), "regression")
    weights = torch.randint(0, 3, (1, 30), generator=GENERATOR).double()
    local = Locals(problem)(problem.start[None], weights)
    design = torch.cat([X, torch.ones(30, 1).double()], 1)
    expected = design.T @ (weights[0][:, None] * design)
    torch.testing.assert_close(local.root[0].T @ local.root[0], expected)
    residuals = problem.residuals(problem.start)[:, 0]
    torch.testing.assert_close(local.root[0].T @ local.slope[0], design.T @ (weights[0] * residuals))


def test_the_influence_gives_whites_sandwich() -> None:
    problem = Problem(nn.Linear(2, 1), TensorDataset(X, Y), "regression")
    design = torch.cat([X, torch.ones(30, 1).double()], 1)
    fit = torch.linalg.lstsq(design, Y).solution[:, 0]
    influence = Locals(problem).influence(fit)
    assert influence is not None
    inverse, residuals = torch.linalg.inv(design.T @ design), Y[:, 0] - design @ fit
    hc0 = inverse @ (design.T @ (residuals.square()[:, None] * design)) @ inverse
    torch.testing.assert_close(influence.T @ influence, hc0)


class Branch(nn.Module):
    """It looks at its parameter, which vmap does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x[:, :1] if self.a.item() > 0 else x[:, :1]


def test_a_model_that_cannot_be_vmapped_is_noticed() -> None:
    assert Locals(Problem(curved(), TensorDataset(X, Y), "regression")).vmapped
    assert not Locals(Problem(Branch(), TensorDataset(X, Y), "regression")).vmapped
    assert not Locals(Problem(Branch(), TensorDataset(X, Y), "logistic")).vmapped
