"""Running statistics of the mean model's own, of BatchNorm and InstanceNorm: the twins' belong to other weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .._core.copies import Places
from ..groups import Partition


def layers(module: nn.Module) -> list[_NormBase]:
    """Those that keep running statistics, which InstanceNorm does only with `track_running_stats=True`."""
    return [m for m in module.modules() if isinstance(m, _NormBase) and m.running_mean is not None]


@contextmanager
def fresh_statistics(module: nn.Module) -> Iterator[None]:
    """What the module is run on in the block gives its statistics, each batch as much as any other; after it the module
    is in evaluation. Layers that stay in evaluation when a module is set to train, as its class may decide for a frozen
    part, keep the statistics that they have."""
    module.train()
    own = [layer for layer in layers(module) if layer.training]
    momenta = [layer.momentum for layer in own]
    for layer in own:
        layer.reset_running_stats()
    hooks = [layer.register_forward_pre_hook(_Mean()) for layer in own]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, momentum in zip(own, momenta, strict=True):
            layer.momentum = momentum
        module.eval()


class _Mean:
    """A momentum of 1, 1/2, 1/3, ... makes the running statistics the mean over all batches. BatchNorm does so with a
    momentum of None, with which InstanceNorm keeps nothing."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, layer: nn.Module, inputs: object) -> None:
        self.batches += 1
        layer.momentum = 1 / self.batches  # type: ignore[assignment]


def averaged(module: nn.Module, partition: Partition) -> list[Tensor]:
    """What an estimate has the mean of: a model's trained weights and its BatchNorm statistics. The mean of statistics
    is not the mean model's own, but near it; update_batchnorm gives its own."""
    statistics = [s for m in layers(module) for s in (m.running_mean, m.running_var) if s is not None]
    return Places(module, list(partition.parameter_shapes)).read() + statistics
