"""The presets and the settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..datasets.array_files import checksum
from ..runner.experiment import refuse_repeated, require_at_least

PresetName = Literal["function", "protein", "fashion", "cifar10"]
MethodName = Literal["fit", "error_bars", "dropout", "ensemble", "bootstrap", "ivon", "laplace", "swag"]
METHODS: tuple[MethodName, ...] = (
    "fit",
    "error_bars",
    "dropout",
    "ensemble",
    "bootstrap",
    "ivon",
    "laplace",
    "swag",
)
SETS = 20  # for the truth: the relative error of its standard deviation is then 16 % for one input
LEAST = 4  # sets: two for each half of the truth


@dataclass(frozen=True)
class Preset:
    """Data with a network, and how long it is trained."""

    kind: Literal["classification", "regression"]
    sizes: tuple[int, ...]  # of the training sets
    lrs: tuple[float, ...]
    epochs: int
    batch: int
    needs: str  # what --data must be; empty if nothing
    rounds: int = 3  # of error_bars, which together have the epochs of the training


PRESETS: dict[str, Preset] = {
    # A function of four inputs with known noise, and an MLP with 50 and 50 units: no files, and no end of samples.
    "function": Preset("regression", (300, 1000, 3000), (1e-3, 3e-3), epochs=60, batch=32, needs=""),
    # The largest of the UCI sets, with the same network.
    "protein": Preset("regression", (300, 1000, 3000), (1e-3, 3e-3), epochs=60, batch=32, needs="FILE"),
    # Fashion-MNIST at 14 x 14 pixels, and a network of two convolutions and two linear layers.
    "fashion": Preset("classification", (500, 1000, 2000, 4000), (3e-4, 1e-3, 3e-3), 30, batch=64, needs="DIRECTORY"),
    # CIFAR-10 with VGG-16 of a quarter of the width: ten sets. Two rounds of error_bars: in a third of so short a
    # training the twins do not get back to the training loss of the model, and in half of it they do.
    "cifar10": Preset("classification", (5000,), (1e-3,), epochs=10, batch=64, needs="DIRECTORY", rounds=2),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Beyond the paper: the spread of predictions against the truth, which is the spread over models that were trained
    on different training sets."""

    preset: PresetName = "function"
    """Data and network. function needs no files; protein, fashion and cifar10 need --data."""
    data: str | None = None
    """Directory with the official files of Fashion-MNIST or CIFAR-10, or for protein the file of `twinboot uci`."""
    checksum: str = ""
    """SHA-256 of the file of protein. Computed if left out; a run is not continued with another file."""
    methods: tuple[MethodName, ...] = METHODS
    """Which methods to compare."""
    sizes: tuple[int, ...] | None = None
    """Samples in a training set. By default those of the preset."""
    lrs: tuple[float, ...] | None = None
    """Learning rates of Adam. By default those of the preset, around the 0.001 of Appendix A.4."""
    epochs: int | None = None
    """Epochs of the plain training. By default those of the preset."""
    sets: int | None = None
    """Disjoint training sets for the truth. By default 20, or as many as there are."""
    scored: int = 5
    """On how many of these sets the methods run."""
    inputs: int = 500
    """Test inputs."""
    samples: int = 32
    """Draws of weights, or of dropout masks."""
    members: tuple[int, ...] = (2, 5)
    """Sizes of the ensembles, and of the bootstrap."""
    seed: int = 0
    """Seed of everything random."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}: use {', '.join(PRESETS)}.")
        refuse_repeated(self, "methods", "members", *(name for name in ("sizes", "lrs") if getattr(self, name)))
        if unknown := [name for name in self.methods if name not in METHODS]:
            raise ValueError(f"unknown method {unknown[0]!r}: use {', '.join(METHODS)}.")
        require_at_least(self, 1, "scored")
        require_at_least(self, 2, "samples")
        require_at_least(self, 10, "inputs")
        for size in self.sizes or ():
            if size < 50:
                raise ValueError(f"sizes must be at least 50, for some out-of-bag samples, not {size}.")
        for lr in self.lrs or ():
            if not 0 < lr < math.inf:
                raise ValueError(f"lrs must be above 0, not {lr}.")
        if any(members < 2 for members in self.members):
            raise ValueError(f"members must be at least 2, for a spread, not {min(self.members)}.")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, not {self.epochs}.")
        if self.sets is not None and self.sets < max(LEAST, self.scored):
            raise ValueError(f"sets must be at least {LEAST}, and at least scored ({self.scored}), not {self.sets}.")
        if self.preset == "protein" and self.data is not None and not self.checksum:
            object.__setattr__(self, "checksum", checksum(self.data))

    @property
    def all_sizes(self) -> tuple[int, ...]:
        return self.sizes or PRESETS[self.preset].sizes

    @property
    def all_lrs(self) -> tuple[float, ...]:
        return self.lrs or PRESETS[self.preset].lrs
