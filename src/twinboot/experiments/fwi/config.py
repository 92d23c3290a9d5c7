"""The settings of a full-waveform inversion, and the ground that they name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..datasets import array_files
from . import velocity


@dataclass(frozen=True, kw_only=True)
class Config:
    """Full-waveform inversion: a section of the ground from seismic records, on a layered model or on a file's."""

    model: str | None = None
    """A file of velocities in m/s, rows from the surface down: .npy, or .npz with one array. None: a layered model."""
    checksum: str = ""
    """SHA-256 of that file, found when it is first read: a run is not continued with another file under its name."""
    spacing: float = 40.0
    """Metres between two cells of the model, or of the file. 40 m are nine cells to the shortest main wavelength."""
    window: tuple[int, int, int, int] | None = None
    """Top, left, height and width of what is taken of the file, in its cells. None: its middle, from the surface."""
    coarsen: int = 1
    """Take every so-manieth cell of the window in both directions."""
    bounds: tuple[float, float] = (1000.0, 4000.0)
    """Velocities in m/s that may be tried. The time step of the waves follows the upper one."""
    smoothing: float = 200.0
    """The search starts from the truth blurred by a Gaussian of this standard deviation in metres."""
    shots: int = 16
    """Evenly along the surface. Two bootstrap samples leave out two of them on average."""
    receivers: int = 24
    """Evenly along the surface; each records every shot."""
    frequency: float = 4.0
    """Peak of the Ricker wavelet in Hz. Low enough that the blurred start is less than half a period off."""
    duration: float = 1.44
    """Seconds of a record: the way to the bottom and back, 0.7 s, and most of the way along the surface."""
    interval: float = 0.004
    """Seconds between two samples of a record: as long as waves of the upper bound allow on cells of 40 m."""
    noise: float = 0.3
    """Standard deviation of the white noise on the records, as a share of their root mean square."""
    steps: int = 60
    """For each method. Adam on all shots has then fitted the records to the level of their noise."""
    rate: float = 0.05
    """Of Adam, in units of 1000 m/s. With 0.02 it has not got to that level in so many steps."""
    decay: float = 0.98
    """Of the rate, each step."""
    first_reset: int = 10
    """The twins are reset after this step, then after intervals that grow by half. Appendix A.6 begins at 50."""
    check: int = 5
    """Steps between two looks at the shots that are not trained on."""
    block: int = 3
    """Cells of a side of the squares that share one sigma (section 4.3)."""
    seeds: int = 5
    """Runs, each with its own noise, bootstrap and held-out shots. The model is the same."""
    seed: int = 0
    """Of all random numbers."""

    def __post_init__(self) -> None:
        positive = ("spacing", "smoothing", "frequency", "duration", "interval", "rate")
        for name in positive:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be greater than 0, not {getattr(self, name)}.")
        for name, least in (("shots", 8), ("receivers", 2), ("coarsen", 1), ("steps", 1), ("first_reset", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        for name in ("check", "block", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not (0 < self.decay <= 1 and 0 <= self.noise < math.inf):
            raise ValueError(f"decay must lie in (0, 1] and noise be 0 or more, not {self.decay} and {self.noise}.")
        if not 0 < self.bounds[0] < self.bounds[1] < math.inf:
            raise ValueError(f"bounds must be two velocities, the lower one first, not {self.bounds}.")
        if self.bounds[0] < 6 * self.cell * self.frequency:
            raise ValueError(
                f"waves of {self.bounds[0]:g} m/s and {self.frequency:g} Hz are less than six cells of "
                f"{self.cell:g} m long, which is too coarse: lower the frequency or raise the lower bound."
            )
        if self.model is None and (self.window is not None or self.coarsen > 1):
            raise ValueError("window and coarsen are about a file: name it with --model.")
        if self.model is not None and not self.checksum:
            object.__setattr__(self, "checksum", array_files.checksum(self.model))

    @property
    def cell(self) -> float:
        """Metres between two cells of what is inverted."""
        return self.spacing * self.coarsen


QUICK = Config(seeds=1)


def truth(config: Config) -> Tensor:
    """The velocities to find, in m/s: those of the file, or the layered model."""
    if config.model is None:
        found = velocity.layered()
    else:
        found = velocity.read(config.model, config.window, config.coarsen)
        if array_files.checksum(config.model) != config.checksum:
            raise ValueError(f"{config.model} is not the file that the checksum belongs to: was it changed?")
    low, high = found.min().item(), found.max().item()
    if low < config.bounds[0] or high > config.bounds[1]:
        raise ValueError(f"the model has velocities from {low:g} to {high:g} m/s: set bounds that contain them.")
    if max(config.shots, config.receivers) > found.shape[1] - 2:
        raise ValueError(f"there are more shots or receivers than places for them in {found.shape[1]} columns.")
    return found
