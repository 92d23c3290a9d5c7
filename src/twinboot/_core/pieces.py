"""Large tensors piece by piece, so that what is computed of them takes little memory besides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .sharding import is_sharded

AT_ONCE = 2**20  # entries


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
