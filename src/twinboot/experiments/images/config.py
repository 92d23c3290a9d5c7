"""The image experiment's presets and its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..networks import Normalisation
from ..runner.experiment import refuse_repeated
from .contenders import METHODS

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
    # For a look within a minute: 8 x 8 pixels, and what needs no other package.
    "digits": Preset("digits", None, "small", 0.5, "weight", 12, 3, ("hold-out", "single", "dropout", "twins")),
    # Few images for many weights, where a single model overfits most.
    "cifar10-5k": Preset("cifar10", 5000, "vgg16", 0.25, "batch", epochs=24, seeds=5, methods=ALL),
    # As long as two CPU cores manage in two hours.
    "cifar10-small": Preset("cifar10", None, "vgg16", 0.25, "batch", epochs=24, seeds=1, methods=("hold-out", "twins")),
    # Section 4.2 and Appendix A.4, for a GPU; the number of epochs is not stated. Images take long: few are timed.
    "cifar10": Preset("cifar10", None, "vgg16", 1.0, "weight", 100, 1, methods=("hold-out", "twins"), timed=1000),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Figures 4 and 5: networks that classify images, with Twin-Boot and with what else their time could buy."""

    preset: PresetName = "digits"
    """Data, network and length: digits needs no files, cifar10-5k and cifar10-small suit a CPU, cifar10 a GPU."""
    data: str | None = None
    """Directory with the official files of CIFAR-10, and of Fashion-MNIST for what is no CIFAR-10 image."""
    methods: tuple[str, ...] | None = None
    """Of hold-out, single, dropout, dropout-seen (on what twins see), ivon, twins, twins-draws, twins-all (none of the
    images left unseen), twins-split (which divide them all), twins-pooled (which do, and pool their gradients in part),
    twins-pooled-dropout (and have dropout, too), twins-pooled-quiet, twins-pooled-loud, twins-halves (which divide what
    they see), twins-pooled-halves, twins-early (with more resets at first), twins-halves-early, twins-units,
    twins-centered, twins-mean, twins-rare, twins-quiet, twins-loud, twins-decay and twins-dropout.
    By default the preset's: digits has hold-out, single, dropout and twins."""
    screened: tuple[str, ...] = ()
    """Other methods that run with the first seed alone, to see which are worth all of them."""
    epochs: int | None = None
    """By default the preset's."""
    seeds: int | None = None
    """Runs of each method, each with its own images and weights. By default the preset's."""
    batch: int = 64
    """Mini-batch size. Appendix A.4."""
    rate: float = 0.001
    """Learning rate of Adam. Appendix A.4."""
    samples: int = 8
    """Draws of weights, or of dropout's masks, for a prediction."""
    test: int | None = None
    """Judge by the first so many test images, or spare ones, and at most as many others of each kind, to save time; by
    default by all."""
    spare: bool = False
    """Judge by 5,000 other images of the training files, which nothing is trained on, instead of by test images: for
    what is to be chosen, such as a default."""
    augment: bool = False
    """Shift and mirror the training images at random. Not stated; without it the differences are larger."""
    device: str | None = None
    """Such as cuda; by default the CPU."""
    seed: int = 0
    """Of everything random."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}: use {', '.join(PRESETS)}.")
        if unknown := [m for m in (*(self.methods or ()), *self.screened) if m not in METHODS]:
            raise ValueError(f"unknown method {unknown[0]!r}: use {', '.join(METHODS)}.")
        if self.methods is not None:
            refuse_repeated(self, "methods")
        if self.screened:
            refuse_repeated(self, "screened")
        if both := set(self.screened) & set(self.methods or PRESETS[self.preset].methods):
            raise ValueError(f"{both.pop()} runs with all seeds, so that it can't be screened.")
        for name, least in (("epochs", 1), ("seeds", 1), ("batch", 2), ("samples", 2), ("test", 100)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}.")
        if self.spare and PRESETS[self.preset].images is None:
            raise ValueError(f"spare images need a preset that leaves some, such as cifar10-5k, not {self.preset}.")
        if not self.rate > 0:
            raise ValueError(f"rate must be above 0, not {self.rate}.")
