"""All experiments by name, in the order of the paper. Each is a module with the names of `Experiment`."""

from __future__ import annotations

from . import fwi, gaussian, images, seismic, uci
from .runner.experiment import Experiment
from .seismic import estimates, regimes
from .wells import basins, sweeps

EXPERIMENTS: dict[str, Experiment] = {
    "gaussian": gaussian,
    "basins": basins,
    "sweeps": sweeps,
    "images": images,
    "seismic": seismic,
    "regimes": regimes,
    "estimates": estimates,
    "fwi": fwi,
    "uci": uci,
}
