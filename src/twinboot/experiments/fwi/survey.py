"""The ground, and a seismic survey of it: shots along the surface, and the waves that come back to receivers there.

The waves are those of the scalar wave equation with constant density. All four edges absorb them, the surface too, so
there are no echoes from it. deepwave solves the equation; it is only imported when a survey is recorded.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..._core.extras import how_to_install
from ..datasets import array_files
from ..runner.experiment import UnavailableError

SHAPE = (20, 50)  # of the layered model: small enough that a gradient of 16 shots takes some 0.15 s on one core
LARGEST = (60, 100)  # of what is taken of a file when no window is named
ABSORBING = 8  # cells around the model
DEPTH = 1  # cell in which sources and receivers lie
STORED = 4  # every fourth sample of the forward waves is kept for the gradient, still far above their frequency


def require_deepwave() -> None:
    if find_spec("deepwave") is None:
        raise UnavailableError(f"fwi needs deepwave, which solves the wave equation: {how_to_install('seismic')}")


def places(count: int, width: int) -> Tensor:
    """The columns of sources or receivers, evenly from edge to edge."""
    return torch.linspace(1, width - 2, count).round().long()


@dataclass(frozen=True)
class Survey:
    """Records [shots, receivers, samples] of the velocities in a section of the ground."""

    width: int  # of the section in cells
    spacing: float  # metres per cell
    shots: int  # each alone, with a Ricker wavelet
    receivers: int  # which record every shot
    frequency: float  # peak of the wavelet in Hz
    duration: float  # of a record in seconds
    # Seconds between two samples. Where the fastest waves need shorter steps, deepwave takes them and resamples, and
    # some of the end of a record then rings at its beginning.
    interval: float
    # Upper bound of all velocities in m/s. The time step follows it, so that it is the same for all sections.
    fastest: float

    def record(self, velocity: Tensor, shots: Tensor | slice = slice(None)) -> Tensor:
        """What the receivers record of all shots, or of some."""
        require_deepwave()
        import deepwave

        samples = STORED * round(self.duration / self.interval / STORED)
        wavelet = deepwave.wavelets.ricker(self.frequency, samples, self.interval, 1.5 / self.frequency)
        with warnings.catch_warnings():  # under vmap deepwave cannot check the grid, which the config has done
            warnings.filterwarnings("ignore", "The test for the number of grid cells", UserWarning)
            out = deepwave.scalar(
                velocity,
                self.spacing,
                self.interval,
                source_amplitudes=wavelet.expand(self.shots, 1, -1)[shots].contiguous(),
                source_locations=self._at_surface(self.shots)[:, None][shots],
                receiver_locations=self._at_surface(self.receivers).expand(self.shots, -1, -1)[shots],
                pml_width=ABSORBING,
                pml_freq=self.frequency,
                max_vel=self.fastest,
                model_gradient_sampling_interval=STORED,
            )
        recorded: Tensor = out.receiver_amplitudes
        return recorded

    def _at_surface(self, count: int) -> Tensor:
        columns = places(count, self.width)
        return torch.stack([torch.full_like(columns, DEPTH), columns], -1)


def layered() -> Tensor:
    """Layers that dip to the right and get faster with depth, cut by a fault, with a slow lens in the third.

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


def read(path: str, window: tuple[int, int, int, int] | None = None, coarsen: int = 1) -> Tensor:
    """The velocities in a window of a file, in m/s. The window is its top, left, height and width in cells of the file,
    by default the middle from the surface down; every `coarsen`-th cell of it is taken."""
    loaded = list(array_files.arrays(path).values())
    if len(loaded) != 1:
        raise ValueError(f"{path} holds {len(loaded)} arrays: it must hold one, the velocities.")
    [cells] = loaded
    if cells.ndim != 2 or cells.dtype.kind not in "fiu":
        raise ValueError(f"{path} must hold real numbers in two dimensions, not {cells.dtype} of shape {cells.shape}.")
    if not np.isfinite(cells).all():
        raise ValueError(f"{path} has velocities that are not finite.")
    if cells.size == 0 or cells.min() < 100 or cells.max() > 10000:
        span = f"{cells.min():g} to {cells.max():g}" if cells.size else "nothing"
        raise ValueError(f"{path} holds {span}, which are no velocities of rock and water in m/s.")
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


def smoothed(model: Tensor, width: float) -> Tensor:
    """The model blurred by a Gaussian of that standard deviation in cells, its edges continued outward."""
    reach = math.ceil(4 * width)
    kernel = torch.exp(-(torch.arange(-reach, reach + 1) ** 2) / (2 * width**2))
    kernel = kernel / kernel.sum()
    rows = F.conv2d(F.pad(model[None, None], (0, 0, reach, reach), mode="replicate"), kernel.view(1, 1, -1, 1))
    return F.conv2d(F.pad(rows, (reach, reach, 0, 0), mode="replicate"), kernel.view(1, 1, 1, -1))[0, 0]
