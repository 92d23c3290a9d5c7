import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from twinboot import Twins
from twinboot.experiments.datasets import digits, moments_of, standardised
from twinboot.experiments.networks import small, vgg16


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def weights(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]


@pytest.mark.parametrize("normalisation", ["weight", "batch"])
@pytest.mark.parametrize(
    ("network", "channels", "pixels"),
    [(vgg16, 3, 32), (vgg16, 1, 28), (vgg16, 3, 64), (small, 1, 8), (small, 1, 28)],
)
def test_each_image_gets_a_value_for_each_class(
    network: Callable[..., nn.Module], channels: int, pixels: int, normalisation: str
) -> None:
    model = network(7, channels, width=0.125, normalisation=normalisation)
    assert model(torch.randn(2, channels, pixels, pixels)).shape == (2, 7)


def test_vgg16_has_the_layers_of_its_name() -> None:
    model = vgg16(10, normalisation="batch")
    convolutions = sum(m.weight.numel() for _, m in weights(model) if isinstance(m, nn.Conv2d))
    norms = sum(size(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert len(weights(model)) == 16
    assert convolutions == 14_710_464  # the published 14,714,688 of the 13 convolutions, without their 4224 biases
    assert norms == 2 * 4224
    assert size(model) == convolutions + norms + 2 * (512 * 512 + 512) + 512 * 10 + 10


def test_a_weight_normed_vgg16_has_a_length_and_a_bias_for_each_unit_and_the_batch_normed_one_as_many() -> None:
    assert size(vgg16(10)) == size(vgg16(10, normalisation="batch")) + 2 * 512  # lengths of the two linear layers


@pytest.mark.parametrize("network", [vgg16, small])
def test_all_layers_but_the_classifier_are_weight_normed(network: Callable[..., nn.Module]) -> None:
    layers = weights(network(10, width=0.125))
    assert [name for name, m in layers if not is_parametrized(m)] == ["classifier"]
    assert layers[-1][0] == "classifier"
    assert not any(is_parametrized(m) for _, m in weights(network(10, width=0.125, normalisation="batch")))


def test_width_scales_every_layer_but_the_classes() -> None:
    quarter, whole = vgg16(10, width=0.25), vgg16(10)
    for (_, narrow), (name, wide) in zip(weights(quarter), weights(whole), strict=True):
        assert narrow.weight.shape[0] == (10 if name == "classifier" else wide.weight.shape[0] // 4)
    assert vgg16(10, width=0.3)(torch.randn(1, 3, 8, 8)).shape == (1, 10)  # not a whole number of units
    assert size(small(10, width=1e-9)) > 0  # one unit at least


def test_dropout_comes_after_each_pooling_and_is_off_by_default() -> None:
    names = [name for name, _ in vgg16(10, width=0.125, dropout=0.2).named_children()]
    assert [names[i - 1] for i, name in enumerate(names) if name.startswith("dropout")] == [
        f"pool{i}" for i in range(1, 6)
    ]
    assert not any(isinstance(m, nn.Dropout) for m in vgg16(10, width=0.125).modules())


@pytest.mark.parametrize("network", [vgg16, small])
def test_the_seed_decides_the_weights_and_no_global_generator_moves(network: Callable[..., nn.Module]) -> None:
    before = torch.get_rng_state()
    a, b, c = (network(10, width=0.125, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["classifier.weight"], c["classifier.weight"])


def test_he_initialisation_gives_weight_normed_units_a_length_of_the_root_of_two() -> None:
    length = vgg16(10).get_submodule("conv4_2").parametrizations.weight.original0  # type: ignore[union-attr]
    # ||v||^2 of 4608 values of variance 2 / 4608 has mean 2 and deviation 2 sqrt(2 / 4608), so its root half of that
    # over sqrt(2): 512 units are all within five deviations.
    torch.testing.assert_close(length, torch.full_like(length, 2**0.5), rtol=0, atol=5 / 4608**0.5)


@pytest.mark.parametrize("width", [0.125, 1.0])
def test_an_adam_step_changes_what_narrow_and_wide_layers_give_by_at_most_a_fifth(width: float) -> None:
    model = vgg16(10, width=width)
    normed = [m for name, m in weights(model) if name != "classifier"]
    before = [m.weight.detach().flatten(1).clone() for m in normed]
    optimizer = torch.optim.Adam([m.get_parameter("parametrizations.weight.original1") for m in normed], lr=0.001)
    for m in normed:  # all of one sign, which does most: the first step of Adam changes each value by the rate
        v = m.get_parameter("parametrizations.weight.original1")
        v.grad = torch.ones_like(v)
    optimizer.step()
    for m, weight in zip(normed, before, strict=True):
        inputs = torch.randn(500, weight.shape[1], generator=torch.Generator().manual_seed(0)).relu()
        changed = ((m.weight.flatten(1) - weight) @ inputs.T).norm() / (weight @ inputs.T).norm()
        # sqrt(n) 0.001 / (0.005 sqrt(n)), times the mean of such inputs over their root mean square, 1 / sqrt(pi).
        assert changed.item() == pytest.approx(0.2 / math.pi**0.5, rel=0.3), weight.shape


def test_the_size_of_directions_does_not_change_what_a_network_computes() -> None:
    model = vgg16(10, width=0.125)
    plain = vgg16(10, width=0.125, normalisation="batch")  # the same seed, and weights that are not normed
    for (_, a), (_, b) in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(a.weight, b.weight)


def test_signals_keep_their_size_through_a_weight_normed_vgg16() -> None:
    model = vgg16(10, width=0.25)
    x = torch.randn(16, 3, 32, 32)
    for name, layer in model.named_children():
        x = layer(x)
        if name.startswith(("conv", "linear", "classifier")):
            # Poolings raise it and the edges of small images lower it somewhat; PyTorch's own initialisation, with a
            # gain of 1 / 3 where He's has 2, would have lost a factor of sqrt(6) in each of the 16 layers.
            assert 0.1 < x.std().item() < 10, name


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (vgg16(10, width=0.125), (3, 32, 32)),
        (vgg16(10, width=0.125, normalisation="batch", dropout=0.1), (3, 32, 32)),
        (small(10), (1, 8, 8)),
    ],
    ids=["vgg16-weight", "vgg16-batch", "small"],
)
def test_twins_of_a_network_take_a_step_in_every_weight(model: nn.Module, shape: tuple[int, ...]) -> None:
    twins = Twins(model)
    optimizer = torch.optim.Adam(twins.parameters(), 1e-3)
    x, y = torch.randn(2, 8, *shape), torch.randint(10, (2, 8))
    for _ in range(2):  # the first step has no noise yet
        with twins.sampled():
            for twin, images, classes in zip(twins, x, y, strict=True):
                F.cross_entropy(twin(images), classes).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in twins.parameters())
        optimizer.step()
        optimizer.zero_grad()
        twins.update()
    assert "classifier" in twins.sigma
    assert all(sigma > 0 for sigma in twins.sigma.values())
    assert twins.estimate().predict(x[0], samples=2, task="classification").mean.shape == (8, 10)


def test_the_groups_of_a_weight_normed_vgg16_are_its_sixteen_layers() -> None:
    groups = list(Twins(vgg16(10, width=0.125)).sigma)
    assert groups[:3] == ["conv1_1", "conv1_2", "conv2_1"]
    assert groups[-3:] == ["linear1", "linear2", "classifier"]
    assert len(groups) == 16


def test_the_small_network_learns_the_digits() -> None:
    images = digits()
    moments, model = moments_of(images.train_x), small(10)
    x, y = standardised(images.train_x, moments), images.train_y
    optimizer, order = torch.optim.Adam(model.parameters(), 1e-3), torch.Generator().manual_seed(0)
    for _ in range(5):
        for index in torch.randperm(len(x), generator=order).split(64):
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    right = model(standardised(images.test_x, moments)).argmax(1) == images.test_y
    assert right.float().mean() > 0.8  # after five passes; chance is 0.1, and logistic regression ends at 0.92


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: vgg16(1), "classes must be a whole number of at least 2, not 1"),
        (lambda: small(10, channels=0), "channels must be a whole number of at least 1, not 0"),
        (lambda: small(10, width=0.0), "width must be a positive number, not 0.0"),
        (lambda: vgg16(10, dropout=1.0), "dropout must be at least 0 and below 1, not 1.0"),
        (lambda: vgg16(10, normalisation="layer"), 'unknown normalisation \'layer\': use "weight" or "batch"'),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_gets_a_sentence(call: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
