"""Small files in the layouts of the official image data sets."""

import gzip
import struct
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]  # file, without ending -> images and labels
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def small_batches() -> Arrays:
    """What six small files of CIFAR-10 hold, of different lengths."""
    random = np.random.default_rng(0)
    return {
        name: (random.integers(0, 256, (n, 3, 32, 32), np.uint8), random.integers(0, 10, n, np.uint8))
        for n, name in enumerate(BATCHES, start=3)
    }


def write_binary(folder: Path, batches: Arrays) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (x, y) in batches.items():
        (folder / f"{name}.bin").write_bytes(np.concatenate([y[:, None], x.reshape(len(x), -1)], 1).tobytes())
    return folder


def write_idx(folder: Path, ending: str = "", train: int = 5, test: int = 4) -> tuple[Path, dict[str, bytes]]:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    contents = {}
    for name, n in [("train", train), ("t10k", test)]:
        x, y = random.integers(0, 256, (n, 28, 28), np.uint8), random.integers(0, 10, n, np.uint8)
        contents[f"{name}-images-idx3-ubyte"] = struct.pack(">4B3I", 0, 0, 8, 3, n, 28, 28) + x.tobytes()
        contents[f"{name}-labels-idx1-ubyte"] = struct.pack(">4BI", 0, 0, 8, 1, n) + y.tobytes()
    for file, data in contents.items():
        (folder / (file + ending)).write_bytes(gzip.compress(data) if ending else data)
    return folder, contents


def packed(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        for file in sorted(folder.iterdir(), reverse=True):  # in no useful order, as in the official ones
            tar.add(file, f"{folder.name}/{file.name}")
