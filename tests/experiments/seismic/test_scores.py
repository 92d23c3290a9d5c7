import math
from dataclasses import replace
from functools import cache
from statistics import NormalDist

import pytest
import torch
from loops import seeded
from torch import Tensor

from twinboot.experiments.seismic.descent import Method, State
from twinboot.experiments.seismic.kernels import SIDE, Problem, Task, problem, respond
from twinboot.experiments.seismic.scores import LEVELS, correlation, deciles, scores, trained_on

TWINS = Method(2)


@cache
def some() -> list[Problem]:
    return [problem(Task(64, 0.3, beta, 1.0, 1.0), seed) for seed, beta in enumerate((1.0, 2.0))]


def normal(problems: list[Problem]) -> State:
    """Fields whose error is sigma times a normal number, with a sigma that differs from cell to cell."""
    generator = seeded(0)
    sigma = 0.1 + torch.rand(len(problems), SIDE, SIDE, generator=generator)
    error = sigma * torch.randn(sigma.shape, generator=generator)
    return State(torch.stack([p.truth for p in problems]) + error, sigma, torch.tensor([3, 4]))


def test_correlation_is_one_for_a_multiple_and_none_for_a_constant() -> None:
    error = torch.rand(SIDE, SIDE, generator=seeded(0))
    assert correlation(3 * error + 1, error) == pytest.approx(1)
    assert correlation(1 - error, error) == pytest.approx(-1)
    assert correlation(torch.ones(SIDE, SIDE), error) == 0
    a, b = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[1.0, 3.0, 2.0]])
    assert correlation(a, b) == pytest.approx(1 / math.sqrt(14 / 3 * 2))  # by hand: covariance 1 / 2


def test_the_correlation_of_sigma_with_normal_errors_has_a_closed_form() -> None:
    """E|z| = sqrt(2 / pi), so for sigma s it is sqrt(2 / pi) std(s) / sqrt(E s^2 - 2 / pi (E s)^2). Its standard error
    is below 1 / sqrt(cells)."""
    state = normal(some())
    found = scores(some(), state, TWINS)["correlation"]
    for value, s in zip(found, state.sigma.flatten(1), strict=True):
        expected = math.sqrt(2 / math.pi) * s.std() / (s.square().mean() - 2 / math.pi * s.mean() ** 2).sqrt()
        assert abs(value - expected) < 4 / math.sqrt(SIDE**2)
    assert found.min() > 0.2


def test_intervals_of_the_right_sigma_hold_as_often_as_they_say() -> None:
    """Of 900 cells each, a binomial number. With half of that sigma it is the mass within half of the width."""
    state = normal(some())
    halved = replace(state, sigma=state.sigma / 2)
    for kept, factor in ((state, 1.0), (halved, 0.5)):
        found = scores(some(), kept, TWINS)
        for level in LEVELS:
            reach = factor * NormalDist().inv_cdf(0.5 + level / 2)
            share = 2 * NormalDist().cdf(reach) - 1
            assert ((found[f"covered_{level}"] - share).abs() < 4 * math.sqrt(share * (1 - share) / 900)).all()


def test_deciles_go_by_sigma_and_average_the_squares_over_problems() -> None:
    state = normal(some())
    found = deciles(some(), state)
    assert found["decile"].tolist() == list(range(1, 11))
    assert found["sigma2"].is_monotonic_increasing
    error2 = torch.stack([(f - p.truth).square() for f, p in zip(state.field, some(), strict=True)]).flatten(1)
    order = state.sigma.flatten(1).argsort(1)
    for values, column in ((state.sigma.square().flatten(1), "sigma2"), (error2, "error2")):
        by_hand = values.gather(1, order).view(2, 10, 90).mean((0, 2))
        assert found[column].tolist() == pytest.approx(by_hand.tolist(), rel=1e-5)
    for level in LEVELS:
        width = math.sqrt(level * (1 - level) / 180)
        assert ((found[f"covered_{level}"] - level).abs() < 4 * width).all()


def loss_by_hand(p: Problem, field: Tensor, index: list[int]) -> float:
    u = respond("tanh", p.task.beta * field).flatten()
    return sum((p.kernels[i] @ u - p.observed[i]).item() ** 2 for i in index) / len(index)


def used_by_hand(p: Problem, method: Method) -> list[int]:
    if method.replicas > 1:
        return [i for i in range(64) if p.bootstrap.counts[:, i].any()]
    return [i for i in range(64) if not method.hold_out or i not in p.held_out.tolist()]


@pytest.mark.parametrize("method", [Method(), Method(hold_out=True), TWINS])
def test_the_training_loss_is_of_what_entered_a_loss_and_of_nothing_else(method: Method) -> None:
    state = normal(some())
    found = scores(some(), state, method)
    for row, p, field in zip(found.itertuples(), some(), state.field, strict=True):
        used = used_by_hand(p, method)
        assert trained_on(p, method).tolist() == used
        assert row.train == pytest.approx(loss_by_hand(p, field, used), rel=1e-4)
        u = respond("tanh", p.task.beta * field).flatten()
        assert row.test == pytest.approx((p.test_kernels @ u - p.test_observed).square().mean().item(), rel=1e-4)
        assert row.error == pytest.approx((field - p.truth).square().mean().item(), rel=1e-5)
    assert found["step"].tolist() == [3, 4]
    assert ("sigma" in found) == (method.replicas > 1)


def test_the_sigma_of_a_field_is_a_root_mean_square() -> None:
    state = normal(some())
    by_hand = [math.sqrt(s.square().mean()) for s in state.sigma]
    assert scores(some(), state, TWINS)["sigma"].tolist() == pytest.approx(by_hand, rel=1e-5)
