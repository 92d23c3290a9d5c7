"""Tensors: means with enough precision, memory order, and large tensors piece by piece."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .ranks import is_sharded, local

AT_ONCE = 2**20  # the most entries of a piece


def wide(t: Tensor) -> Tensor:
    """The (local) tensor in float32 or float64: half precision is too coarse for differences."""
    t = local(t)
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def checksum(t: Tensor) -> int:
    return zlib.crc32(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def mean(copies: Sequence[Tensor]) -> Tensor:
    """The mean in float32 or better. The mean of equal tensors is exactly their value."""
    first = wide(copies[0]).detach()
    away = torch.zeros_like(first)
    for c in copies[1:]:
        away += wide(c).detach() - first
    return away.div_(len(copies)).add_(first)


def in_order(t: Tensor) -> Tensor:
    """A view with the dimensions in memory order, for `channels_last` weights. PyTorch draws normals ten times faster
    into contiguous tensors."""
    if t.is_contiguous():
        return t
    ordered = t.permute(sorted(range(t.ndim), key=t.stride, reverse=True))
    return ordered if ordered.is_contiguous() else t


def overwrite_(t: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor. Entries of an expanded tensor, which share their memory, are written once."""
    for d in expanded(t):
        t, value = t.narrow(d, 0, 1), value.narrow(d, 0, 1)
    t.copy_(value)


def expanded(t: Tensor) -> list[int]:
    """The dimensions along which all entries share their memory."""
    return [d for d in range(t.ndim) if t.shape[d] > 1 and t.layout is torch.strided and t.stride(d) == 0]


def split(t: Tensor) -> Sequence[Tensor]:
    """Pieces along the first dimension; the tensor itself if it is small or sharded."""
    return [t] if t.numel() <= AT_ONCE or is_sharded(t) else t.split(_rows_at_once(t.shape))


def fill_copies_by_piece_(copies: Tensor, fill_: Callable[[Tensor], None]) -> None:
    """Fill stacked copies [copies, ...] of a tensor piece by piece, with the same values as separate pieces get."""
    for piece in copies.split(_rows_at_once(copies.shape[1:]), 1) if copies[0].numel() > AT_ONCE else [copies]:
        drawn = piece if piece.is_contiguous() else torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
        fill_(drawn)
        if drawn is not piece:
            piece.copy_(drawn)


def _rows_at_once(shape: Sequence[int]) -> int:
    return max(1, AT_ONCE // max(1, math.prod(shape[1:])))
