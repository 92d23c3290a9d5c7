"""What Twin-Boot does to tensors: means in enough precision, memory order, and large tensors piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .sharding import is_sharded, local

AT_ONCE = 2**20  # entries of a piece


def wide(t: Tensor) -> Tensor:
    """The tensor itself in float32 or float64, else a float32 copy: half precision is too coarse for differences. Of a
    sharded one, the part that is here."""
    t = local(t)
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def mean(copies: Sequence[Tensor]) -> Tensor:
    """The mean of equally shaped tensors in float32 or better; of equal ones exactly their value."""
    first = wide(copies[0]).detach()
    away = torch.zeros_like(first)
    for c in copies[1:]:
        away += wide(c).detach() - first
    return away.div_(len(copies)).add_(first)


def in_order(t: Tensor) -> Tensor:
    """The tensor as it lies in memory: PyTorch draws normals ten times faster where the strides are the plain ones,
    which those of `channels_last` weights are not."""
    if t.is_contiguous():
        return t
    ordered = t.permute(sorted(range(t.ndim), key=t.stride, reverse=True))
    return ordered if ordered.is_contiguous() else t


def overwrite_(t: Tensor, value: Tensor) -> None:
    """Set a tensor to another of its shape; entries that share their memory, as in a buffer that was expanded, once."""
    for d in expanded(t):
        t, value = t.narrow(d, 0, 1), value.narrow(d, 0, 1)
    t.copy_(value)


def expanded(t: Tensor) -> list[int]:
    """The dimensions along which all entries are one in memory."""
    return [d for d in range(t.ndim) if t.shape[d] > 1 and t.layout is torch.strided and t.stride(d) == 0]


def split(t: Tensor) -> Sequence[Tensor]:
    """Some rows of it at a time; all of it where it is small, or where other processes hold parts of it."""
    return [t] if t.numel() <= AT_ONCE or is_sharded(t) else t.split(_rows(t.shape))


def fill_copies_by_piece_(copies: Tensor, fill_: Callable[[Tensor], None]) -> None:
    """Fill copies of a tensor, one behind the other, with what their pieces would be filled with one by one."""
    for piece in copies.split(_rows(copies.shape[1:]), 1) if copies[0].numel() > AT_ONCE else [copies]:
        drawn = piece if piece.is_contiguous() else torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
        fill_(drawn)
        if drawn is not piece:
            piece.copy_(drawn)


def _rows(shape: Sequence[int]) -> int:
    return max(1, AT_ONCE // max(1, math.prod(shape[1:])))
