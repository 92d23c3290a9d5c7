"""The paper's experiments. Each is a module with a config, a run, a figure and what is to be said of the result."""

from . import basins, estimates, fwi, gaussian, regimes, seismic, sweeps
from .experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "gaussian": gaussian,
    "basins": basins,
    "sweeps": sweeps,
    "seismic": seismic,
    "regimes": regimes,
    "estimates": estimates,
    "fwi": fwi,
}
