"""Twin-Boot: uncertainty-aware optimization via online two-sample bootstrapping."""

from . import resets
from .apart import Apart
from .bootstrap import Bootstrap
from .estimate import Estimate
from .fit import Fit, fit
from .groups import Blocks
from .inversion import Inversion
from .invert import invert
from .loader import PairedLoader
from .operators import Dense
from .pooling import pool_gradients
from .prediction import Prediction
from .twins import Twins

__version__ = "0.1.0"

__all__ = [
    "Apart",
    "Blocks",
    "Bootstrap",
    "Dense",
    "Estimate",
    "Fit",
    "Inversion",
    "PairedLoader",
    "Prediction",
    "Twins",
    "fit",
    "invert",
    "pool_gradients",
    "resets",
]
