"""A seismic survey: shots along the surface, and the waves that come back to receivers along the surface.

The waves are those of the scalar wave equation with constant density. All four edges absorb them, the surface too, so
there are no echoes from it. deepwave does the work; it is only imported when a survey is made.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from ..._core.extras import how_to_install
from ..runner.experiment import UnavailableError

ABSORBING = 8  # cells around the model
DEPTH = 1  # cell in which sources and receivers lie
STORED = 4  # of the forward waves, every so many samples are kept for the gradient, still far above their frequency


def require_deepwave() -> None:
    if find_spec("deepwave") is None:
        raise UnavailableError(f"fwi needs deepwave, which solves the wave equation: {how_to_install('seismic')}")


def places(count: int, width: int) -> Tensor:
    """Columns in which so many sources or receivers lie, evenly from edge to edge."""
    return torch.linspace(1, width - 2, count).round().long()


class Survey:
    """Records [shots, receivers, samples] of a medium whose cells are `spacing` metres wide.

    Args:
        width: of the medium in cells.
        spacing: of its cells, in metres.
        shots: how many, each alone, with a Ricker wavelet.
        receivers: how many, which record every shot.
        frequency: peak of the wavelet in Hz.
        duration: of a record in seconds.
        interval: between two samples in seconds. Where waves of the fastest velocity need shorter steps, deepwave
            takes them and resamples, which lets some of a record's end ring at its beginning.
        fastest: an upper bound of all velocities in m/s. The time step follows it and not each medium, so that two
            media differ in nothing else.
    """

    def __init__(
        self,
        width: int,
        spacing: float,
        shots: int,
        receivers: int,
        frequency: float,
        duration: float,
        interval: float,
        fastest: float,
    ) -> None:
        require_deepwave()
        import deepwave

        self._scalar = deepwave.scalar
        self.spacing, self.frequency, self.interval, self.fastest = spacing, frequency, interval, fastest
        samples = STORED * round(duration / interval / STORED)
        wavelet = deepwave.wavelets.ricker(frequency, samples, interval, 1.5 / frequency)
        self.sources = _at_surface(places(shots, width))[:, None]
        self.receivers = _at_surface(places(receivers, width)).expand(shots, -1, -1)
        self.wavelets = wavelet.expand(shots, 1, -1).contiguous()

    def record(self, velocity: Tensor, shots: Tensor | slice = slice(None)) -> Tensor:
        """What the receivers record of all shots, or of some."""
        out = self._scalar(
            velocity,
            self.spacing,
            self.interval,
            source_amplitudes=self.wavelets[shots],
            source_locations=self.sources[shots],
            receiver_locations=self.receivers[shots],
            pml_width=ABSORBING,
            pml_freq=self.frequency,
            max_vel=self.fastest,
            model_gradient_sampling_interval=STORED,
        )
        recorded: Tensor = out.receiver_amplitudes
        return recorded


def _at_surface(columns: Tensor) -> Tensor:
    return torch.stack([torch.full_like(columns, DEPTH), columns], -1)
