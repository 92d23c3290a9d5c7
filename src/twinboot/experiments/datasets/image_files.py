"""What is in the official files of image data sets: CIFAR-10's binary and Python versions, and the idx of MNIST.

Each reader takes the content of a file, and the name by which an error speaks of it, and gives images and labels.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Batch = tuple[Bytes, Bytes]  # images [n, 3, 32, 32] and labels [n]
CIFAR = (3, 32, 32)
AGAIN = "copy or download it again"


def content(path: Path) -> bytes:
    """All of a file, unpacked where its name ends in .gz."""
    try:
        packed = path.read_bytes()
        return gzip.decompress(packed) if path.suffix == ".gz" else packed
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{path} is cut short or damaged: {AGAIN}.") from None
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}.") from None


def members(archive: Path, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """The files of these names in a .tar.gz, in the archive's own order: to go back would unpack it once more."""
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                if name in names and (file := tar.extractfile(member)) is not None:
                    yield name, file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError):
        raise ValueError(f"{archive} is cut short or damaged: {AGAIN}.") from None
    except OSError as error:
        raise ValueError(f"can't read {archive}: {error.strerror or error}.") from None


def cifar_binary(data: bytes, name: str) -> Batch:
    """Records of one byte for the label and 3 x 32 x 32 for the image: red, green, blue, each row by row."""
    length = 1 + math.prod(CIFAR)
    if not data or len(data) % length:
        raise ValueError(f"{name} has {len(data)} bytes, which is no whole number of images of {length}: {AGAIN}.")
    records = np.frombuffer(data, np.uint8).reshape(-1, length)
    return records[:, 1:].reshape(-1, *CIFAR), records[:, 0]


def idx(data: bytes, name: str, dimensions: int) -> Tensor:
    """An array of bytes: two zeros, 8 for unsigned bytes, the number of dimensions, their sizes, the values."""
    start = 4 + 4 * dimensions
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) < start:
        raise ValueError(f"{name} does not begin as an idx file of bytes in {dimensions} dimensions: {AGAIN}.")
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    if len(data) - start != math.prod(shape) or 0 in shape:
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"{name} has {len(data) - start} bytes of values, but says that it holds {sizes}: {AGAIN}.")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).view(shape)


def cifar_pickle(data: bytes, name: str) -> Batch:
    """A batch of the Python version: a dictionary with `data`, an array of bytes, and `labels`, a list of ints."""
    try:
        batch = _Plain(io.BytesIO(data), encoding="bytes").load()
    except _RefusedError as error:
        raise ValueError(f"{name} is no batch of CIFAR-10 and was not opened: it asks for {error}.") from None
    except Exception as error:  # what a damaged pickle raises can be nearly anything
        raise ValueError(f"{name} is cut short or damaged ({type(error).__name__}): {AGAIN}.") from None
    pixels, labels = (batch.get(b"data"), batch.get(b"labels")) if isinstance(batch, dict) else (None, None)
    if not isinstance(pixels, _Array) or not isinstance(labels, list) or not all(type(n) is int for n in labels):
        raise ValueError(f"{name} holds no array `data` with a list `labels` of whole numbers: {AGAIN}.")
    if pixels.shape != (len(labels), math.prod(CIFAR)) or len(pixels.values) != math.prod(pixels.shape) or not labels:
        raise ValueError(f"{name} holds data of shape {pixels.shape} for {len(labels)} labels: {AGAIN}.")
    if not 0 <= min(labels) <= max(labels) <= 255:  # so that they are bytes, as in the other files
        raise ValueError(f"{name} holds labels from {min(labels)} to {max(labels)}, which are no classes: {AGAIN}.")
    values = np.frombuffer(pixels.values, np.uint8).reshape(pixels.shape, order=pixels.order)
    return values.reshape(-1, *CIFAR), np.array(labels, np.uint8)


class _RefusedError(Exception):
    """The pickle names something that no batch of CIFAR-10 needs."""


class _Array:
    """Stands in for numpy's array while unpickling: keeps what the file says of one, and runs nothing of numpy's."""

    shape: tuple[int, ...] = ()
    order: Any = "C"
    values: bytes = b""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns_first, values = state
        if not isinstance(kind, _Kind) or not isinstance(values, bytes) or not all(type(n) is int for n in shape):
            raise _RefusedError("an array of something else than bytes")
        self.shape, self.order, self.values = tuple(shape), "F" if columns_first else "C", values


class _Kind:
    """Stands in for numpy's dtype, which can only be that of unsigned bytes here."""

    def __init__(self, name: Any, *_: Any) -> None:
        if name not in (b"u1", "u1"):
            raise _RefusedError(f"an array of {name!r}")

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment, of which single bytes have none."""


def _empty_array(*_: Any) -> _Array:
    return _Array()


def _whole_array(values: Any, kind: Any, shape: Any, order: Any) -> _Array:
    found = _Array()
    found.__setstate__((1, shape, kind, order == "F", bytes(values)))
    return found


class _Plain(pickle.Unpickler):
    """A pickle can name any function of Python to be called. This unpickler knows the names below, and gives its own
    stand-ins for them; everything else that a batch holds (dictionary, list, int, bytes) needs no name."""

    known = {  # noqa: RUF012 - never changed
        ("numpy.core.multiarray", "_reconstruct"): _empty_array,
        ("numpy._core.multiarray", "_reconstruct"): _empty_array,  # its name since numpy 2
        ("numpy._core.numeric", "_frombuffer"): _whole_array,  # with protocol 5, the default since Python 3.14
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Kind,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.known[module, name]
        except KeyError:
            raise _RefusedError(f"{module}.{name}") from None
