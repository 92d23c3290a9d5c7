"""The presets and the settings of the image experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..networks import Normalisation
from ..runner.experiment import refuse_repeated, require_at_least, require_positive
from .methods import find

PresetName = Literal["digits", "cifar10-5k", "cifar10-small", "cifar10"]


@dataclass(frozen=True)
class Preset:
    """A data set, a network for it, and how long it is trained."""

    dataset: str
    images: int | None  # for training, drawn anew for each seed; None for all
    network: Literal["small", "vgg16"]
    width: float
    normalisation: Normalisation
    epochs: int
    seeds: int
    methods: tuple[str, ...]
    timed: int = 5000  # images, at most, of an epoch whose time is measured


ALL = ("hold-out", "single", "dropout", "ivon", "twins", "twins-pooled", "twins-pooled-dropout", "twins-draws")
PRESETS: dict[str, Preset] = {
    # One minute: 8 x 8 pixels, and only methods that need no other package.
    "digits": Preset("digits", None, "small", 0.5, "weight", 12, 3, ("hold-out", "single", "dropout", "twins")),
    # Few images for many weights, where a single model overfits most.
    "cifar10-5k": Preset("cifar10", 5000, "vgg16", 0.25, "batch", epochs=24, seeds=5, methods=ALL),
    # Two hours on two CPU cores.
    "cifar10-small": Preset("cifar10", None, "vgg16", 0.25, "batch", epochs=24, seeds=1, methods=("hold-out", "twins")),
    # Section 4.2 and Appendix A.4, for a GPU; the paper does not state the epochs. Few images are timed: they are slow.
    "cifar10": Preset("cifar10", None, "vgg16", 1.0, "weight", 100, 1, methods=("hold-out", "twins"), timed=1000),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Figures 4 and 5: image classifiers with Twin-Boot, compared with other methods at similar cost."""

    preset: PresetName = "digits"
    """Data, network and length. digits needs no files; cifar10-5k and cifar10-small suit a CPU, cifar10 a GPU."""
    data: str | None = None
    """Directory with the official files of CIFAR-10, and of Fashion-MNIST as out-of-distribution images."""
    methods: tuple[str, ...] | None = None
    """Of hold-out, single, dropout, dropout-seen (without the out-of-bag images of the twins), ivon, twins, twins-draws
    (repeated samples instead of counts), twins-pooled (split data and pooled gradients), twins-pooled-dropout; or twins
    with changed settings, as twins:noise=2,kind=split. By default those of the preset: digits has hold-out, single,
    dropout and twins."""
    set: tuple[str, ...] = ()
    """Run Twin-Boot once more with these settings changed, such as noise=2 kind=split. The settings are mode, resample,
    decay, noise, local, pooled, scale, spread, reset, early, groups, dropout, kind, cover and longer. For more than one
    such variant see --methods."""
    epochs: int | None = None
    """Epochs of a single model. By default those of the preset."""
    seeds: int | None = None
    """Runs of each method, each with its own images and weights. By default those of the preset."""
    batch: int = 64
    """Batch size of a single model; that of the twins follows from it, as in fit. Appendix A.4."""
    lr: float = 0.001
    """Learning rate of Adam. Appendix A.4."""
    samples: int = 8
    """Draws of weights, or of dropout masks, for a prediction."""
    test: int | None = None
    """Evaluate on this many test images, and at most as many of each other kind, to save time. By default on all."""
    spare: bool = False
    """Evaluate on 5,000 other images of the training files, which nothing trains on, instead of the test images. Use
    this to choose settings."""
    device: str | None = None
    """Such as cuda. By default the CPU."""
    seed: int = 0
    """Seed of everything random."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}: use {', '.join(PRESETS)}.")
        if self.methods is not None:
            refuse_repeated(self, "methods")
        for name in self.all_methods:
            find(name)
        for name, least in (("epochs", 1), ("seeds", 1), ("batch", 2), ("samples", 2), ("test", 100)):
            if getattr(self, name) is not None:
                require_at_least(self, least, name)
        if self.spare and PRESETS[self.preset].images is None:
            raise ValueError(f"spare images need a preset that leaves some, such as cifar10-5k, not {self.preset}.")
        require_positive(self, "lr")

    @property
    def all_methods(self) -> tuple[str, ...]:
        changed = (f"twins:{','.join(self.set)}",) if self.set else ()
        return tuple(dict.fromkeys((*(self.methods or PRESETS[self.preset].methods), *changed)))
