"""Networks for small images: the paper's VGG-16 (Appendix A.4) and a smaller one of the same kind.

Weight normalisation writes a weight as `g v / ||v||`, with one length `g` for each output unit. It does not depend on
the batch. BatchNorm also keeps running statistics, which are valid only for the weights that they were computed with
(`Estimate.update_batchnorm`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.utils import skip_init
from torch.nn.utils.parametrizations import weight_norm

from .._core import seeds
from .._core.checks import require_one_of, require_whole

Normalisation = Literal["weight", "batch"]
DIRECTION = 0.005  # root mean square of the values of v for one input; it grows as the square root of the inputs


@dataclass(frozen=True)
class Network:
    """A function that makes networks: stages of 3 x 3 convolutions with a pooling after each, then linear layers. The
    layers' names become the names of the groups of sigma: conv1_1 to conv5_3, linear1, linear2, classifier."""

    stages: tuple[tuple[int, ...], ...]
    hidden: tuple[int, ...]  # units of the hidden linear layers
    channels: int  # of an image, if nothing else is said

    def __call__(
        self,
        classes: int,
        channels: int | None = None,
        width: float = 1.0,
        normalisation: Normalisation = "weight",
        dropout: float = 0.0,
        seed: int = 0,
    ) -> nn.Module:
        """A network for images of up to 32 x 32 pixels.

        Args:
            channels: of an image; by default 3 for `vgg16` and 1 for `small`.
            width: scales the units of all layers except the classifier.
            normalisation: `"weight"` for convolutions and hidden linear layers, as in the paper, or `"batch"` after
                convolutions.
            dropout: probability of dropping a value, after each pooling.
            seed: for the weights. Global generators are not used.

        >>> sum(p.numel() for p in vgg16(10, normalisation="batch").parameters())
        15249354
        >>> small(10)(torch.zeros(4, 1, 8, 8)).shape
        torch.Size([4, 10])
        """
        inputs = self.channels if channels is None else channels
        require_whole("classes", classes, 2)
        require_whole("channels", inputs, 1)
        if not 0 < width < float("inf"):
            raise ValueError(f"width must be a positive number, not {width!r}.")
        require_one_of(get_args(Normalisation), "normalisation", normalisation)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {dropout!r}.")
        batch = normalisation == "batch"
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, stage in enumerate(self.stages, start=1):
            for j, size in enumerate((max(1, round(units * width)) for units in stage), start=1):
                # BatchNorm would cancel a bias.
                layers[f"conv{i}_{j}"] = skip_init(nn.Conv2d, inputs, size, 3, padding=1, bias=not batch)
                if batch:
                    layers[f"norm{i}_{j}"] = nn.BatchNorm2d(size)
                layers[f"relu{i}_{j}"] = nn.ReLU()
                inputs = size
            layers[f"pool{i}"] = nn.MaxPool2d(2, ceil_mode=True)  # so that five poolings work on 28 x 28 pixels, too
            if dropout:
                layers[f"dropout{i}"] = nn.Dropout(dropout)
        layers.update(mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())  # the mean matters only above 32 x 32 pixels
        for i, size in enumerate((max(1, round(units * width)) for units in self.hidden), start=1):
            layers[f"linear{i}"] = skip_init(nn.Linear, inputs, size)
            layers[f"relu_linear{i}"] = nn.ReLU()
            inputs = size
        layers["classifier"] = skip_init(nn.Linear, inputs, classes)
        _initialise(layers, seed)
        if not batch:
            for name, layer in layers.items():
                if isinstance(layer, nn.Conv2d | nn.Linear) and name != "classifier":
                    _scale_directions(weight_norm(layer))
        return nn.Sequential(layers)


# Simonyan and Zisserman's column D: 13 convolutions, two hidden linear layers and a classifier. The hidden layers have
# 512 units, as usual for one remaining pixel; the original has 4096 for 7 x 7 pixels.
vgg16 = Network(((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)), (512, 512), channels=3)
# As many poolings as 8 x 8 pixels allow.
small = Network(((32,), (64,), (64,)), (64,), channels=1)


def _initialise(layers: OrderedDict[str, nn.Module], seed: int) -> None:
    """He's initialisation, before weight norm. The length `g` of each unit is then close to sqrt(2), so signals keep
    their size from layer to layer."""
    generator = torch.Generator().manual_seed(seeds.derive(seed, "weights"))
    for name, layer in layers.items():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            gain: Literal["linear", "relu"] = "linear" if name == "classifier" else "relu"
            nn.init.kaiming_normal_(layer.weight, nonlinearity=gain, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@torch.no_grad()
def _scale_directions(layer: nn.Module) -> None:
    """Rescale the directions v of a weight-normed layer. This does not change its weight.

    A step of Adam changes each value of v by the learning rate, so their size decides how fast a weight turns. After a
    ReLU, inputs are not negative. Then one step can change the output of a unit with n inputs by about
    sqrt(n) * lr / size, relative to that output. Sizes that grow as sqrt(n) make this equal for narrow and wide layers:
    below a fifth at the paper's learning rate of 0.001. With a size of 0.05 everywhere, or He's sizes, it would exceed
    half in the widest layers of VGG-16."""
    v = layer.get_parameter("parametrizations.weight.original1")
    v.mul_(DIRECTION * v[0].numel() ** 0.5 / v.square().mean().sqrt())
