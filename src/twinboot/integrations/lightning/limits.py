"""What `TwinModule` does not take, and the sentence that says so."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch._dynamo import OptimizedModule

from ..._core.checks import require_one_of, shown

COMPILE = "compile a part of your module instead, as in self.net = torch.compile(self.net)"


def require_module(module: Any) -> None:
    if isinstance(module, OptimizedModule):
        raise TypeError(f"the module is compiled as a whole: {COMPILE}.")
    if not isinstance(module, pl.LightningModule):
        raise TypeError(
            f"module must be a LightningModule of the package lightning, not {type(module).__name__} of "
            f"{type(module).__module__}: for other models there are Twins and fit."
        )
    if not module.automatic_optimization:
        raise TypeError("the module optimizes by hand, so that noise could not come and go at the right time.")
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if _is_compiled_method(value) and not isinstance(part, OptimizedModule):  # which can be copied
                path = [name] if key == "_compiled_call_impl" else [name, key]
                what = repr(".".join(filter(None, path))) if any(path) else "the module"
                raise TypeError(f"{what} is compiled for this module alone, and twins are copies of it: {COMPILE}.")


def _is_compiled_method(value: Any) -> bool:
    """A copy of the module has lost it, or would run the module that it is a copy of."""
    if not hasattr(value, "_torchdynamo_orig_callable"):
        return False
    return isinstance(getattr(inspect.unwrap(value), "__self__", None), nn.Module)


def require_uncompiled(wrapper: pl.LightningModule) -> None:
    if wrapper._compiler_ctx is not None:
        raise TypeError(f"TwinModule itself cannot be compiled: {COMPILE}.")


def require_strategy(strategy: Strategy) -> None:
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) or isinstance(strategy, DeepSpeedStrategy):
        raise TypeError(
            f'TwinModule trains in one process or with strategy="ddp", not with {type(strategy).__name__}: to '
            "shard the twins, use fully_shard in a loop of your own."
        )


def require_options(options: Any) -> None:
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError(f'options must be a mapping of names, such as {{"num_workers": 2}}, not {shown(options)}.')
    for name in options.keys() & {"dataset", "bootstrap", "batch_size", "resample", "seed"}:
        raise TypeError(f"{name} cannot be among the options: give it to TwinModule itself.")
    for name in options.keys() & {"share", "twin"}:
        raise TypeError(f"{name} cannot be among the options: each process trains all twins, on its part of a batch.")


def require_loss(resample: str, loss: Any) -> None:
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of (module, batch), not {shown(loss)}.")
    require_one_of(("draws", "counts"), "resample", resample)
    if resample == "counts" and loss is None:
        raise ValueError(
            'resample="counts" weights each sample, but a training_step gives one loss for a batch: use "draws", or '
            "give loss=, a function of (module, batch) with one value for each sample."
        )


def require_weights_of(twin: nn.Module, module: nn.Module) -> None:
    known = dict(twin.named_parameters())
    if late := [name for name, _ in module.named_parameters() if name not in known]:
        raise TypeError(f"{late[0]!r} was made in setup(), when the twins were there already: make it in __init__.")


def require_weights_in(optimizers: Iterable[torch.optim.Optimizer], twins: nn.Module) -> None:
    known = set(map(id, twins.parameters()))
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if any(p.requires_grad and id(p) not in known for p in trained):
        raise TypeError(
            "configure_optimizers gave the optimizer weights that are no twin's, as from a list that the module made "
            "in __init__: ask for self.parameters(), or those of a part, in configure_optimizers itself."
        )
