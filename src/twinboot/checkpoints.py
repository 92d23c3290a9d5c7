"""The state of a training run on disk: written whole or not at all, the last few kept, and read without unpickling."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from .atomic import replacing

FORMAT = 1
NOT_PLAIN = (
    "the state of the optimizer or the scheduler holds what cannot be read back without unpickling ({}): use plain "
    "numbers and functions in them."
)

FULL = 2**20  # bytes: a disk with fewer left is full


class DamagedError(ValueError):
    """A checkpoint that cannot be read, in one sentence."""


class Checkpoints:
    """`DIRECTORY/epoch-N.pt` for the last `keep` epochs."""

    def __init__(self, directory: str | os.PathLike[str], keep: int) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}.")
        self.directory, self.keep = Path(directory), keep
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"can't write checkpoints to {self.directory}: {error.strerror}.") from None

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        """Write a state; older ones are removed only once it is there."""
        path = self._path(epoch)
        try:
            with replacing(path) as partial:
                _write(_plain({"format": FORMAT, "epoch": epoch, **state}), partial)
                if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(partial):
                    raise TypeError(NOT_PLAIN.format(unsafe[0]))
        except (AttributeError, pickle.PicklingError) as error:
            raise TypeError(NOT_PLAIN.format(error)) from None
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
            if "inline_container" in reason:  # PyTorch's own writer says where in its source it stopped, and no more
                reason = "PyTorch could not write all of it"
            raise OSError(f"can't write {path}: {reason}; the checkpoint before it is as it was.") from None
        for old in self._epochs()[: -self.keep]:
            self._path(old).unlink(missing_ok=True)

    def latest(self, device: torch.device) -> dict[str, Any] | None:
        """The newest state, or None if there is none yet. What a kill left half written is removed."""
        for unfinished in self.directory.glob(".epoch-*.pt.*.partial"):
            unfinished.unlink(missing_ok=True)
        epochs = self._epochs()
        if not epochs:
            return None
        path = self._path(epochs[-1])
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip() is not None
            state: dict[str, Any] = {} if damaged else torch.load(path, map_location=device, weights_only=True)
        except torch.OutOfMemoryError:
            raise
        except OSError as error:
            raise OSError(f"can't read {path}: {error.strerror}.") from None
        except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError):
            damaged = True
        if damaged:
            then = "goes on from the one before" if len(epochs) > 1 else "begins anew"
            raise DamagedError(f"{path} is damaged: delete it, and the run {then}.")
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError(f"{path} is no checkpoint of this version of fit.")
        return state

    def _path(self, epoch: int) -> Path:
        return self.directory / f"epoch-{epoch}.pt"

    def _epochs(self) -> list[int]:
        names = (re.fullmatch(r"epoch-(\d+)\.pt", path.name) for path in self.directory.iterdir())
        return sorted(int(name[1]) for name in names if name)


def _write(state: dict[str, Any], path: Path) -> None:
    """On the disk itself when it returns: older files are removed then, and power may fail."""
    try:
        torch.save(state, path)
    except RuntimeError as error:  # how PyTorch's own writer reports a full disk, without saying so
        if shutil.disk_usage(path.parent).free < FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    with path.open("r+b") as file:  # Windows syncs only what may be written
        os.fsync(file.fileno())


def _plain(state: Any) -> Any:
    """Numbers of numpy as those of Python, which any reader knows."""
    return tree_map(lambda leaf: leaf.item() if isinstance(leaf, np.generic) else leaf, state)
