"""The control: what it measures, in closed forms, and that the twins train as they do without it."""

import copy
import math
from typing import Any

import pytest
import torch
from loops import assert_same_bits, classes, mlp, seeded, snapshot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, ControlledTwins, PairedLoader, Twins, error_bars, pool_gradients
from twinboot.groups import KINDS
from twinboot.resets import MODES


def wide(entries: int = 40_000) -> nn.Linear:
    return nn.Linear(entries, 1, bias=False)


def set_weights(twins: Twins, *values: Tensor) -> None:
    with torch.no_grad():
        for twin, value in zip(twins, values, strict=True):
            next(twin.parameters()).copy_(value.view(1, -1))


def test_the_share_is_that_of_the_datas_variance() -> None:
    """Weights are a part by the data, which the control has in common with the first twin, and noise of their own. For
    D weights, control^2 / sigma^2 has a standard error below 2 sqrt(2 / D) of its value."""
    entries, data, noise = 40_000, 3.0, 1.0
    first, second, *own = torch.randn(5, entries, generator=seeded(0))
    twins = ControlledTwins(wide(entries))
    set_weights(
        twins,
        math.sqrt(data) * first + math.sqrt(noise) * own[0],
        math.sqrt(data) * second + math.sqrt(noise) * own[1],
        math.sqrt(data) * first + math.sqrt(noise) * own[2],
    )
    expected = data / (data + noise)
    assert twins.data_share()["(model)"] == pytest.approx(expected, abs=4 * 2 * math.sqrt(2 / entries) * (1 - expected))


def line(n: int = 64, inputs: int = 20, outputs: int = 10) -> TensorDataset:
    x = torch.randn(n, inputs, generator=seeded(1), dtype=torch.float64)
    return TensorDataset(x, torch.randn(n, outputs, generator=seeded(2), dtype=torch.float64))


def linear() -> nn.Linear:
    model = nn.Linear(20, 10).double()
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def trained(
    bootstrap: Bootstrap, batch_size: int, *, scale: float, lr: float, epochs: int, mode: Any = None, seed: int = 0
) -> ControlledTwins:
    """A linear model after some epochs of gradient descent, with a reset after each but the last if there is a mode."""
    twins = ControlledTwins(linear(), seed=seed)
    loader = PairedLoader(line(), bootstrap, batch_size, seed=seed, control=True)
    optimizer = torch.optim.SGD(twins.parameters(), lr)
    for epoch in range(1, epochs + 1):
        for batches in loader:
            with twins.sampled(scale):
                for twin, (x, y) in zip(twins, batches, strict=True):
                    F.mse_loss(twin(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            twins.update()
        if mode is not None and epoch < epochs:
            twins.reset(mode)
    return twins


def test_without_any_noise_all_of_sigma_is_data() -> None:
    """Full batches and no noise on the weights: the control stands on the first twin, to rounding."""
    twins = trained(Bootstrap(64), 64, scale=0.0, lr=0.5, epochs=30)
    assert twins.sigma["(model)"] > 0.01
    assert twins.data_share()["(model)"] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_with_the_same_data_for_both_twins_nothing_of_sigma_is_data(mode: Any) -> None:
    """(twins - control) / (twins + control) of the two squared distances is 0 on average: the second twin and the
    control are interchangeable. The rate is so low that much of the distance is the resets'."""
    differences = []
    for seed in range(24):
        bootstrap = Bootstrap(64, seed=seed)
        bootstrap.counts[1] = bootstrap.counts[0]
        twins = trained(bootstrap, 8, scale=1.0, lr=0.05, epochs=4, mode=mode, seed=seed)
        first, second, control = (nn.utils.parameters_to_vector(twin.parameters()).detach() for twin in twins)
        of_twins, of_control = (first - second).square().sum(), (first - control).square().sum()
        assert twins.data_share()["(model)"] == pytest.approx(1 - (of_control / of_twins).item())
        differences.append((of_twins - of_control) / (of_twins + of_control))
    difference = torch.stack(differences)
    error = difference.std() / math.sqrt(len(difference))
    assert error < 0.04  # a share of the data of 1/3 makes the difference 0.2, five times as much
    assert abs(difference.mean()) < 4 * error


@pytest.mark.parametrize("mode", ["sample", "centered"])
def test_the_distance_that_a_reset_makes_counts_equally_in_both(mode: Any) -> None:
    twins = trained(Bootstrap(64), 8, scale=1.0, lr=0.05, epochs=2)
    assert twins.data_share()["(model)"] > 0.1
    twins.reset(mode)
    assert twins.data_share() == {"(model)": 0.0}
    _, second, control = twins
    assert_same_bits(second.state_dict(), control.state_dict())


def test_a_reset_leaves_the_statistics_of_each_copy_its_own() -> None:
    twins = ControlledTwins(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    for twin, scale in zip(twins, (1.0, 2.0, 3.0), strict=True):
        twin(scale * torch.randn(8, 4, generator=seeded(0)))
    means = [twin[1].running_mean.clone() for twin in twins]
    assert not torch.equal(means[1], means[2])
    twins.reset()
    assert_same_bits(means, [twin[1].running_mean for twin in twins])


def dropout_net() -> nn.Sequential:
    return nn.Sequential(*mlp()[:2], nn.Dropout(0.3), mlp()[2])


def run(twins: Twins, mode: Any, pooled: float = 0.0) -> None:
    control = isinstance(twins, ControlledTwins)
    loader = PairedLoader(classes(), Bootstrap(40, twins.replicas), 10, control=control)
    optimizer = torch.optim.Adam(twins.parameters(), 0.01)
    for epoch in range(3):
        for step, batches in enumerate(loader):
            torch.manual_seed(100 * epoch + step)  # of the dropout masks
            with twins.sampled():
                for twin, (x, y) in zip(twins, batches, strict=True):
                    F.cross_entropy(twin(x), y).backward()
            pool_gradients(twins, pooled)
            optimizer.step()
            optimizer.zero_grad()
            twins.update()
        twins.reset(mode)


@pytest.mark.parametrize(("mode", "replicas", "pooled"), [("sample", 2, 0), ("mean", 3, 0), ("centered", 3, 0.6)])
def test_the_twins_train_as_without_it_bit_for_bit(mode: Any, replicas: int, pooled: float) -> None:
    alone, controlled = (kind(dropout_net(), replicas, seed=3) for kind in (Twins, ControlledTwins))
    for twins in (alone, controlled):
        run(twins, mode, pooled)
    assert_same_bits(alone.sigma, controlled.sigma)
    assert_same_bits(alone.weights(), controlled.weights())
    assert_same_bits(alone.estimate().state_dict(), controlled.estimate().state_dict())
    models = [model.state_dict() for model in controlled.unstack()]
    assert_same_bits([model.state_dict() for model in alone.unstack()], models)


def test_the_control_takes_its_share_of_the_twins_pooled_gradient() -> None:
    twins = ControlledTwins(nn.Linear(1, 1, bias=False))
    for twin, slope in zip(twins, (0.0, 4.0, 10.0), strict=True):
        (slope * twin.weight).sum().backward()
    pool_gradients(twins, 0.5)
    assert [twin.weight.grad.item() for twin in twins] == [1.0, 3.0, 6.0]  # half of it, and half of 2


def test_the_control_has_noise_of_its_own() -> None:
    twins = ControlledTwins(wide())
    twins.partition.sigma.fill_(1.0)
    with twins.sampled():
        noise = torch.stack([next(twin.parameters()).detach().flatten() for twin in twins])
    noise -= next(twins.control.parameters()).detach().flatten()
    assert noise.std(1) == pytest.approx([1.0] * 3, abs=4 / math.sqrt(2 * noise.shape[1]))
    assert torch.corrcoef(noise).triu(1).abs().max() < 4.5 / math.sqrt(noise.shape[1])


def test_it_is_the_last_of_the_copies_and_no_twin() -> None:
    twins = ControlledTwins(mlp(), replicas=3)
    assert (len(twins), twins.replicas) == (4, 3)
    assert twins.control is twins[3] is list(twins)[-1]
    outputs = twins(*torch.randn(4, 5, 4, generator=seeded(0)))
    assert len(outputs) == 4
    with pytest.raises(ValueError, match="4 twins take 4 inputs"):
        twins(*torch.randn(3, 5, 4, generator=seeded(0)))


def test_frozen_weights_are_shared_with_it() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    twins = ControlledTwins(model)
    assert len({twin[0].weight.data_ptr() for twin in twins}) == 1
    assert len({twin[2].weight.data_ptr() for twin in twins}) == 3


def test_a_state_goes_on_bit_for_bit_and_a_copy_too() -> None:
    begun, loaded = (ControlledTwins(dropout_net()) for _ in range(2))
    run(begun, "sample")
    loaded.load_state_dict(snapshot(begun))
    copied = copy.deepcopy(begun)
    for twins in (begun, loaded, copied):
        run(twins, "centered")
    for other in (loaded, copied):
        assert_same_bits(begun.state_dict(), other.state_dict())
        assert begun.data_share() == other.data_share()


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ((Twins, ControlledTwins), "it says nothing of 'control'|does not fit these twins"),
        ((ControlledTwins, Twins), "does not fit these twins"),
    ],
)
def test_a_state_with_a_control_is_not_one_without(kinds: Any, said: str) -> None:
    saved, other = (kind(mlp()) for kind in kinds)
    with pytest.raises(ValueError, match=said):
        other.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("groups", list(KINDS))
def test_each_group_has_one_share_whatever_its_number_of_sigmas(groups: str) -> None:
    twins = ControlledTwins(mlp(), groups=groups)
    run(twins, "sample")
    with torch.no_grad():
        for twin, number in zip(twins, (0.0, 2.0, 1.0), strict=True):
            for p in twin.parameters():
                p.fill_(number)
    assert twins.data_share() == pytest.approx(dict.fromkeys(twins.sigma, 0.75))  # 1 - 1^2 / 2^2


def test_a_group_that_is_not_trained_has_no_share() -> None:
    twins = ControlledTwins(mlp())
    with torch.no_grad():
        twins[0][2].weight += 1
    shares = twins.data_share()
    assert math.isnan(shares["0"])
    assert shares["2"] == 0.0


def test_a_share_of_noisy_weights_is_refused() -> None:
    twins = ControlledTwins(mlp())
    with twins.sampled(), pytest.raises(RuntimeError, match=r"data_share\(\) was called inside sampled"):
        twins.data_share()


def test_error_bars_has_no_control() -> None:
    with pytest.raises(TypeError, match="error_bars has no control: use fit"):
        error_bars(mlp(), classes(), control=True)


def test_too_few_replicas_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="replicas must be a whole number of at least 2, not 1"):
        ControlledTwins(mlp(), replicas=1)
