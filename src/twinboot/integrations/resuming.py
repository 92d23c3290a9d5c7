"""Checkpoints of the Lightning and Hugging Face integrations: what must match to resume a run, and safe reading."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from .. import PairedLoader, Protocol, Twins, resets
from .._core.checks import shown
from .._core.states import require_same
from ..training import checkpoints
from ..training.checkpoints import DamagedError

TWINS = "twins.pt"
OPTIONS = "twin_options"  # the key of `options_of` in a checkpoint


def options_of(run: Any) -> dict[str, Any]:
    """The options of a TwinModule or TwinTrainer that a resumed run must share with the original one."""
    # TwinModule's default schedule depends on the length of an epoch, which Lightning knows only later.
    protocol: Protocol = run.protocol
    reset = "the usual one" if protocol.reset is None else resets.described(protocol.reset)
    numbers = {"noise": float(protocol.noise), "pooled": float(protocol.pooled)}
    return {"reset": reset, "mode": protocol.mode, "local": protocol.local, **numbers}


def require_same_options(checkpoint: dict[str, Any], run: Any) -> None:
    then = {"local": False, **checkpoint.get(OPTIONS, {})}  # earlier versions had none
    require_same(then, options_of(run), "use the options of the original run")


# Hugging Face: twins.pt in the checkpoint folder of the Trainer


def write_twins(folder: str, twins: Twins, loader: PairedLoader, run: Any) -> None:
    # Without frozen parameters: these belong to the user's model.
    frozen = {name for name, p in twins.named_parameters(remove_duplicate=False) if not p.requires_grad}
    trained = {name: t for name, t in twins.state_dict().items() if name not in frozen}
    state = {"twins": trained, "loader": loader.state_dict(), OPTIONS: options_of(run)}
    checkpoints.write(state, Path(folder) / TWINS)


def read_twins(folder: str, twins: Twins, loader: PairedLoader, run: Any) -> None:
    if not (path := Path(folder) / TWINS).is_file():
        raise FileNotFoundError(
            f"{folder} has no {TWINS}, so it was written by a plain Trainer or with save_only_model=True: twins cannot "
            "resume from it, but you can start a new run from its model."
        )
    state = checkpoints.read(path, torch.device("cpu"))
    if not isinstance(state, dict) or not {"twins", "loader"} <= state.keys():
        raise ValueError(f"{path} was not written by a TwinTrainer: use another checkpoint.")
    require_same_options(state, run)
    loader.load_state_dict(state["loader"])  # refuses another dataset, bootstrap or batch size
    twins.load_state_dict({**twins.state_dict(), **state["twins"]})


# Lightning: one file


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a Lightning checkpoint without unpickling arbitrary objects."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the path of a checkpoint, not {shown(path)}.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no checkpoint at {os.fspath(path)!r}.")
    require_undamaged(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # the file is undamaged
        raise ValueError(
            f"{os.fspath(path)!r} contains pickled objects, such as hyperparameters of your own class: if you trust "
            "the file, allow the class with torch.serialization.add_safe_globals."
        ) from None
    except (RuntimeError, ValueError, KeyError, EOFError):
        raise _damaged(path) from None
    return state if isinstance(state, dict) else {}


def require_undamaged(path: str | os.PathLike[str]) -> None:
    """Check the checksums in a file of `torch.save`, which `torch.load` ignores."""
    try:
        with Path(path).open("rb") as file:
            intact = _is_intact(file)
    except OSError as error:
        raise OSError(f"can't read {os.fspath(path)!r}: {error.strerror}.") from None
    if not intact:
        raise _damaged(path)


def _is_intact(file: IO[bytes]) -> bool:
    try:
        archive = zipfile.ZipFile(file)
        # PyTorch writes no attributes. With some, it would take an entry for a folder and read it as empty.
        return archive.testzip() is None and not any(entry.external_attr for entry in archive.infolist())
    except Exception:  # zipfile refuses damaged files in many ways
        return False


def _damaged(path: str | os.PathLike[str]) -> DamagedError:
    return DamagedError(f"{os.fspath(path)!r} is damaged or not a checkpoint: use another one.")
