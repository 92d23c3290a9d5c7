"""Draws of a chain of linear layers by noise on its outputs: many draws in one pass, with few random numbers.

The noise of `_core/local.py`, where a draw has one normal for each output of a layer, the same for all inputs:

    W x + b + sqrt(sigma^2 |x|^2 + sigma'^2) z

For each input this has the distribution of a draw of the weights, and what a prediction says is of each input alone.
Draws stay smooth functions of the input, and do not depend on the batch that it is in. As all inputs share its normals,
an average over inputs, such as a mean error bar, varies more from seed to seed than with draws of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._core.copies import Places, arguments
from .._core.local import Layer, OutputNoise, in_a_row, keeps_samples_apart, layers_of
from .._core.noise import normals
from ..groups import Partition

Normals = dict[nn.Module, Tensor]  # layer -> standard normals [draws, 1, outputs]


class ChainOfDraws:
    """A chain, all of whose trained weights may have noise per output."""

    def __init__(self, modules: Sequence[nn.Module], layers: Sequence[Layer], noise: OutputNoise) -> None:
        self._flattens = isinstance(modules[0], nn.Flatten)  # after it there is nothing to flatten
        self._modules = [m for m in modules if not isinstance(m, nn.Flatten)]
        self._layers, self._noise = layers, noise

    @classmethod
    def of(cls, model: nn.Module, partition: Partition, scale: float) -> ChainOfDraws | None:
        """The model as such a chain; None if it is none."""
        weights = Places(model, list(partition.parameter_shapes)).read()
        modules, layers = in_a_row(model), layers_of(model, weights, partition)
        covered = sum(len(layer.own) for layer in layers) == len(weights)
        if not covered or not all(map(keeps_samples_apart, modules)):
            return None
        return cls(modules, layers, OutputNoise(layers, partition.expand(weights, scale)))

    def takes(self, x: Any) -> bool:
        """Whether this is a batch of vectors, as the model's only argument."""
        args, kwargs = arguments(x)
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return False
        return args[0].ndim == 2 or (args[0].ndim > 2 and self._flattens)

    def draws(self, seeds: Sequence[int], at_once: int) -> Iterator[Normals]:
        """The normals of the draws with these seeds, several draws at a time."""
        for start in range(0, len(seeds), at_once):
            fills = [normals(seed) for seed in seeds[start : start + at_once]]
            found: Normals = {}
            for module, _, _ in self._layers:
                like = module.weight
                found[module] = torch.empty(len(fills), 1, len(like), dtype=like.dtype, device=like.device)
                for z, fill in zip(found[module], fills, strict=True):
                    fill(z)
            yield found

    def run(self, draws: Normals, x: Any) -> Tensor:
        """The outputs [draws, inputs, ...] for a batch."""
        h: Tensor = arguments(x)[0][0].flatten(1)
        for module in self._modules:
            y = module(h)
            h = y if module not in draws else torch.addcmul(y, draws[module], self._noise.std(module, h).to(y.dtype))
        return h
