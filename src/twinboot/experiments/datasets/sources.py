"""Where the image data sets come from: their files, the checksums by which these are known, and a download of them."""

from __future__ import annotations

import hashlib
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..._core.atomic import replacing

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, and of how many where the server says so
CHUNK = 1 << 20
PATIENCE = 30.0  # seconds without a byte


@dataclass(frozen=True)
class Layout:
    """One way in which a data set is kept: these files in one of these folders, or in an archive."""

    files: dict[str, str]  # name -> MD5 of what is in it, unpacked
    folders: tuple[str, ...]
    archive: str = ""
    size: int | None = None  # of each file, where all have the same


@dataclass(frozen=True)
class Fetched:
    """A file as it is served: where it goes, its MD5, and who has it, to be asked in turn."""

    path: str
    md5: str
    urls: tuple[str, ...]


CIFAR_BINARY = Layout(
    {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    ("cifar-10-batches-bin", "."),
    "cifar-10-binary.tar.gz",
    size=10_000 * 3073,
)
CIFAR_PYTHON = Layout(
    {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    ("cifar-10-batches-py", "."),
    "cifar-10-python.tar.gz",
)
MNIST = Layout(
    {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    ("MNIST/raw", "."),
)
FASHION = Layout(
    {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    ("FashionMNIST/raw", "."),
)
LAYOUTS = {"cifar10": (CIFAR_BINARY, CIFAR_PYTHON), "mnist": (MNIST,), "fashion-mnist": (FASHION,)}
PAGES = {
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar.html",
    "mnist": "http://yann.lecun.com/exdb/mnist/",
    "fashion-mnist": "https://github.com/zalandoresearch/fashion-mnist",
}
_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_LECUN = "http://yann.lecun.com/exdb/mnist/"
_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"  # PyTorch's: the author's page often refuses
_ZALANDO = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
DOWNLOADS = {
    "cifar10": [
        Fetched(
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            (_TORONTO + "cifar-10-binary.tar.gz",),
        ),
    ],
    "mnist": [
        Fetched(f"MNIST/raw/{name}", md5, (_MIRROR + name, _LECUN + name))
        for name, md5 in [
            ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ]
    ],
    "fashion-mnist": [
        Fetched(f"FashionMNIST/raw/{name}", md5, (_ZALANDO + name,))
        for name, md5 in [
            ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ]
    ],
}


def wanted(name: str) -> str:
    """The files of a data set that a directory may hold, for people who have to get them."""
    archives = [layout.archive for layout in LAYOUTS[name] if layout.archive]
    files = list(LAYOUTS[name][0].files)
    if not archives:
        return ", ".join(f"{file}.gz" for file in files)
    return f"{' or '.join(archives)}, as it is or unpacked ({files[0]} ... {files[-1]})"


def download(name: str, directory: Path | str, progress: Progress | None = None) -> None:
    """Fetch the official files of a data set into a directory, in the layout that `load` finds. `progress` is told how
    far each is; by default a line on standard error says so.

    Files that are there and right are left alone, so that a broken download goes on with the file that it broke in;
    each appears under its name only when its checksum is right.
    """
    if name not in DOWNLOADS:
        raise ValueError(f"there is nothing to download for {name!r}: use {', '.join(DOWNLOADS)}.")
    for file in DOWNLOADS[name]:
        path = Path(directory) / file.path
        if path.is_file() and _md5(path) == file.md5:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        _fetch(file, path, progress or _show)


def _show(name: str, done: int, total: int | None) -> None:
    """In place on a terminal, and elsewhere once a file is whole."""
    ends = done == total
    if sys.stderr.isatty() or ends:
        of = f" of {total / 2**20:.0f}" if total else ""
        start = "\r" if sys.stderr.isatty() else ""
        print(f"{start}{name}: {done / 2**20:.0f}{of} MiB", end="\n" if ends else "", file=sys.stderr, flush=True)


def _fetch(file: Fetched, path: Path, progress: Progress) -> None:
    problems = []
    for url in file.urls:
        digest = _digest()
        try:
            with replacing(path) as partial:
                with partial.open("wb") as out:
                    for chunk, done, total in _chunks(url):
                        out.write(chunk)
                        digest.update(chunk)
                        progress(path.name, done, total)
                if digest.hexdigest() != file.md5:
                    raise _FailedError("what came is not the official file, by its checksum")
        except _FailedError as error:
            problems.append(f"{url} ({error})")
        else:
            return
    raise ConnectionError(
        f"can't download {path.name} from {' or '.join(problems)}: fetch it by other means and put it at {path}."
    )


class _FailedError(Exception):
    """A server that did not give the file; an OSError of the local disk is another matter."""


def _chunks(url: str) -> Iterator[tuple[bytes, int, int | None]]:
    """The content behind an address, with the bytes so far and the bytes in all, where the server says so."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            length = response.headers.get("Content-Length")
            total, done = int(length) if length else None, 0
            while chunk := response.read(CHUNK):
                done += len(chunk)
                yield chunk, done, total
            if total is None:
                yield b"", done, done  # now it is known
    except urllib.error.HTTPError as error:
        error.close()
        raise _FailedError(f"HTTP {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise _FailedError(str(reason) or type(error).__name__) from None


def _digest() -> hashlib._Hash:
    return hashlib.md5(usedforsecurity=False)  # what the publishers give; it is there to find damage


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _digest).hexdigest()
