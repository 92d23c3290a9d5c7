"""All experiments by name, in the order of the paper. `runner.experiment.Experiment` lists what such a module has."""

from __future__ import annotations

from . import fwi, gaussian, images, nist, regressions, seismic, text, truth, uci
from .runner.experiment import Experiment
from .seismic import estimates, paper, posterior, regimes
from .wells import basins, sweeps

EXPERIMENTS: dict[str, Experiment] = {
    "gaussian": gaussian,
    "basins": basins,
    "sweeps": sweeps,
    "images": images,
    "seismic": seismic,
    "seismic-paper": paper,
    "regimes": regimes,
    "estimates": estimates,
    "posterior": posterior,
    "fwi": fwi,
    "uci": uci,
    "truth": truth,
    "text": text,
    "nist": nist,
    "regressions": regressions,
}
