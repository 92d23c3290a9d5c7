"""The paper's experiments. Each is a module with a config, a run, a figure and what is to be said of the result."""

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
