import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import NormalDist
from typing import Any

import pytest
import torch
from loops import assert_same_bits, seeded
from torch import Tensor

from twinboot import Inversion, Protocol, invert, resets
from twinboot.experiments import seismic
from twinboot.experiments.seismic import descent
from twinboot.experiments.seismic.descent import (
    FEW,
    LEVELS,
    Method,
    Schedule,
    State,
    _BatchSlope,
    _FactorSlope,
    _FullSlope,
    _Snapshots,
    deciles,
    divide,
    scores,
    train,
)
from twinboot.experiments.seismic.kernels import SIDE, Problem, Setting, problem, respond

TASK = Setting(rows=64, noise=0.3, beta=1.0, width=1.0, spread=1.0)
SHORT = Schedule(steps=30, lr=0.01, decay=0.99, first_reset=8, check=5)
SINGLE, HELD, TWINS = Method(), Method(hold_out=True), Method(2, mode="centered")
METHODS = [SINGLE, HELD, TWINS]


@cache
def problems() -> tuple[Problem, ...]:
    """Of the same response and number of rows, and else as different as can be."""
    other = Setting(rows=64, noise=0.1, beta=2.0, width=2.0, spread=0.7)
    return problem(TASK, 0), problem(other, 1), problem(TASK, 2)


def weights_by_hand(p: Problem, method: Method) -> Tensor:
    """[twins, M], of sum 1."""
    counts = p.bootstrap.counts.float() if method.replicas > 1 else torch.ones(1, 64)
    if method.hold_out:
        counts[:, p.held_out] = 0
    return counts / counts.sum(1, keepdim=True)


def weights_of(method: Method) -> Tensor:
    return torch.stack([divide(p, method)[0] for p in problems()])


def loss_by_hand(p: Problem, weight: Tensor, u: Tensor) -> Tensor:
    return (weight * (p.kernels @ u.flatten() - p.observed).square()).sum()


@pytest.mark.parametrize("slope", [_FullSlope, _FactorSlope])
@pytest.mark.parametrize("method", METHODS)
def test_slopes_are_those_of_the_weighted_mean_of_squared_residuals(method: Method, slope: Any) -> None:
    weights = weights_of(method)
    loss = slope(problems(), weights)
    u = torch.randn(3, SIDE**2, generator=seeded(0)).requires_grad_()
    for twin in range(method.replicas):
        expected = sum(loss_by_hand(p, weights_by_hand(p, method)[twin], v) for p, v in zip(problems(), u, strict=True))
        [slope] = torch.autograd.grad(expected, u)
        torch.testing.assert_close(loss(twin, u.detach(), 1), slope, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("method", [SINGLE, TWINS])
def test_an_epoch_of_batches_has_on_average_the_slope_of_all(method: Method) -> None:
    weights = weights_of(method)
    whole = _FullSlope(problems(), weights)
    batches = _BatchSlope(problems(), weights, 16, 0)
    u = torch.randn(3, SIDE**2, generator=seeded(0))
    for epoch in range(2):
        for twin in range(method.replicas):
            slopes = torch.stack([batches(twin, u, 4 * epoch + step) for step in range(1, 5)])
            torch.testing.assert_close(slopes.mean(0), whole(twin, u, 1), atol=1e-6, rtol=1e-4)
            assert not torch.allclose(slopes[0], slopes[1])


@pytest.mark.parametrize("method", [SINGLE, TWINS])
def test_each_epoch_of_batches_has_an_order_of_its_own(method: Method) -> None:
    weights = weights_of(method)
    batches = _BatchSlope(problems(), weights, 16, 0)
    u = torch.randn(3, SIDE**2, generator=seeded(0))
    first = batches(0, u, 1)
    assert not torch.allclose(batches(0, u, 5), first)
    assert_same_bits(batches(0, u, 1), first)


def test_a_hold_out_is_in_no_batch() -> None:
    """64 - 9 rows are three batches of 16; the draws are each row once."""
    weights = weights_of(HELD)
    batches = _BatchSlope(problems(), weights, 16, 0)
    assert batches.per_epoch == 3
    for p, draws in zip(problems(), batches.draws[0], strict=True):
        assert sorted([*draws.tolist(), *p.held_out.tolist()]) == list(range(64))


def adam_by_hand(p: Problem, weight: Tensor, schedule: Schedule) -> Tensor:
    field = torch.zeros(SIDE, SIDE, requires_grad=True)
    optimizer = torch.optim.Adam([field], schedule.lr)
    for step in range(schedule.steps):
        optimizer.param_groups[0]["lr"] = schedule.lr * schedule.decay**step
        optimizer.zero_grad()
        loss_by_hand(p, weight, respond(p.setting.response, p.setting.beta * field)).backward()
        optimizer.step()
    return field.detach()


@pytest.mark.parametrize("response", ["tanh", "cubic"])
@pytest.mark.parametrize("method", [SINGLE, HELD])
def test_a_single_field_is_trained_as_by_a_plain_loop_of_adam(method: Method, response: Any) -> None:
    p = problem(replace(TASK, response=response, beta=1.5), 0)
    schedule = replace(SHORT, steps=50)
    found = train([p], method, schedule)["last"]
    [weight] = weights_by_hand(p, method)
    torch.testing.assert_close(found.field[0], adam_by_hand(p, weight, schedule), atol=1e-4, rtol=0)
    assert found.field.abs().max() > 0.1  # it went somewhere
    assert found.step.tolist() == [50]
    assert not found.sigma.any()


def test_twins_without_noise_or_resets_are_two_plain_loops() -> None:
    """Their mean and sigma^2: for two, the mean over a block of 3 x 3 cells of half their squared difference."""
    p, schedule = problems()[1], replace(SHORT, first_reset=100)
    found = train([p], replace(TWINS, noise=0.0), schedule)["last"]
    first, second = (adam_by_hand(p, weight, schedule) for weight in weights_by_hand(p, TWINS))
    torch.testing.assert_close(found.field[0], (first + second) / 2, atol=1e-4, rtol=0)
    half = (first - second).square().view(10, 3, 10, 3).mean((1, 3)) / 2
    sigma = half.sqrt().repeat_interleave(3, 0).repeat_interleave(3, 1)
    torch.testing.assert_close(found.sigma[0], sigma, atol=1e-4, rtol=0)
    assert sigma.max() > 0.01


@pytest.mark.parametrize("method", [SINGLE, HELD, Method(2, mode="mean", noise=0.0)])
def test_problems_that_are_trained_together_are_trained_as_each_alone(method: Method) -> None:
    together = train(problems(), method, SHORT)
    for k, p in enumerate(problems()):
        alone = train([p], method, SHORT)
        for name in ("last", "lowest", "clear", "average"):
            ours, theirs = together[name], alone[name]
            torch.testing.assert_close(ours.field[k], theirs.field[0], atol=1e-4, rtol=0)
            torch.testing.assert_close(ours.sigma[k], theirs.sigma[0], atol=1e-4, rtol=0)
            assert ours.step[k] == theirs.step[0]


@pytest.mark.parametrize("batch", [None, 16])
@pytest.mark.parametrize("method", [HELD, TWINS, Method(2, mode="sample")])
def test_measurements_that_validate_never_touch_the_fields(method: Method, batch: int | None) -> None:
    schedule = replace(SHORT, batch=batch)
    changed = []
    for p in problems():
        observed = p.observed.clone()
        observed[p.held_out if method.hold_out else p.bootstrap.unseen] += 10
        changed.append(replace(p, observed=observed))
    first, second = train(problems(), method, schedule), train(changed, method, schedule)
    assert_same_bits(first["last"].field, second["last"].field)
    assert_same_bits(first["last"].sigma, second["last"].sigma)
    assert_same_bits(first["average"].field, second["average"].field)


@pytest.mark.parametrize("method", METHODS)
def test_any_other_measurement_does_touch_the_field(method: Method) -> None:
    p = problems()[0]
    used = weights_by_hand(p, method).sum(0) > 0
    assert used.all() == (method == SINGLE)
    observed = p.observed + used * 0.1
    first, second = (train([q], method, SHORT)["last"] for q in (p, replace(p, observed=observed)))
    assert not torch.equal(first.field, second.field)


@pytest.mark.parametrize(("change", "same"), [({"mode": "mean"}, False), ({"noise": 0.0}, False), ({}, True)])
def test_the_reset_and_the_noise_matter_and_a_seed_repeats(change: dict[str, Any], same: bool) -> None:
    first, second = (
        train(problems()[:1], method, SHORT, seed=3)["last"] for method in (TWINS, replace(TWINS, **change))
    )
    assert torch.equal(first.field, second.field) == same


def test_noise_of_another_seed_is_another_run() -> None:
    first, second = (train(problems()[:1], TWINS, SHORT, seed=seed)["last"] for seed in (3, 4))
    assert not torch.equal(first.field, second.field)


def test_each_step_ticks() -> None:
    ticks: list[int] = []
    train(problems()[:1], SINGLE, SHORT, tick=lambda: ticks.append(1))
    assert len(ticks) == SHORT.steps


def by_invert(p: Problem, method: Method, schedule: Schedule, seed: int, eps: float, **options: Any) -> Inversion:
    return invert(
        seismic.operator(p),
        p.observed,
        p.initial.to(p.observed.dtype),
        replicas=method.replicas,
        steps=schedule.steps,
        optimizer=lambda fields: torch.optim.Adam(fields, schedule.lr, eps=eps),
        decay=schedule.decay,
        protocol=Protocol(
            reset=resets.growing(schedule.first_reset, schedule.growth), mode=method.mode, noise=method.noise
        ),
        check=schedule.check,
        bootstrap=p.bootstrap,
        seed=seed,
        **options,
    )


@pytest.mark.parametrize(
    "method",
    [
        *(Method(2, mode=mode) for mode in resets.MODES),
        Method(2, mode="sample", noise=0.0),
        Method(4, mode="centered"),
        Method(2, mode="sample", eps=1e-4),
    ],
)
@pytest.mark.parametrize("few", [0, FEW], ids=["products", "factors"])
def test_this_loop_takes_the_steps_of_invert_and_keeps_the_same_state(
    method: Method, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In double precision, over three resets. Both compute a gradient from the same products, one for each measurement
    and cell, summed in another order: relative to its terms it is off by at most their number times the unit of
    rounding. A step of Adam is proportional to the gradient, and at most about the learning rate. So the sum of all
    learning rates times that share bounds the difference of the fields, and of sigma.

    `invert` divides the loss by the mean square of the measurements that are seen, so an eps of Adam that is as many
    times smaller is the same there.
    """
    monkeypatch.setattr(descent, "FEW", few)
    p = problem(replace(TASK, rows=200, noise=1.0, beta=1.5, spread=0.8), 0, method.replicas)
    rows = p.kernels.double().unflatten(1, (SIDE, SIDE))
    rows = rows.sum(2)[:, :, None] * rows.sum(1)[:, None] / rows.sum((1, 2))[:, None, None]  # of rank 1 to all digits
    initial = 0.1 * torch.randn(SIDE, SIDE, generator=seeded(1))
    p = replace(p, kernels=rows.flatten(1), observed=p.observed.double(), initial=initial)
    schedule = Schedule(steps=260, lr=0.02, decay=0.995, first_reset=50, check=10, growth=1.5 if few else 2.0)
    total = sum(schedule.lr * schedule.decay**step for step in range(schedule.steps))
    tolerance = total * (p.setting.rows + SIDE**2) * torch.finfo(torch.double).eps / 2
    assert tolerance < 1e-12
    eps = method.eps / p.observed[p.bootstrap.seen].square().mean().item()
    found = train([p], method, schedule, seed=3)
    for state, stop in (("last", None), ("clear", "unseen")):
        expected = by_invert(p, method, schedule, 3, eps, stop=stop)
        assert found[state].step.tolist() == [expected.best_step]
        torch.testing.assert_close(found[state].field[0], expected.field, atol=tolerance, rtol=0)
        torch.testing.assert_close(found[state].sigma[0], expected.sigma, atol=tolerance, rtol=0)
    assert found["clear"].step < found["last"].step  # the rule for the stop had something to decide


def test_the_units_of_invert_change_nothing_but_the_eps_of_adam() -> None:
    """With the same eps in both, fields differ where few kernels reach, here in the rim, and not in the middle."""
    p = problem(replace(TASK, rows=1000, spread=0.6), 0)
    schedule = Schedule(steps=100, lr=0.01, decay=0.99, first_reset=200)
    method = Method(2, mode="centered", noise=0.0)
    apart = (
        train([p], method, schedule)["last"].field[0] - by_invert(p, method, schedule, 0, 1e-8, stop=None).field
    ).abs()
    assert apart.max() > 0.01
    assert apart[10:20, 10:20].max() < 1e-5


# A run that overfits at once, so that the states to keep lie inside it, and its state after each step.
FAST = Schedule(steps=24, lr=0.08, decay=1.0, first_reset=7, check=1)


def states(chosen: Sequence[Problem], method: Method) -> list[State]:
    return [train(chosen, method, replace(FAST, steps=steps))["last"] for steps in range(1, FAST.steps + 1)]


def validation_losses(p: Problem, method: Method, field: Tensor) -> Tensor:
    index = p.bootstrap.unseen if method.replicas > 1 else p.held_out
    u = respond(p.setting.response, p.setting.beta * field).flatten()
    return (p.kernels[index] @ u - p.observed[index]).square()


MODES: list[resets.Mode] = ["sample", "mean"]


@pytest.mark.parametrize("method", [HELD, *(Method(2, mode=mode) for mode in MODES)])
def test_kept_states_are_what_their_rules_say_of_every_step(method: Method) -> None:
    """By brute force: `lowest` has the lowest validation loss; `clear` moves on where the gain is more than its
    standard error; `average` is the mean field since the last reset."""
    noisy = [problem(replace(TASK, noise=1.5, beta=beta), seed) for seed, beta in ((0, 1.0), (1, 0.5), (2, 1.0))]
    path, found = states(noisy, method), train(noisy, method, FAST)
    assert_same_bits(found["last"].field, path[-1].field)
    due = resets.growing(FAST.first_reset, 1.5)
    begin = max((t for t in range(1, FAST.steps) if due(t)), default=0) if method.replicas > 1 else 0
    average = torch.stack([state.field for state in path[begin:]]).mean(0)
    torch.testing.assert_close(found["average"].field, average, atol=1e-6, rtol=1e-5)
    chosen = []
    for k, p in enumerate(noisy):
        losses = [validation_losses(p, method, state.field[k]) for state in path]
        lowest = min(range(FAST.steps), key=lambda t, losses=losses: losses[t].mean().item())
        clear = 0
        for t in range(1, FAST.steps):
            gain = losses[clear] - losses[t]
            if gain.mean() > gain.std() / math.sqrt(len(gain)):
                clear = t
        for kept, t in ((found["lowest"], lowest), (found["clear"], clear)):
            assert kept.step[k] == t + 1
            assert_same_bits(kept.field[k], path[t].field[k])
            assert_same_bits(kept.sigma[k], path[t].sigma[k])
        chosen.append((lowest, clear))
    assert min(min(chosen)) < FAST.steps - 1  # the rules had something to decide
    assert any(lowest != clear for lowest, clear in chosen)


@pytest.mark.parametrize(("factor", "step"), [(1.1, 2), (0.9, 1)])
def test_a_standard_error_is_of_the_problems_own_measurements(factor: float, step: int) -> None:
    """Three of them beside a problem of forty. Gains of 1 - d, 1 and 1 + d have the standard error d / sqrt(3)."""
    few, many = torch.eye(40)[:3], torch.eye(40)
    snapshots = _Snapshots([(few, torch.zeros(3)), (many, torch.zeros(40))], lambda u: u)
    apart = math.sqrt(3) / factor
    gain = torch.zeros(2, 40)
    gain[:, :3] = torch.tensor([1 - apart, 1.0, 1 + apart])
    for number, losses in enumerate((torch.full((2, 40), 4.0), 4 - gain), start=1):
        snapshots.look(losses.sqrt(), torch.zeros(2, 1), number)
    assert snapshots.states()["clear"].step[0] == step
    assert snapshots.states()["lowest"].step.tolist() == [2, 2]


def test_looks_come_at_each_check_and_at_the_end() -> None:
    """With a check at each 7th of 17 steps, a loss that falls all the time is lowest at step 17, and the average is
    over the steps 7, 14 and 17."""
    smooth = problem(replace(TASK, noise=0.001, width=3.0), 0)
    schedule = Schedule(steps=17, lr=0.001, decay=1.0, check=7)
    found = train([smooth], HELD, schedule)
    assert found["last"].step == found["lowest"].step == 17
    path = [train([smooth], HELD, replace(schedule, steps=steps))["last"].field for steps in (7, 14, 17)]
    torch.testing.assert_close(found["average"].field, torch.stack(path).mean(0))


@cache
def some() -> list[Problem]:
    return [problem(Setting(64, 0.3, beta, 1.0, 1.0), seed) for seed, beta in enumerate((1.0, 2.0))]


def normal(problems: list[Problem]) -> State:
    """Fields whose error is sigma times a normal number, with a sigma that differs from cell to cell."""
    generator = seeded(0)
    sigma = 0.1 + torch.rand(len(problems), SIDE, SIDE, generator=generator)
    error = sigma * torch.randn(sigma.shape, generator=generator)
    return State(torch.stack([p.truth for p in problems]) + error, sigma, torch.tensor([3, 4]))


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


def mean_square_by_hand(p: Problem, field: Tensor, index: list[int]) -> float:
    u = respond("tanh", p.setting.beta * field).flatten()
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
        assert row.train == pytest.approx(mean_square_by_hand(p, field, used), rel=1e-4)
        u = respond("tanh", p.setting.beta * field).flatten()
        assert row.test == pytest.approx((p.test_kernels @ u - p.test_observed).square().mean().item(), rel=1e-4)
        assert row.error == pytest.approx((field - p.truth).square().mean().item(), rel=1e-5)
    assert found["step"].tolist() == [3, 4]
    assert ("sigma" in found) == (method.replicas > 1)


def test_the_sigma_of_a_field_is_a_root_mean_square() -> None:
    state = normal(some())
    by_hand = [math.sqrt(s.square().mean()) for s in state.sigma]
    assert scores(some(), state, TWINS)["sigma"].tolist() == pytest.approx(by_hand, rel=1e-5)
