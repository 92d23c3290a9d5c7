import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from twinboot.parameters.gradients import Batches, by_lbfgs
from twinboot.parameters.local import Locals
from twinboot.parameters.newton import FIT, settle
from twinboot.parameters.problem import Problem

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(200, 2, generator=GENERATOR).double()
Y = (torch.rand(200, generator=GENERATOR) < torch.sigmoid(X[:, 0])).double()[:, None]
WEIGHTS = torch.randint(0, 3, (2, 200), generator=GENERATOR).double()


@pytest.mark.parametrize("way", ["lbfgs", "batches"])
def test_the_minima_are_those_of_newtons_method(way: str) -> None:
    problem = Problem(nn.Linear(2, 1), TensorDataset(X, Y), "logistic")
    start = problem.start.expand(2, -1)
    exact = settle(Locals(problem), start, WEIGHTS, tolerance=FIT, damping=1e-3)
    if way == "lbfgs":
        found, done = by_lbfgs(problem, start, WEIGHTS)
        assert done.all()
    else:
        found = Batches(problem, 50, 40, 0.05, 0)(start, WEIGHTS, "test", lambda: None)
    inverse = torch.linalg.inv(exact.local.root[0]).diagonal().sqrt()  # about a standard error
    assert ((found - exact.members) / inverse).abs().max() < (0.01 if way == "lbfgs" else 0.2)


def test_a_gradient_that_is_not_finite_is_said() -> None:
    x = X.clone()
    x[7] = torch.nan
    problem = Problem(nn.Linear(2, 1), TensorDataset(x, Y), "logistic", whole=False)
    with pytest.raises(FloatingPointError, match="not finite in pass 1"):
        Batches(problem, 50, 1, 0.05, 0)(problem.start[None], WEIGHTS[:1], "test", lambda: None)
