"""All experiments by name, in the order of the paper. Each is a module with the names of `Experiment`."""

from __future__ import annotations

from . import basins, estimates, fwi, gaussian, images, regimes, seismic, sweeps, uci
from .experiment import Experiment

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
