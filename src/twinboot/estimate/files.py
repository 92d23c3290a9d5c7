"""One estimate in one safetensors file: no pickle, written whole or not at all.

The header names the format and its version and holds the group map; the tensors are `module.<key>` for each entry of
the mean model's state dict, `sigma`, and `labels.<parameter>` where a parameter's entries are split among sigmas. A
digest of the header and all tensors is in the header, too: a damaged file is refused, and never taken for another one.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.nn.parameter import is_lazy

from .._core.atomic import replacing, sync
from .._core.checks import one_of, require_number
from .prediction import TASKS

FORMAT = "twinboot.estimate"
VERSION = 2


def write(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    description: Mapping[str, Any],
    labels: Mapping[str, Tensor],
    sigma: Tensor,
    calibration: Mapping[str, Any],
) -> None:
    """Write a module's state dict and what belongs to it; a kill at any moment leaves the old file or the new one."""
    path = Path(path)
    if not path.name or "\0" in path.name:
        raise ValueError(
            f"an estimate needs the name of a file, such as 'estimate.safetensors', not {os.fspath(path)!r}."
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {os.fspath(path.parent)!r} to save the estimate in.")
    _require_valid(description, labels, sigma, calibration)
    aliases = _aliases(state)
    kept = {f"module.{k}": v.detach().cpu().contiguous().clone() for k, v in state.items() if k not in aliases}
    kept["sigma"] = sigma.cpu().clone()
    kept.update({f"labels.{name}": t.cpu().clone() for name, t in labels.items()})
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "partition": json.dumps(dict(description)),
        "aliases": json.dumps(aliases),
        "calibration": json.dumps(dict(calibration)),
    }
    try:
        with replacing(path) as partial:
            # Not save_file, whose own temporary file a kill would leave behind.
            partial.write_bytes(to_bytes(kept, metadata={**header, "digest": _digest(header, kept)}))
            sync(partial)
    except (OSError, SafetensorError) as error:
        raise OSError(f"can't write {os.fspath(path)!r}: {_reason(error)}; what was there is as it was.") from None


def read(
    path: str | os.PathLike[str],
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor], Tensor, dict[str, Any]]:
    """The state dict, the description of the groups, the labels, sigma and the calibration that `write` stored."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no estimate at {os.fspath(path)!r}.")
    try:
        with open(path, "rb") as probe:  # safetensors says of a file that may not be read that there is none
            probe.read(1)
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise ValueError(f"{os.fspath(path)!r} is a safetensors file, but holds no twinboot estimate.")
            if (version := header.get("version")) != str(VERSION):
                raise ValueError(f"{os.fspath(path)!r} has format version {version}; this twinboot reads {VERSION}.")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    except OSError as error:
        raise OSError(f"can't read {os.fspath(path)!r}: {_reason(error)}.") from None
    except SafetensorError as error:
        raise _damaged(path, f"no safetensors file: {error}") from None
    if header.pop("digest", None) != _digest(header, tensors):
        raise _damaged(path, "its digest is that of other content")
    try:  # with a right digest, but perhaps made by somebody else
        aliases, partition = json.loads(header["aliases"]), json.loads(header["partition"])
        calibration = json.loads(header["calibration"])
        sigma = tensors["sigma"]
        state = {key.removeprefix("module."): t for key, t in tensors.items() if key.startswith("module.")}
        state.update({alias: state[key] for alias, key in aliases.items()})
        labels = {key.removeprefix("labels."): t for key, t in tensors.items() if key.startswith("labels.")}
        _require_valid(partition, labels, sigma, calibration)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise _damaged(path, str(error).rstrip(".")) from None
    return state, partition, labels, sigma, calibration


def _damaged(path: str | os.PathLike[str], why: str) -> ValueError:
    return ValueError(f"{os.fspath(path)!r} is damaged ({' '.join(why.split())}): save the estimate again.")


def _reason(error: Exception) -> str:
    """What the system said. Of the library that writes it is at the end of a sentence: "... (os error 28)"."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])) if number else " ".join(str(error).split()).rstrip(".")


def _digest(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = blake2b(json.dumps(dict(sorted(header.items()))).encode(), digest_size=32)
    for name, t in sorted(tensors.items()):
        digest.update(json.dumps([name, str(t.dtype), list(t.shape)]).encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _require_valid(
    description: Mapping[str, Any], labels: Mapping[str, Tensor], sigma: Tensor, calibration: Mapping[str, Any]
) -> None:
    """Refuse what no training leaves: it would predict nonsense, or fail much later."""
    if not sigma.is_floating_point() or not bool((sigma >= 0).all()) or not bool(sigma.isfinite().all()):
        raise ValueError("sigma has values that are not finite or below 0: there is nothing to predict with.")
    groups, parameters, owners = (description[key] for key in ("groups", "parameters", "owners"))
    if sigma.shape != (sum(math.prod(shape) for shape in groups.values()),) or len(owners) != len(parameters):
        raise ValueError("sigma and the groups do not fit together.")
    for (name, shape), owner in zip(parameters.items(), owners, strict=True):
        own = labels[name] if owner is None else torch.tensor(int(owner))
        inside = not own.is_floating_point() and own.numel() and 0 <= int(own.min()) <= int(own.max()) < len(sigma)
        if not inside or own.broadcast_to(shape).shape != torch.Size(shape):
            raise ValueError(f"the groups of parameter {name!r} are not among those of sigma.")
    require_number("temperature", calibration["temperature"], positive=True)
    require_number("scale", calibration["scale"])
    if calibration.get("task") not in (None, *TASKS) or not isinstance(calibration.get("dropout", False), bool):
        raise ValueError(f"the task must be {one_of(TASKS)} or None, and dropout True or False.")


def fit(state: Mapping[str, Tensor], module: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a state dict into a module, or say in one sentence what does not fit."""
    here = module.state_dict()
    if lazy := [name for name, t in here.items() if is_lazy(t)]:
        raise ValueError(f"parameter {lazy[0]!r} has no shape yet: run one batch through the lazy model first.")
    for key in [*here, *state]:
        saved, wanted = state.get(key), here.get(key)
        if saved is None or wanted is None or saved.shape != wanted.shape:
            raise ValueError(
                f"{os.fspath(path)!r} is of another model: {key!r} is {_shape(saved)} in the file and "
                f"{_shape(wanted)} in the model given."
            )
    tied_here, tied_then = _aliases(here), _aliases(state)
    for key in {**tied_here, **tied_then}:
        if tied_here.get(key) != tied_then.get(key):
            where = (
                "in the file, but not in the model given" if key in tied_then else "in the model, but not in the file"
            )
            raise ValueError(f"{os.fspath(path)!r} is of another model: {key!r} is tied to another weight {where}.")
    module.load_state_dict(dict(state))


def _shape(t: Tensor | None) -> str:
    return "missing" if t is None else f"of shape {tuple(t.shape)}"


def _aliases(state: Mapping[str, Any]) -> dict[str, str]:
    """Tied weights: each further name -> the first name of the same tensor."""
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"the model's state holds {key!r} of type {kind}; only tensors can be saved.")
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and first.setdefault(place, key) != key:
            aliases[key] = first[place]
    return aliases
