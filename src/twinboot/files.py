"""One estimate in one safetensors file: no pickle, written whole or not at all.

The header names the format and its version and holds the group map; the tensors are `module.<key>` for each entry of
the mean model's state dict, `sigma`, and `labels.<parameter>` where a parameter's entries are split among sigmas.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .atomic import replacing

FORMAT = "twinboot.estimate"
VERSION = 1


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
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {os.fspath(path.parent)!r} to save the estimate in.")
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
    with replacing(path) as partial:
        save_file(kept, partial, metadata=header)


def read(
    path: str | os.PathLike[str],
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor], Tensor, dict[str, Any]]:
    """The state dict, the description of the groups, the labels, sigma and the calibration that `write` stored."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no estimate at {os.fspath(path)!r}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise ValueError(f"{os.fspath(path)!r} is a safetensors file, but holds no twinboot estimate.")
            if (version := header.get("version")) != str(VERSION):
                raise ValueError(f"{os.fspath(path)!r} has format version {version}; this twinboot reads {VERSION}.")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no mapping
            aliases, partition = json.loads(header["aliases"]), json.loads(header["partition"])
            calibration = json.loads(header["calibration"])
            sigma = tensors["sigma"]
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{os.fspath(path)!r} is damaged or no safetensors file ({error}): save the estimate again."
        ) from None
    state = {key.removeprefix("module."): t for key, t in tensors.items() if key.startswith("module.")}
    state.update({alias: state[key] for alias, key in aliases.items()})
    labels = {key.removeprefix("labels."): t for key, t in tensors.items() if key.startswith("labels.")}
    return state, partition, labels, sigma, calibration


def fit(state: Mapping[str, Tensor], module: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a state dict into a module, or say in one sentence what does not fit."""
    here = module.state_dict()
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
