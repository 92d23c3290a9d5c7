"""The running statistics of BatchNorm and InstanceNorm, which the mean model needs for its own weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .._core.copies import Places
from ..groups import Partition


def norm_layers(module: nn.Module) -> list[_NormBase]:
    """The layers that keep running statistics. InstanceNorm does so only with `track_running_stats=True`."""
    return [m for m in module.modules() if isinstance(m, _NormBase) and m.running_mean is not None]


@torch.no_grad()
def refill_statistics(module: nn.Module, batches: Iterable[Any], run: Callable[[nn.Module, Any, int], Any]) -> None:
    """Compute the statistics anew, as a mean over batches: `run(module, batch, number)` for each of them. Leaves the
    module in evaluation mode. Layers that stay in evaluation when the module is set to train, as those of a frozen part
    may, keep their statistics."""
    if not norm_layers(module):
        return
    module.train()
    training = [layer for layer in norm_layers(module) if layer.training]
    momenta = [layer.momentum for layer in training]
    for layer in training:
        layer.reset_running_stats()
    hooks = [layer.register_forward_pre_hook(partial(_average, count(1))) for layer in training]
    number = None
    try:
        for number, batch in enumerate(batches):
            run(module, batch, number)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, momentum in zip(training, momenta, strict=True):
            layer.momentum = momentum
        module.eval()
    if number is None:
        raise ValueError("the loader gave no batch, so there are no statistics to compute.")


def _average(calls: Iterator[int], layer: _NormBase, inputs: Any) -> None:
    """A momentum of 1, 1/2, 1/3, ... makes running statistics a plain mean. BatchNorm does the same by itself with
    momentum=None, but InstanceNorm then keeps no statistics."""
    layer.momentum = 1 / next(calls)


def averaged(module: nn.Module, partition: Partition) -> list[Tensor]:
    """The tensors that an estimate averages over the twins: trained weights and running statistics. Averaged statistics
    are only near the mean model's own, which `Estimate.update_batchnorm` computes."""
    statistics = [s for m in norm_layers(module) for s in (m.running_mean, m.running_var) if s is not None]
    return Places(module, list(partition.parameter_shapes)).read() + statistics
