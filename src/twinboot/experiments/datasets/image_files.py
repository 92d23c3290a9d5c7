"""The official files of CIFAR-10 and Fashion-MNIST: their names and checksums, how to read and how to download them."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..._core.atomic import replacing

Bytes = NDArray[np.uint8]
CIFAR = (3, 32, 32)
AGAIN = "copy or download it again"
TIMEOUT = 30.0  # seconds without a byte of a download


class MissingError(ValueError):
    """Files of a data set are missing."""


@dataclass(frozen=True)
class Layout:
    """The files of a data set, which are in one of these folders or in an archive, and where they come from."""

    files: dict[str, str]  # name -> MD5 of the unpacked content; the training files first
    folders: tuple[str, ...]
    page: str  # that tells of them
    address: str  # of the downloads
    downloads: dict[str, str]  # where `read` finds each downloaded file -> its MD5
    archive: str = ""


LAYOUTS = {
    "cifar10": Layout(
        {
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
        ("cifar-10-batches-bin", "."),
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        address="https://www.cs.toronto.edu/~kriz/",
        downloads={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        archive="cifar-10-binary.tar.gz",  # the Python version is pickled, and files from outside are never unpickled
    ),
    "fashion-mnist": Layout(
        {
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
        ("FashionMNIST/raw", "."),
        page="https://github.com/zalandoresearch/fashion-mnist",
        address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        downloads={
            "FashionMNIST/raw/train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "FashionMNIST/raw/train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "FashionMNIST/raw/t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
}


def wanted(name: str) -> str:
    """The files that a user has to get, for messages."""
    layout, files = LAYOUTS[name], list(LAYOUTS[name].files)
    if layout.archive:
        return f"{layout.archive}, as it is or unpacked ({files[0]} ... {files[-1]})"
    return ", ".join(f"{file}.gz" for file in files)


def download(name: str, directory: Path | str) -> None:
    """Download the official files of a data set to where `load` finds them.

    Complete files are left alone. A file gets its name only once its checksum is right.
    """
    if name not in LAYOUTS:
        raise ValueError(f"there is nothing to download for {name!r}: use {', '.join(LAYOUTS)}.")
    for file, md5 in LAYOUTS[name].downloads.items():
        path = Path(directory) / file
        if path.is_file() and _md5(path) == md5:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        url = LAYOUTS[name].address + path.name
        print(f"downloading {url}", file=sys.stderr, flush=True)
        try:
            with replacing(path) as unfinished:
                with urllib.request.urlopen(url, timeout=TIMEOUT) as response, unfinished.open("wb") as target:
                    shutil.copyfileobj(response, target)
                if _md5(unfinished) != md5:
                    raise OSError("the checksum is not that of the official file")
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise ConnectionError(f"can't download {url} to {path}: {error}; get the file by other means.") from None


def _md5(path: Path) -> str:
    with path.open("rb") as file:  # MD5 is what the publishers give; it detects damage
        return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()


def read(name: str, directory: Path, verify: bool) -> list[Bytes]:
    """Training images, training labels, test images and test labels, with `verify` only of the official files."""
    layout, arrays = LAYOUTS[name], {}
    for file, where, data in _contents(layout, _find(name, directory)):
        if verify and hashlib.md5(data, usedforsecurity=False).hexdigest() != layout.files[file]:
            raise ValueError(
                f"{where} is not the official file, by its checksum: it is cut short, damaged or of another data set; "
                f"{AGAIN}."
            )
        arrays[file] = cifar_batch(data, where) if name == "cifar10" else idx(data, where, 3 if "images" in file else 1)
    ordered = [arrays[file] for file in layout.files]
    if name == "cifar10":
        records = [np.concatenate(ordered[:-1]), ordered[-1].copy()]
        ordered = [part for own in records for part in (own[:, 1:].reshape(-1, *CIFAR), own[:, 0])]
    return ordered


def _find(name: str, directory: Path) -> dict[str, Path] | Path:
    """The place of each file, or the archive."""
    layout, incomplete = LAYOUTS[name], ""
    for folder in (directory / f for f in layout.folders):
        plain_or_packed = [(file, folder / f"{file}{end}") for end in (".gz", "") for file in layout.files]
        places = {file: path for file, path in plain_or_packed if path.is_file()}
        if len(places) == len(layout.files):
            return places
        if places:
            incomplete = f"{folder} lacks {', '.join(f for f in layout.files if f not in places)} of {name}"
    if layout.archive and (archive := directory / layout.archive).is_file():
        return archive
    raise MissingError(
        f"{incomplete or f'{directory} holds no files of {name}'}: put {wanted(name)} there, from {layout.page}, or "
        f"let `twinboot.experiments.datasets.download({name!r}, {str(directory)!r})` fetch it."
    )


def _contents(layout: Layout, places: dict[str, Path] | Path) -> Iterator[tuple[str, str, bytes]]:
    """The official name of each file, its name in messages, and its unpacked content."""
    try:
        if isinstance(places, dict):
            for file, place in places.items():
                packed = place.read_bytes()
                yield file, str(place), gzip.decompress(packed) if place.suffix == ".gz" else packed
            return
        place, missing = places, set(layout.files)
        with tarfile.open(place, "r|gz") as tar:
            for member in tar:  # in the archive's order: going back would unpack it again
                file = member.name.rsplit("/", 1)[-1]
                if file in missing and (content := tar.extractfile(member)) is not None:
                    missing.remove(file)
                    yield file, f"{file} in {place}", content.read()
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError):
        raise ValueError(f"{place} is cut short or damaged: {AGAIN}.") from None
    except OSError as error:
        raise ValueError(f"can't read {place}: {error.strerror or error}.") from None
    if missing:
        raise ValueError(f"{place} lacks {', '.join(sorted(missing))}: {AGAIN}.")


def cifar_batch(data: bytes, name: str) -> Bytes:
    """The records of a binary batch: one byte for the label, then 3 x 32 x 32 for the image."""
    length = 1 + math.prod(CIFAR)
    if not data or len(data) % length:
        raise ValueError(f"{name} has {len(data)} bytes, which is no whole number of images of {length}: {AGAIN}.")
    return np.frombuffer(data, np.uint8).reshape(-1, length)


def idx(data: bytes, name: str, dimensions: int) -> Bytes:
    """An idx file: two zeros, 8 for unsigned bytes, the number of dimensions, their sizes, the values. Images get a
    channel."""
    start = 4 + 4 * dimensions
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) < start:
        raise ValueError(f"{name} does not begin as an idx file of bytes in {dimensions} dimensions: {AGAIN}.")
    shape = np.frombuffer(data, ">u4", dimensions, offset=4).tolist()
    if len(data) - start != math.prod(shape) or 0 in shape:
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"{name} has {len(data) - start} bytes of values, but says that it holds {sizes}: {AGAIN}.")
    values = np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()
    return values[:, None] if dimensions == 3 else values
