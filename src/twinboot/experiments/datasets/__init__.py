"""Images to classify, as tensors of bytes: what is in this package, or official files in a directory.

`load` knows `digits`, which needs no files, and `cifar10`, `mnist` and `fashion-mnist`, which `download` fetches:

    images = load("cifar10", "data")
    moments = moments_of(images.train_x)
    x = augment(standardised(images.train_x[index], moments), generator)

The images stay bytes, a quarter of the memory of floats; `standardised` and `augment` are for batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import image_files
from .image_files import AGAIN
from .sources import LAYOUTS, PAGES, Layout, wanted
from .sources import download as download

CLASSES = 10  # in each of these data sets
DIGITS_TRAIN = 1347  # three quarters
NAMES = ("digits", *LAYOUTS)


class MissingError(ValueError):
    """There are no files of a data set, or not all of them, in one sentence."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images as bytes [n, channels, height, width] and their classes as int64, 0 to `classes` - 1."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    name: str


def load(name: str, directory: Path | str | None = None, verify: bool = True) -> Images:
    """The data set of that name. All but `digits` are read from official files in the directory, packed or not.

    Args:
        verify: refuse files that are not the official ones, by their checksums. Without it, any files of the same
            names and layout will do, such as a part of a data set or another one in MNIST's clothes.

    >>> load("digits").train_x.shape
    torch.Size([1347, 1, 8, 8])
    """
    if name == "digits":
        return digits()
    if name not in LAYOUTS:
        raise ValueError(f"unknown data set {name!r}: use {', '.join(NAMES)}.")
    if directory is None:
        raise ValueError(f"{name} is read from files: say in which directory they are.")
    layout, places = _find(name, Path(directory))
    found = _checked(_contents(layout, places), layout if verify else None)
    arrays = _cifar(found, layout) if name == "cifar10" else _idx(found, layout)
    return _images(name, str(directory), *arrays)


def digits() -> Images:
    """The 8 x 8 digits that scikit-learn has too, values 0 to 16 (digits.LICENCE.txt says whose they are).

    The first three quarters are for training, in the order of the file: digits near each other are alike, and after a
    shuffle the nearest neighbour is right for about 99 % of the others instead of 96 %.
    """
    with resources.files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        x, y = torch.from_numpy(arrays["images"])[:, None], torch.from_numpy(arrays["labels"])
    n = DIGITS_TRAIN
    return _images("digits", "digits.npz", x[:n], y[:n], x[n:], y[n:])


class Moments(NamedTuple):
    """Mean and standard deviation of each channel, ready to broadcast: [channels, 1, 1]."""

    mean: Tensor
    std: Tensor


def moments_of(x: Tensor) -> Moments:
    """The moments of images of bytes, by how often each value occurs: exact, and without a copy as floats."""
    values = torch.arange(256, dtype=torch.float64, device=x.device)
    counts = torch.stack([torch.bincount(channel.reshape(-1), minlength=256) for channel in x.unbind(1)])
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ values
    std = (share * (values - mean[:, None]).square()).sum(1).sqrt()
    std[std == 0] = 1.0  # a channel that never changes becomes 0, not NaN
    return Moments(mean.float().view(-1, 1, 1), std.float().view(-1, 1, 1))


def standardised(x: Tensor, moments: Moments) -> Tensor:
    """Images as floats of mean 0 and deviation 1 in each channel, by the moments of the training images.

    >>> images = digits()
    >>> x = standardised(images.train_x, moments_of(images.train_x))
    >>> abs(x.mean().item()) < 1e-5, abs(x.std().item() - 1) < 1e-4
    (True, True)
    """
    return (x.float() - moments.mean.to(x.device)) / moments.std.to(x.device)


def augment(x: Tensor, generator: torch.Generator, padding: int = 4, flip: bool = True) -> Tensor:
    """Each image of a batch shifted by up to `padding` pixels each way and mirrored by the toss of a coin.

    What comes in from outside is 0: the mean, when the batch is standardised. `padding=0` and `flip=False` turn the
    one and the other off; digits and letters should not be mirrored. The generator is one on the CPU.

    >>> augment(torch.ones(2, 3, 32, 32), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """
    n, _, height, width = x.shape
    down, right = torch.randint(0, 2 * padding + 1, (2, n, 1), generator=generator)
    rows = down + torch.arange(height)
    columns = right + torch.arange(width)
    if flip:
        mirrored = torch.randint(0, 2, (n, 1), generator=generator) == 1
        columns = torch.where(mirrored, columns.flip(1), columns)
    padded = F.pad(x, (padding,) * 4)
    # One index for the whole batch: the channels last, as they share an image's rows and columns.
    image = torch.arange(n)[:, None, None]
    picked = (t.to(x.device) for t in (image, rows[:, :, None], columns[:, None, :]))
    return padded.permute(0, 2, 3, 1)[tuple(picked)].permute(0, 3, 1, 2).contiguous()


class Augment(nn.Module):
    """`augment` as a first layer, at work in training alone. It draws from the global generator, which `fit` seeds for
    each step."""

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        super().__init__()
        self.padding, self.flip = padding, flip

    def forward(self, x: Tensor) -> Tensor:
        return augment(x, torch.default_generator, self.padding, self.flip) if self.training else x


Found = Iterator[tuple[str, str, bytes]]  # the official name of a file, what an error calls it, what is in it


def _find(name: str, directory: Path) -> tuple[Layout, dict[str, Path] | Path]:
    """A layout of which the directory has all: where each file is, or the archive that holds them."""
    incomplete = ""
    for layout in LAYOUTS[name]:
        for folder in (directory / f for f in layout.folders):
            places = {file: p for file in layout.files if (p := _plain_or_packed(folder / file)) is not None}
            if len(places) == len(layout.files):
                return layout, places
            if places:
                incomplete = f"{folder} lacks {', '.join(f for f in layout.files if f not in places)} of {name}"
    for layout in LAYOUTS[name]:
        if layout.archive and (archive := directory / layout.archive).is_file():
            return layout, archive
    raise MissingError(
        f"{incomplete or f'{directory} holds no files of {name}'}: put {wanted(name)} there, from {PAGES[name]}, or "
        f"let `twinboot.experiments.datasets.download({name!r}, {str(directory)!r})` fetch it."
    )


def _plain_or_packed(path: Path) -> Path | None:
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def _contents(layout: Layout, places: dict[str, Path] | Path) -> Found:
    if isinstance(places, dict):
        for file, path in places.items():
            yield file, str(path), image_files.content(path)
        return
    missing = set(layout.files)
    for file, data in image_files.members(places, layout.files):
        missing.discard(file)
        yield file, f"{file} in {places}", data
    if missing:
        raise ValueError(f"{places} lacks {', '.join(sorted(missing))}: {AGAIN}.")


def _checked(found: Found, official: Layout | None) -> Found:
    """The same files, after a look at their sizes and checksums: nothing is made of one before."""
    for file, where, data in found:
        if official is not None:
            if official.size is not None and len(data) != official.size:
                raise ValueError(f"{where} has {len(data)} bytes instead of {official.size}: {AGAIN}.")
            if hashlib.md5(data, usedforsecurity=False).hexdigest() != official.files[file]:
                raise ValueError(
                    f"{where} is not the official file, by its checksum: it is cut short, damaged or of another data "
                    f"set; {AGAIN}."
                )
        yield file, where, data


def _cifar(found: Found, layout: Layout) -> list[Tensor]:
    batches = {}
    for file, where, data in found:
        read = image_files.cifar_binary if file.endswith(".bin") else image_files.cifar_pickle
        batches[file] = read(data, where)
    *train, test = layout.files
    return [joined for files in (train, [test]) for joined in _joined([batches.pop(f) for f in files])]


def _joined(batches: list[image_files.Batch]) -> tuple[Tensor, Tensor]:
    """All batches in one tensor. Each is let go when it is copied, so that memory never holds all of them twice."""
    labels = np.concatenate([y for _, y in batches])
    images = np.empty((len(labels), *image_files.CIFAR), np.uint8)
    start = 0
    while batches:
        x, _ = batches.pop(0)
        images[start : start + len(x)] = x
        start += len(x)
    return torch.from_numpy(images), torch.from_numpy(labels)


def _idx(found: Found, layout: Layout) -> list[Tensor]:
    read = {file: image_files.idx(data, where, 3 if "images" in file else 1) for file, where, data in found}
    return [t[:, None] if t.ndim == 3 else t for t in (read[file] for file in layout.files)]


def _images(name: str, where: str, train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor) -> Images:
    for part, x, y in (("training", train_x, train_y), ("test", test_x, test_y)):
        if len(x) != len(y):
            raise ValueError(f"{where} has {len(x)} {part} images of {name}, but {len(y)} labels: {AGAIN}.")
        if (highest := int(y.max())) >= CLASSES:
            raise ValueError(f"{where} has a {part} label {highest}, but {name} has classes 0 to {CLASSES - 1}.")
    if train_x.shape[1:] != test_x.shape[1:]:
        shapes = " and ".join("x".join(map(str, x.shape[2:])) for x in (train_x, test_x))
        raise ValueError(f"{where} has training and test images of {name} of different sizes, {shapes}.")
    return Images(train_x, train_y.long(), test_x, test_y.long(), CLASSES, name)
