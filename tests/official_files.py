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


def write_python(folder: Path, batches: Arrays) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (x, y) in batches.items():
        (folder / name).write_bytes(pickled(x, [int(label) for label in y]))
    return folder


def pickled(x: NDArray[np.uint8], labels: list[int], columns_first: bool = False) -> bytes:
    """A batch as Python 2 and the numpy of 2009 wrote the official ones: no other can write those today."""

    def short(text: str) -> bytes:
        return b"U" + bytes([len(text)]) + text.encode()

    def number(n: int) -> bytes:
        return b"J" + struct.pack("<i", n)

    shape = (len(x), x[0].size)
    raw = np.asarray(x.reshape(shape), order="F" if columns_first else "C").tobytes("A")
    kind = b"cnumpy\ndtype\n" + short("u1") + b"K\x00K\x01\x87R(K\x03" + short("|")
    kind += b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short("b") + b"\x87R(K\x01"
    array += number(shape[0]) + number(shape[1]) + b"\x86" + kind + (b"\x88" if columns_first else b"\x89")
    array += b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    names = b"](" + short("leptodactylus_pentadactylus_s_000004.png") + b"e"
    parts = short("batch_label") + short("training batch 1 of 5") + short("labels") + listed
    return b"\x80\x02}(" + parts + short("data") + array + short("filenames") + names + b"u."


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
