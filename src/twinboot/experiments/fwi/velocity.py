"""The ground that waves run through: a small one made here, or a window of a file, and a blurred one to start from."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..datasets import array_files

SHAPE = (20, 50)  # of the layered model: small enough that a gradient of 16 shots takes some 0.15 s on one core
LARGEST = (60, 100)  # of what is taken of a file when no window is named
Window = tuple[int, int, int, int]


def layered() -> Tensor:
    """Layers that dip to the right and grow faster with depth, cut by a fault, with a slow lens in the third.

    >>> model = layered()
    >>> model.shape, float(model.min()), float(model.max())
    (torch.Size([20, 50]), 1500.0, 3500.0)
    """
    row, column = torch.meshgrid(*map(torch.arange, SHAPE), indexing="ij")
    throw = 2 * (column > 36 - row / 3)  # what lies right of the fault has sunk by two cells
    depth = row - throw - 0.04 * column
    model = torch.full(SHAPE, 1500.0)
    for top, speed in ((2.5, 1900.0), (5.5, 2300.0), (9.5, 2700.0), (13.5, 3500.0)):
        model[depth > top] = speed
    lens = ((column - 18) / 6) ** 2 + ((row - 8.5) / 2) ** 2 < 1
    model[lens] = 1900.0
    return model


def read(path: str, window: Window | None = None, coarsen: int = 1) -> Tensor:
    """A window of the velocities in a file, in m/s: top, left, height and width in cells of the file, every
    `coarsen`-th of which is taken. Without a window from the surface down, and from the middle."""
    cells = _array(path)
    if window is None:
        height, width = (min(size, most * coarsen) for size, most in zip(cells.shape, LARGEST, strict=True))
        window = (0, (cells.shape[1] - width) // 2, height, width)
    top, left, height, width = window
    if min(top, left) < 0 or top + height > cells.shape[0] or left + width > cells.shape[1]:
        raise ValueError(
            f"the window {' '.join(map(str, window))} (top left height width) does not lie in the "
            f"{cells.shape[0]} x {cells.shape[1]} cells of {path}."
        )
    cells = cells[top : top + height : coarsen, left : left + width : coarsen]
    if min(cells.shape) < 12:
        raise ValueError(f"{cells.shape[0]} x {cells.shape[1]} cells of {path} are too few: take at least 12 x 12.")
    return torch.from_numpy(np.ascontiguousarray(cells, np.float32))


def _array(path: str) -> NDArray[np.float64]:
    loaded = list(array_files.arrays(path).values())
    if len(loaded) != 1:
        raise ValueError(f"{path} holds {len(loaded)} arrays: it must hold one, the velocities.")
    [found] = loaded
    if found.ndim != 2 or found.dtype.kind not in "fiu":
        raise ValueError(f"{path} must hold real numbers in two dimensions, not {found.dtype} of shape {found.shape}.")
    cells: NDArray[np.float64] = found.astype(np.float64)
    if not np.isfinite(cells).all():
        raise ValueError(f"{path} has velocities that are not finite.")
    if cells.size == 0 or cells.min() < 100 or cells.max() > 10000:
        span = f"{cells.min():g} to {cells.max():g}" if cells.size else "nothing"
        raise ValueError(f"{path} holds {span}, which are no velocities of rock and water in m/s.")
    return cells


def smoothed(model: Tensor, width: float) -> Tensor:
    """The model blurred by a Gaussian of that standard deviation in cells, its edges continued outward."""
    reach = math.ceil(4 * width)
    kernel = torch.exp(-(torch.arange(-reach, reach + 1) ** 2) / (2 * width**2))
    kernel = kernel / kernel.sum()
    rows = F.conv2d(F.pad(model[None, None], (0, 0, reach, reach), mode="replicate"), kernel.view(1, 1, -1, 1))
    return F.conv2d(F.pad(rows, (reach, reach, 0, 0), mode="replicate"), kernel.view(1, 1, 1, -1))[0, 0]
