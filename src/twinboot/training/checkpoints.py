"""The state of a training run on disk: written completely or not at all, and read without unpickling.

A file is what `torch.save` writes, a zip archive, whose comment holds a digest of all bytes before it. `torch.load`
reads it like any other. `read` checks the digest first, so a damaged file is never taken for another state.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from .._core.atomic import replacing, sync
from .._core.checks import one_line

FORMAT = 3
NOT_PLAIN = (
    "the state of the optimizer or the scheduler cannot be read back without unpickling ({}): use plain numbers and "
    "functions in them."
)

FULL = 2**20  # bytes: a disk with fewer left is full


class DamagedError(ValueError):
    """A checkpoint that is damaged."""


class Checkpoints:
    """`DIRECTORY/epoch-N.pt` for the last epochs."""

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}.")
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise ValueError(f"checkpoint must be the path of a directory, such as 'run', not {directory!r}.")
        self.directory, self.keep = Path(directory), keep
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise OSError(f"can't write checkpoints to {str(self.directory)!r}: {why}.") from None

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        """Write a state, then remove older ones."""
        write({"format": FORMAT, "epoch": epoch, **state}, self._path(epoch))
        for old in self._epochs()[: -self.keep]:
            self._path(old).unlink(missing_ok=True)

    def latest(self, device: torch.device) -> dict[str, Any] | None:
        """The newest state, or None. Files that a killed run left incomplete are removed."""
        for unfinished in self.directory.glob(".epoch-*.pt.*.partial"):
            unfinished.unlink(missing_ok=True)
        epochs = self._epochs()
        if not epochs:
            return None
        path = self._path(epochs[-1])
        try:
            state = read(path, device)
        except DamagedError:
            then = "goes on from the one before" if len(epochs) > 1 else "begins anew"
            raise DamagedError(
                f"{path} is damaged, or no checkpoint of this version of fit: delete it, and the run {then}."
            ) from None
        if not isinstance(state, dict) or state.get("format") != FORMAT or state.get("epoch") != epochs[-1]:
            raise ValueError(f"{path} is no checkpoint of this version of fit: use another directory.")
        return state

    def _path(self, epoch: int) -> Path:
        return self.directory / f"epoch-{epoch}.pt"

    def _epochs(self) -> list[int]:
        names = (re.fullmatch(r"epoch-(\d+)\.pt", path.name) for path in self.directory.iterdir())
        return sorted(int(name[1]) for name in names if name)


def write(state: dict[str, Any], path: Path) -> None:
    """Write a state with its digest. On an error the previous file stays."""
    try:
        with replacing(path) as partial:
            _write(_plain(state), partial)
            if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(partial):
                raise TypeError(NOT_PLAIN.format(unsafe[0]))
            _sign(partial)
            sync(partial)  # older files are removed after this, and power may fail
    except (AttributeError, pickle.PicklingError) as error:
        raise TypeError(NOT_PLAIN.format(error)) from None
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        if "inline_container" in reason:  # PyTorch's own writer says where in its source it stopped, and no more
            reason = "PyTorch could not write all of it"
        raise OSError(f"can't write {path}: {reason}; the checkpoint before it is unchanged.") from None


def read(path: Path, device: torch.device) -> Any:
    """Read what `write` wrote, with its tensors on a device; raises a DamagedError if the file has changed."""
    try:
        if not _signed(path):
            raise DamagedError(f"{path} is damaged, or no file of this version of twinboot: delete it.")
        return torch.load(path, map_location=device, weights_only=True)
    except (torch.OutOfMemoryError, MemoryError, DamagedError):
        raise
    except OSError as error:
        raise OSError(f"can't read {path}: {error.strerror}.") from None
    except Exception as error:  # PyTorch has many ways to refuse a file, or a device that is not there
        raise OSError(f"can't load {path}: {one_line(error)}.") from None


MARK = b"twinboot "
SIGNATURE = 2 + len(MARK) + 64  # bytes: the comment's length, the mark, the digest as hexadecimal digits


def _sign(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)  # the last field of a zip archive is the length of its comment: 0 so far
        end = file.tell()
        file.write((SIGNATURE - 2).to_bytes(2, "little") + MARK + _digest(path, end).encode())


def _signed(path: Path) -> bool:
    """Whether the file ends with the digest of what comes before."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END) - SIGNATURE
        file.seek(max(end, 0))
        signature = file.read()
    expected = (SIGNATURE - 2).to_bytes(2, "little") + MARK + _digest(path, end).encode()
    return signature == expected


def _digest(path: Path, end: int) -> str:
    """The digest of the bytes before `end`."""
    digest = blake2b(digest_size=32)
    with path.open("rb") as file:
        while (left := end - file.tell()) > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
    return digest.hexdigest()


def _write(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # how PyTorch's own writer reports a full disk, without saying so
        if shutil.disk_usage(path.parent).free < FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise


def _plain(state: Any) -> Any:
    """Convert numpy's numbers to Python's, which can be read without unpickling."""
    return tree_map(lambda leaf: leaf.item() if isinstance(leaf, np.generic) else leaf, state)
