"""Pooled gradients keep their mean, and so the mean of the twins; the distance of the twins ends where it would end."""

from typing import Any

import pytest
import torch
from loops import assert_same_bits, classes, mlp, seeded, train
from torch import Tensor, nn

from twinboot import Apart, Bootstrap, PairedLoader, Twins, pool_gradients
from twinboot.pooling import faster


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


@pytest.mark.parametrize("share", [0.25, 0.7, 1.0])
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
    assert ((1 - left) > 0.9).all()  # whatever the share, the distance is nearly that of the samples' own solutions


def test_on_their_way_twins_part_slower_by_the_share_that_they_keep() -> None:
    """To first order in the rate the distance after an epoch is proportional to how much of their own twins keep."""
    distance = {}
    for share in (0.0, 0.5, 0.8):
        twins = Twins(mlp(), seed=3)
        optimizer = torch.optim.SGD(twins.parameters(), 1e-4)
        optimizer.register_step_pre_hook(lambda *_, twins=twins, share=share: pool_gradients(twins, share))
        train(twins, PairedLoader(classes(), Bootstrap(40), 10), optimizer)
        distance[share] = twins.partition.sigma.clone()
    for share in (0.5, 0.8):
        torch.testing.assert_close(faster(share) * distance[share], distance[0.0], rtol=0.01, atol=0)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_shares_that_are_none_are_refused(share: float) -> None:
    for refusing in (lambda: pool_gradients(with_gradients(), share), lambda: faster(share)):
        with pytest.raises(ValueError, match=r"^the share of gradients that is pooled must lie between 0 and 1, not"):
            refusing()


def test_what_cannot_be_pooled_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="the twins never part: pool a share below 1"):
        faster(1.0)
    with pytest.raises(TypeError, match="in different processes"):
        pool_gradients(Apart.__new__(Apart), 0.5)
