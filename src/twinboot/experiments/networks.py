"""Networks for small images: the paper's VGG-16 (Appendix A.4), a smaller one of its kind, and ResNet-20.

Weight normalisation writes a weight as `g v / ||v||`, one length `g` for each output unit: nothing in it depends on
the batch, so the weights alone say what a twin computes. BatchNorm, the usual choice, also keeps running statistics,
which belong to the weights that they were taken with (`Estimate.update_batchnorm`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.nn.utils.parametrizations import weight_norm

from .._core import seeds
from .._core.checks import require_whole

Normalisation = Literal["weight", "batch"]
VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # Simonyan and Zisserman's column D
SMALL = ((32,), (64,), (64,))
DIRECTION = 0.005  # size of the values of v for one input of a unit; it grows as the root of their number


def vgg16(
    classes: int,
    channels: int = 3,
    width: float = 1.0,
    normalisation: Normalisation = "weight",
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Module:
    """VGG-16: 13 convolutions, two hidden linear layers and a plain linear classifier, for images of up to 32 x 32.

    The hidden linear layers have 512 units, as usual where the last pooling leaves a single pixel; the 4096 of the
    original are for 7 x 7 of them.

    Args:
        width: scales the units of all layers but the classifier.
        normalisation: `"weight"` for convolutions and hidden linear layers, as in the paper, or `"batch"`, after
            convolutions.
        dropout: the share of values dropped after each pooling, for Monte Carlo dropout.
        seed: of the weights. No global generator is read or moved.

    >>> sum(p.numel() for p in vgg16(10, normalisation="batch").parameters())
    15249354
    """
    return _chain(VGG16, (512, 512), classes, channels, width, normalisation, dropout, seed)


def small(
    classes: int,
    channels: int = 1,
    width: float = 1.0,
    normalisation: Normalisation = "weight",
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Module:
    """Three convolutions, a hidden linear layer and a plain classifier: three poolings, which is what 8 x 8 pixels
    have room for. The arguments are those of `vgg16`.

    >>> small(10)(torch.zeros(4, 1, 8, 8)).shape
    torch.Size([4, 10])
    """
    return _chain(SMALL, (64,), classes, channels, width, normalisation, dropout, seed)


def resnet20(classes: int, channels: int = 3, width: float = 1.0, seed: int = 0) -> nn.Module:
    """ResNet-20 of He et al. (2016, section 4.2): three stages of three blocks, BatchNorm, shortcuts without weights.

    >>> sum(p.numel() for p in resnet20(10).parameters())
    269722
    """
    _check(classes, channels, width)
    sizes = [_scaled(size, width) for size in (16, 32, 64)]
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=_conv(channels, sizes[0], bias=False), norm=nn.BatchNorm2d(sizes[0]), relu=nn.ReLU()
    )
    before = sizes[0]
    for stage, size in enumerate(sizes, start=1):
        for block in range(1, 4):
            layers[f"block{stage}_{block}"] = _Block(before, size, stride=2 if stage > 1 and block == 1 else 1)
            before = size
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), classifier=_linear(before, classes))
    return _initialised(nn.Sequential(layers), seed)


class _Block(nn.Module):
    def __init__(self, before: int, size: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(before, size, bias=False, stride=stride), nn.BatchNorm2d(size)
        self.conv2, self.norm2 = _conv(size, size, bias=False), nn.BatchNorm2d(size)
        self.stride, self.more = stride, size - before

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        # Where the size changes, the shortcut takes every second pixel and adds channels of zeros (their option A).
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(self.norm2(self.conv2(y)) + shortcut)


def _chain(
    stages: Sequence[Sequence[int]],
    hidden: Sequence[int],
    classes: int,
    channels: int,
    width: float,
    normalisation: str,
    dropout: float,
    seed: int,
) -> nn.Module:
    """Stages of 3 x 3 convolutions with a pooling after each, then linear layers. The names are those of the groups
    in a table of sigmas: conv1_1 to conv5_3, linear1, linear2, classifier."""
    _check(classes, channels, width)
    if normalisation not in ("weight", "batch"):
        raise ValueError(f'unknown normalisation {normalisation!r}: use "weight" or "batch".')
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, not {dropout!r}.")
    batch = normalisation == "batch"
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    before = channels
    for i, stage in enumerate(stages, start=1):
        for j, size in enumerate((_scaled(s, width) for s in stage), start=1):
            layers[f"conv{i}_{j}"] = _conv(before, size, bias=not batch)  # BatchNorm would take a bias out again
            if batch:
                layers[f"norm{i}_{j}"] = nn.BatchNorm2d(size)
            layers[f"relu{i}_{j}"] = nn.ReLU()
            before = size
        layers[f"pool{i}"] = nn.MaxPool2d(2, ceil_mode=True)  # 28 x 28 pixels then last for five poolings too
        if dropout:
            layers[f"dropout{i}"] = nn.Dropout(dropout)
    layers.update(mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())  # the mean is for images above 32 x 32 alone
    for i, size in enumerate((_scaled(s, width) for s in hidden), start=1):
        layers[f"linear{i}"] = _linear(before, size)
        layers[f"relu_linear{i}"] = nn.ReLU()
        before = size
    layers["classifier"] = _linear(before, classes)
    model = _initialised(nn.Sequential(layers), seed)
    if not batch:
        for name, layer in layers.items():
            if isinstance(layer, nn.Conv2d | nn.Linear) and name != "classifier":
                _normed(weight_norm(layer))
    return model


@torch.no_grad()
def _normed(layer: nn.Module) -> None:
    """Give the directions v of a weight-normed layer values of another size: the weight stays as it is.

    An Adam step changes each of them by the learning rate, so their size says how fast a weight turns. What n inputs
    that are not negative, as those after a ReLU, can do together then changes by sqrt(n) rate / size, times their
    mean over their root mean square. With sizes that grow as sqrt(n) that is the same for narrow and wide layers: at
    the paper's rate, 0.001, less than a fifth of what units give. With one size of 0.05 for all it would be most of it
    in the widest layers of VGG-16, and more with He's, which shrinks with n."""
    v = layer.get_parameter("parametrizations.weight.original1")
    v.mul_(DIRECTION * v[0].numel() ** 0.5 / v.square().mean().sqrt())


def _conv(before: int, size: int, bias: bool, stride: int = 1) -> nn.Module:
    layer: nn.Module = skip_init(nn.Conv2d, before, size, 3, stride, padding=1, bias=bias)
    return layer


def _linear(before: int, size: int) -> nn.Module:
    layer: nn.Module = skip_init(nn.Linear, before, size)
    return layer


def _initialised(model: nn.Module, seed: int) -> nn.Module:
    """He's initialisation, before any weight norm: the length `g` is close to sqrt(2) for each unit, which keeps
    the size of signals from layer to layer whatever the data."""
    generator = torch.Generator().manual_seed(seeds.derive(seed, "weights"))
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            gain: Literal["linear", "relu"] = "linear" if name == "classifier" else "relu"
            nn.init.kaiming_normal_(layer.weight, nonlinearity=gain, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def _scaled(size: int, width: float) -> int:
    return max(1, round(size * width))


def _check(classes: int, channels: int, width: float) -> None:
    require_whole("classes", classes, 2)
    require_whole("channels", channels, 1)
    if not 0 < width < float("inf"):
        raise ValueError(f"width must be a positive number, not {width!r}.")
