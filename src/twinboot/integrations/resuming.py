"""What a run of twins in another library needs to go on, and how its files are read: damaged ones are refused."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from .. import resets
from .._core.checks import shown
from .._core.states import require_same
from ..data.loader import PairedLoader
from ..training import checkpoints
from ..training.checkpoints import DamagedError
from ..twins import Twins

TWINS = "twins.pt"
OPTIONS = "twin_options"  # the key of `options_of` in a checkpoint


def options_of(run: Any) -> dict[str, Any]:
    """The options of a TwinModule or a TwinTrainer that a run has in common with the one that it goes on from."""
    # The usual schedule of a TwinModule depends on the length of an epoch, which Lightning tells only later.
    due = "the usual one" if run.due is None else resets.described(run.due)
    return {"reset": due, "mode": run.mode, "noise": float(run.noise), "pooled": float(run.pooled)}


def require_same_options(checkpoint: dict[str, Any], run: Any) -> None:
    """Refuse to go on from a checkpoint of a run with other options, or from one that does not tell them."""
    require_same(checkpoint.get(OPTIONS, {}), options_of(run), "use the options of then")


# Hugging Face: a file beside those of the Trainer's own


def write_twins(folder: str, twins: Twins, loader: PairedLoader, run: Any) -> None:
    state = {"twins": without_frozen(twins), "loader": loader.state_dict(), OPTIONS: options_of(run)}
    checkpoints.write(state, Path(folder) / TWINS)


def read_twins(folder: str, twins: Twins, loader: PairedLoader, run: Any) -> None:
    if not (path := Path(folder) / TWINS).is_file():
        raise FileNotFoundError(
            f"{folder} has no {TWINS}, as a plain Trainer or save_only_model=True leaves it: twins cannot go "
            "on from it, but a new run can start with its model."
        )
    state = checkpoints.read(path, torch.device("cpu"))
    if not isinstance(state, dict) or not {"twins", "loader"} <= state.keys():
        raise ValueError(f"{path} was not written by a TwinTrainer: go on from another checkpoint.")
    require_same_options(state, run)
    loader.load_state_dict(state["loader"])  # which refuses another dataset, bootstrap or batch size
    twins.load_state_dict({**twins.state_dict(), **state["twins"]})


def without_frozen(twins: Twins) -> dict[str, Any]:
    """The state of twins without what they share with the model that they are of."""
    frozen = {name for name, p in twins.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: t for name, t in twins.state_dict().items() if name not in frozen}


# Lightning: a file of its own


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint that Lightning wrote, read without unpickling."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be that of a checkpoint, not {shown(path)}.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no checkpoint at {os.fspath(path)!r}.")
    require_undamaged(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # of a file that is whole
        raise ValueError(
            f"{os.fspath(path)!r} holds what is read by unpickling alone, such as hyperparameters of a class of your "
            "own: if you trust the file, allow that class with torch.serialization.add_safe_globals."
        ) from None
    except (RuntimeError, ValueError, KeyError, EOFError):
        raise _damaged(path) from None
    return state if isinstance(state, dict) else {}


def require_undamaged(path: str | os.PathLike[str]) -> None:
    """Refuse a file of `torch.save` that is not what it was. `torch.load` does not look at the checksums in it."""
    try:
        with Path(path).open("rb") as file:
            whole = _is_whole(file)
    except OSError as error:
        raise OSError(f"can't read {os.fspath(path)!r}: {error.strerror}.") from None
    if not whole:
        raise _damaged(path)


def _is_whole(file: IO[bytes]) -> bool:
    try:
        archive = zipfile.ZipFile(file)
        # PyTorch writes no attributes. With a certain one it would take a part for a folder, and read nothing of it.
        return archive.testzip() is None and not any(part.external_attr for part in archive.infolist())
    except Exception:  # zipfile refuses damaged files in many ways
        return False


def _damaged(path: str | os.PathLike[str]) -> DamagedError:
    return DamagedError(f"{os.fspath(path)!r} is damaged, or no checkpoint: use another one.")
