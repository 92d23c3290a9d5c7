"""Twin-Boot: uncertainty-aware optimization via online two-sample bootstrapping."""

from . import resets
from .data.bootstrap import Bootstrap
from .data.loader import PairedLoader
from .distributed.apart import Apart
from .estimate.estimate import Estimate
from .estimate.prediction import Prediction
from .groups import Blocks
from .inverse.inversion import Inversion
from .inverse.invert import invert
from .inverse.operators import Dense
from .inverse.priors import Edges, GaussianProcess, Near, Residuals, Smooth
from .parameters.result import StandardErrors
from .parameters.standard_errors import standard_errors
from .training.control import ControlledTwins
from .training.error_bars import error_bars
from .training.fit import Fit, fit
from .training.protocol import Protocol
from .twins import Twins, pool_gradients

__version__ = "0.2.0"

__all__ = [
    "Apart",
    "Blocks",
    "Bootstrap",
    "ControlledTwins",
    "Dense",
    "Edges",
    "Estimate",
    "Fit",
    "GaussianProcess",
    "Inversion",
    "Near",
    "PairedLoader",
    "Prediction",
    "Protocol",
    "Residuals",
    "Smooth",
    "StandardErrors",
    "Twins",
    "error_bars",
    "fit",
    "invert",
    "pool_gradients",
    "resets",
    "standard_errors",
]
