"""Checks that `fit` and `error_bars` have in common: wrong options get a sentence that says what to give instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .._core.checks import require_known, require_types, shown
from .._core.ranks import is_sharded
from ..data.loader import PairedLoader

_OF_TRAINERS = {"accumulate_grad_batches", "gradient_accumulation_steps", "gradient_clip_val", "max_grad_norm"}


def require_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options that neither a front end takes nor the loader to which it passes options on."""
    name = function.__name__
    for option in options.keys() & {"lr", "learning_rate"}:
        advice = f"give optimizer=lambda p: torch.optim.Adam(p, lr={shown(options[option])})"
        raise TypeError(f"{name} has no option {option!r}: {advice}.")
    for option in options.keys() & {"share", "twin"}:  # of PairedLoader, for loops of one's own
        raise TypeError(
            f"{name} has no option {option!r}: it trains all twins on every rank, and divides batches itself."
        )
    for option in options.keys() & _OF_TRAINERS:
        raise TypeError(f"{name} has no option {option!r}: for accumulation and clipping write the loop, with Twins.")
    require_known(options, function, PairedLoader, DataLoader)
    require_types(DataLoader.__init__, options)


def require_amp(amp: object) -> None:
    if not any(amp is known for known in (None, torch.bfloat16, torch.float16)):
        raise TypeError(f"amp must be a dtype, torch.bfloat16 or torch.float16, not {shown(amp)}.")


def require_whole_weights(front_end: str, model: object) -> None:
    if isinstance(model, nn.Module) and any(map(is_sharded, model.parameters())):
        raise ValueError(
            f"the model is sharded, but {front_end} wraps twins in DDP: write the loop, and shard Twins there."
        )


def require_gradient_steps(front_end: str, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"{front_end} takes one gradient for each step, which LBFGS is not made for: write the loop yourself."
        )
