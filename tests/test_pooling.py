"""Pooled gradients keep their mean, and so the mean of the twins; the distance of the twins ends where it would end."""

from typing import Any

import pytest
import torch
from loops import assert_same_bits, mlp, seeded
from torch import Tensor, nn

from twinboot import Apart, Twins, pool_gradients


def with_gradients(replicas: int = 2, **options: Any) -> Twins:
    twins = Twins(mlp(), replicas, **options)
    for number, p in enumerate(twins.parameters()):
        p.grad = torch.randn(p.shape, generator=seeded(number))
    return twins


def gradients(twins: Twins) -> list[Tensor]:
    """Of each weight, [twins, ...]."""
    if twins.stacked:
        return [p.grad.clone() for p in twins.parameters() if p.grad is not None]
    return [torch.stack([p.grad for p in own]) for own in zip(*(t.parameters() for t in twins), strict=True)]  # type: ignore[misc]


@pytest.mark.parametrize("share", [0.25, 0.7, 0.95])
@pytest.mark.parametrize("replicas", [2, 3, 5])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_mean_stays_and_differences_shrink(share: float, replicas: int, stacked: bool) -> None:
    twins = with_gradients(replicas, stacked=stacked)
    before = gradients(twins)
    pool_gradients(twins, share)
    for then, now in zip(before, gradients(twins), strict=True):
        torch.testing.assert_close(now.mean(0), then.mean(0))
        torch.testing.assert_close(now - now.mean(0), (1 - share) * (then - then.mean(0)))


def test_a_share_of_nothing_changes_no_bit() -> None:
    twins = with_gradients()
    before = gradients(twins)
    pool_gradients(twins, 0)
    assert_same_bits(gradients(twins), before)


def test_frozen_and_unused_weights_have_no_gradient_and_what_one_twin_did_not_use_counts_as_zero() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    twins = Twins(model)
    pool_gradients(twins, 0.5)
    assert all(p.grad is None for p in twins.parameters())
    pool_gradients(stacked := Twins(model, stacked=True), 0.5)
    assert all(p.grad is None for p in stacked.parameters())
    twins[0][2].bias.sum().backward()
    pool_gradients(twins, 0.5)
    assert twins[0][2].bias.grad.tolist() == [0.75] * 3
    assert twins[1][2].bias.grad.tolist() == [0.25] * 3
    assert all(p.grad is None for twin in twins for p in (*twin[0].parameters(), twin[2].weight))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_twins_of_quadratic_losses_end_as_far_apart_and_their_mean_moves_as_ever(share: float) -> None:
    """loss_b = h (w - m_b)^2 / 2: after t steps of size r the distance is (m_1 - m_2) (1 - (1 - r h (1 - share))^t),
    and the mean that of one model whose loss is the mean of both."""
    curvature, targets, rate = torch.tensor([0.5, 2.0]), torch.tensor([[1.0, -3.0], [2.0, 5.0]]), 0.1
    line = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(line.weight)
    twins = Twins(line)
    optimizer = torch.optim.SGD(twins.parameters(), rate)
    for step in range(1, 501):
        optimizer.zero_grad()
        for twin, target in zip(twins, targets, strict=True):
            (curvature * (twin.weight[0] - target).square() / 2).sum().backward()
        pool_gradients(twins, share)
        optimizer.step()
        if step in (1, 10, 500):
            first, second = (twin.weight.detach()[0] for twin in twins)
            left = (1 - rate * curvature * (1 - share)) ** step
            torch.testing.assert_close(first - second, (targets[0] - targets[1]) * (1 - left))
            torch.testing.assert_close((first + second) / 2, targets.mean(0) * (1 - (1 - rate * curvature) ** step))
    # Whatever the share, the distance is nearly that of the samples' own solutions.
    torch.testing.assert_close(first - second, targets[0] - targets[1], rtol=0.1, atol=0)


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_with_adam_the_mean_travels_further_where_gradients_are_mostly_noise(share: float) -> None:
    """Gradients m + n e_b, e_b normal and independent, n >> m: Adam divides by their size. That of pooled ones is
    sqrt((1 + (1 - share)^2) / 2) n instead of n, so that both the path of the mean along m and that of the distance,
    which is 1 - share times as long by itself, are so much longer."""
    weights, steps, generator = 4000, 400, seeded(0)
    twins: dict[float, Twins] = {}
    for pooled in (0.0, share):
        line = nn.Linear(weights, 1, bias=False)
        nn.init.zeros_(line.weight)
        twins[pooled] = Twins(line)
    optimizers = [torch.optim.Adam(pair.parameters(), 0.01, betas=(0.0, 0.999)) for pair in twins.values()]
    for _ in range(steps):
        for twin in range(2):
            gradient = 0.1 + torch.randn(1, weights, generator=generator)
            for pair in twins.values():
                pair[twin].weight.grad = gradient.clone()
        for (pooled, pair), optimizer in zip(twins.items(), optimizers, strict=True):
            pool_gradients(pair, pooled)
            optimizer.step()
            pair.update()
    way = {pooled: sum(twin.weight.detach().mean() for twin in pair) for pooled, pair in twins.items()}
    apart = {pooled: pair.partition.sigma.item() for pooled, pair in twins.items()}
    size = ((1 + (1 - share) ** 2) / 2) ** 0.5
    assert way[share] / way[0.0] == pytest.approx(1 / size, rel=0.02)
    assert apart[share] / apart[0.0] == pytest.approx((1 - share) / size, rel=0.02)


@pytest.mark.parametrize(
    ("share", "said"),
    [(-0.1, "a finite number of at least 0"), (float("nan"), "a finite number"), (1.0, "below 1"), (1.5, "below 1")],
)
def test_shares_that_are_none_are_refused(share: float, said: str) -> None:
    with pytest.raises(ValueError, match=f"^the share of gradients that is pooled must be {said}"):
        pool_gradients(with_gradients(), share)


def test_what_cannot_be_pooled_is_refused_in_a_sentence() -> None:
    with pytest.raises(TypeError, match="in different processes: pool the gradients of Twins in one"):
        pool_gradients(Apart.__new__(Apart), 0.5)
    with pytest.raises(TypeError, match="takes Twins, not Sequential: if that is around twins, give those"):
        pool_gradients(nn.Sequential(with_gradients()), 0.5)  # type: ignore[arg-type]
    twins = Twins(nn.Embedding(4, 2, sparse=True))
    twins[0](torch.tensor([1])).sum().backward()
    pool_gradients(twins, 0.0)  # nothing is pooled
    with pytest.raises(TypeError, match="sparse gradients cannot be pooled: make the embedding with sparse=False"):
        pool_gradients(twins, 0.5)
