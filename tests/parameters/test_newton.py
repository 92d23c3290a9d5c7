import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from twinboot.parameters.local import Locals
from twinboot.parameters.newton import DRAW, FIT, determined, settle, weakest
from twinboot.parameters.problem import Problem

GENERATOR = torch.Generator().manual_seed(0)


def line(n: int = 40) -> tuple[Locals, Tensor, Tensor]:
    x = torch.randn(n, 2, generator=GENERATOR).double()
    y = x @ torch.tensor([[1.0], [-2.0]]).double() + torch.randn(n, 1, generator=GENERATOR).double()
    return Locals(Problem(nn.Linear(2, 1), TensorDataset(x, y), "regression")), x, y


def test_least_squares_of_each_member_are_those_of_its_own_weights() -> None:
    evaluate, x, y = line()
    weights = torch.randint(0, 3, (5, 40), generator=GENERATOR).double()
    start = evaluate.problem.start.expand(5, -1)
    found = settle(evaluate, start, weights, tolerance=FIT, damping=1e-3)
    design = torch.cat([x, torch.ones(40, 1).double()], 1)
    for member, weight in zip(found.members, weights, strict=True):
        root = weight.sqrt()[:, None]
        expected = torch.linalg.lstsq(root * design, root * y).solution[:, 0]
        torch.testing.assert_close(member, expected)
    assert found.done.all()


class Banana(nn.Module):
    """Rosenbrock's valley as residuals: 10 (b - a^2) and 1 - a."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in (-1.2, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0] * 10 * (self.b - self.a**2) + x[:, 1] * (1 - self.a) + x[:, 2]


def test_a_curved_valley_is_followed_to_its_end() -> None:
    x = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).double()
    problem = Problem(Banana(), TensorDataset(x, torch.tensor([0.0, 0.0, 1.0]).double()), "regression")
    ones = torch.ones(1, 3).double()
    found = settle(Locals(problem), problem.start[None], ones, tolerance=FIT, damping=1e-3)
    torch.testing.assert_close(found.members[0], torch.ones(2).double(), atol=1e-7, rtol=0)
    assert found.steps < 40


class Decay(nn.Module):
    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit
        self.size = nn.Parameter(torch.tensor(1.0 / unit, dtype=torch.float64))
        self.rate = nn.Parameter(torch.tensor(0.3 * unit, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.size * self.unit * torch.exp(-self.rate / self.unit * x[:, 0])


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_the_units_of_a_parameter_do_not_matter(unit: float) -> None:
    x = torch.linspace(0, 2, 30).double()[:, None]
    data = TensorDataset(x, 3 * torch.exp(-x[:, 0]) + 0.1 * torch.randn(30, generator=GENERATOR).double())
    found = []
    for own in (1.0, unit):
        problem = Problem(Decay(own), data, "regression")
        done = settle(Locals(problem), problem.start[None], torch.ones(1, 30).double(), tolerance=FIT, damping=1e-3)
        assert bool(done.done[0])
        found.append((done.members[0] * torch.tensor([own, 1 / own]).double(), done.steps))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert max(steps for _, steps in found) < 20


def test_the_maximum_of_a_likelihood_has_no_slope() -> None:
    x = torch.randn(60, 2, generator=GENERATOR).double()
    y = (torch.rand(60, generator=GENERATOR) < 0.4).double()[:, None]
    evaluate = Locals(Problem(nn.Linear(2, 1), TensorDataset(x, y), "logistic"))
    weights = torch.randint(0, 3, (3, 60), generator=GENERATOR).double()
    found = settle(evaluate, evaluate.problem.start.expand(3, -1), weights, tolerance=DRAW, damping=1e-3)
    assert found.done.all()
    assert found.local.slope.abs().max() < 0.02  # a thousandth of a standard error times the curvature


def test_a_direction_without_effect_is_found() -> None:
    evaluate, x, y = line()
    twice = torch.cat([x, x[:, :1]], 1)
    same = Locals(Problem(nn.Linear(3, 1), TensorDataset(twice, y), "regression"))
    ones = torch.ones(1, 40).double()
    good, bad = (e(e.problem.start[None], ones) for e in (evaluate, same))
    assert determined(good, True) > 0.3
    assert determined(bad, True) < 1e-14
    direction = weakest(bad, True)
    torch.testing.assert_close(direction.abs(), torch.tensor([1.0, 0.0, 1.0, 0.0]).double() / 2**0.5)
