"""Dropout in predictions: a copy of a model that is in evaluation but for those of its layers that drop at random.

Those are PyTorch's own: all kinds of `nn.Dropout`, and what drops inside attention and recurrent layers. A model that
calls `torch.nn.functional.dropout` itself cannot be told from one that does anything else in training.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from .._core.checks import shown
from .._core.copies import replicate
from .._core.randomness import own_randomness


def drawing(
    model: nn.Module, dropout: bool, device: torch.device, seed: int
) -> tuple[nn.Module, AbstractContextManager[None]]:
    """The module that draws run through, and a block in which its masks, if it is to have any, come from the seed."""
    if not isinstance(dropout, bool):
        raise TypeError(
            f"estimate.dropout is True or False, not {shown(dropout)}: rates are those of the model's layers."
        )
    return (with_masks(model), own_randomness(device, seed, "masks")) if dropout else (model, nullcontext())


def with_masks(model: nn.Module) -> nn.Module:
    """A copy, so that who calls the model itself meanwhile sees no mask. What its class leaves in evaluation when it is
    set to train, as a frozen part may be, had no masks in training and gets none."""
    [masked] = replicate(model)
    masked.train()
    there = [m for m in masked.modules() if m.training]
    masked.eval()
    if not any(_rate(m) > 0 for m in there):
        raise ValueError("estimate.dropout is True, but no layer of the model, such as nn.Dropout, drops anything.")
    for m in there:
        # In evaluation an encoder layer takes a way of its own, past the dropout in it.
        m.training = _rate(m) > 0 or isinstance(m, nn.TransformerEncoderLayer)
    return masked


def _rate(layer: nn.Module) -> float:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p
    return layer.dropout if isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)) else 0.0
