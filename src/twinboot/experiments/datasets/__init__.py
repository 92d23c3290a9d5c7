"""Images to classify, as tensors of bytes: the digits of this package, or official files in a directory.

    images = load("cifar10", "data")
    x = standardised(images.train_x[index], moments_of(images.train_x))

Bytes take a quarter of the memory of floats. `download("cifar10", "data")` fetches the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .image_files import AGAIN, LAYOUTS, read
from .image_files import MissingError as MissingError
from .image_files import download as download

CLASSES = 10  # in each of these data sets
DIGITS_TRAIN = 1347  # three quarters


@dataclass(frozen=True, eq=False)
class Images:
    """Images as bytes [n, channels, height, width] and their classes as int64, 0 to `classes` - 1."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int = CLASSES


def load(name: str, directory: Path | str | None = None, verify: bool = True) -> Images:
    """Load `digits`, which needs no files, or `cifar10` or `fashion-mnist` from official files in the directory.

    Args:
        verify: refuse files that do not have the official checksums. With `False`, any files with the same names and
            layout are read, such as a part of the data set.

    >>> load("digits").train_x.shape
    torch.Size([1347, 1, 8, 8])
    """
    if name == "digits":
        return digits()
    if name not in LAYOUTS:
        raise ValueError(f"unknown data set {name!r}: use digits, {', '.join(LAYOUTS)}.")
    if directory is None:
        raise ValueError(f"{name} is read from files: say in which directory they are.")
    train_x, train_y, test_x, test_y = map(torch.from_numpy, read(name, Path(directory), verify))
    for part, x, y in (("training", train_x, train_y), ("test", test_x, test_y)):
        if len(x) != len(y):
            raise ValueError(f"{directory} has {len(x)} {part} images of {name}, but {len(y)} labels: {AGAIN}.")
        if (highest := int(y.max())) >= CLASSES:
            raise ValueError(f"{directory} has a {part} label {highest}, but {name} has classes 0 to {CLASSES - 1}.")
    if train_x.shape[1:] != test_x.shape[1:]:
        shapes = " and ".join("x".join(map(str, x.shape[2:])) for x in (train_x, test_x))
        raise ValueError(f"{directory} has training and test images of {name} of different sizes, {shapes}.")
    return Images(train_x, train_y.long(), test_x, test_y.long())


def digits() -> Images:
    """The 8 x 8 digits that scikit-learn has too, with values from 0 to 16 (digits.LICENCE.txt names their source).

    The first three quarters of the file are for training, without a shuffle: neighbouring digits are by the same
    writers, so a shuffle would make the test easier (a nearest neighbour is right for 99 % instead of 96 %).
    """
    with resources.files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        x, y = torch.from_numpy(arrays["images"])[:, None], torch.from_numpy(arrays["labels"]).long()
    return Images(x[:DIGITS_TRAIN], y[:DIGITS_TRAIN], x[DIGITS_TRAIN:], y[DIGITS_TRAIN:])


class Moments(NamedTuple):
    """Mean and standard deviation of each channel, [channels, 1, 1]."""

    mean: Tensor
    std: Tensor


def moments_of(x: Tensor) -> Moments:
    """The moments of images of bytes, from a count of each value: exact, and without a copy as floats."""
    values = torch.arange(256, dtype=torch.float64, device=x.device)
    counts = torch.stack([torch.bincount(channel.reshape(-1), minlength=256) for channel in x.unbind(1)])
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ values
    std = (share * (values - mean[:, None]).square()).sum(1).sqrt()
    std[std == 0] = 1.0  # so that a constant channel becomes 0, not NaN
    return Moments(mean.float().view(-1, 1, 1), std.float().view(-1, 1, 1))


def standardised(x: Tensor, moments: Moments) -> Tensor:
    """Images as floats, shifted and scaled by the moments of the training images.

    >>> images = digits()
    >>> x = standardised(images.train_x, moments_of(images.train_x))
    >>> abs(x.mean().item()) < 1e-5, abs(x.std().item() - 1) < 1e-4
    (True, True)
    """
    return (x.float() - moments.mean.to(x.device)) / moments.std.to(x.device)
