"""One estimate in one safetensors file: no pickle, written whole or not at all.

The header has the format, its version, the groups and a digest of header and tensors: a damaged file is refused. The
tensors are `module.<key>` for each entry of the mean model's state dict, `sigma`, `labels.<parameter>` where the
entries of a parameter have several sigmas, `members.<name>` for what members have of their own, [members, ...], and
`scores` if there are some of calibration samples.
"""

from __future__ import annotations

import json
import math
import os
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
from .._core.checks import one_line, one_of, require_number
from .conformal import Scores
from .members import require_same_number
from .prediction import TASKS

FORMAT = "twinboot.estimate"
VERSION = 2
# How an estimate predicts. Early files have temperature and scale alone; without `df_per_weight`, intervals are normal.
SETTINGS = ("temperature", "scale", "centered", "dropout", "task", "df_per_weight", "scores")


def write(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    description: Mapping[str, Any],
    labels: Mapping[str, Tensor],
    sigma: Tensor,
    settings: Mapping[str, Any],
    *,
    members: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a module's state dict and what belongs to it. A kill at any moment leaves the old file or the new one."""
    path = Path(path)
    if not path.name or "\0" in path.name:
        raise ValueError(f"path must name a file, such as 'estimate.safetensors', not {os.fspath(path)!r}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {os.fspath(path.parent)!r} to save the estimate in.")
    _require_valid(description, labels, sigma, settings)
    aliases = _aliases(state)
    tensors = {f"module.{k}": v.detach().cpu().contiguous().clone() for k, v in state.items() if k not in aliases}
    tensors["sigma"] = sigma.cpu().clone()
    tensors |= {f"labels.{name}": t.cpu().clone() for name, t in labels.items()}
    tensors |= {f"members.{name}": t.cpu().contiguous().clone() for name, t in (members or {}).items()}
    scores: Scores | None = settings.get("scores")
    if scores is not None:
        tensors["scores"] = scores.values.cpu().clone()
        settings = {**settings, "scores": {"noise": scores.noise, "settings": dict(scores.settings)}}
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "partition": json.dumps(dict(description)),
        "aliases": json.dumps(aliases),
        "calibration": json.dumps(dict(settings)),
    }
    try:
        with replacing(path) as partial:
            # Not save_file: if killed, it leaves a temporary file of its own.
            partial.write_bytes(to_bytes(tensors, metadata={**header, "digest": _digest(header, tensors)}))
            sync(partial)
    except (OSError, SafetensorError) as error:
        raise OSError(f"can't write {os.fspath(path)!r}: {_reason(error)}; an old file is unchanged.") from None


def read(
    path: str | os.PathLike[str],
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor], Tensor, dict[str, Any], dict[str, Tensor]]:
    """What `write` stored: the state dict, the groups with their labels, sigma, the settings and the members."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no estimate at {os.fspath(path)!r}.")
    try:
        with open(path, "rb") as probe:  # safetensors reports an unreadable file as missing
            probe.read(1)
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise ValueError(f"{os.fspath(path)!r} is a safetensors file, but has no twinboot estimate.")
            if (version := header.get("version")) != str(VERSION):
                raise ValueError(f"{os.fspath(path)!r} has format version {version}; this twinboot reads {VERSION}.")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    except OSError as error:
        raise OSError(f"can't read {os.fspath(path)!r}: {_reason(error)}.") from None
    except SafetensorError as error:
        raise _damaged(path, f"no safetensors file: {one_line(error)}") from None
    if header.pop("digest", None) != _digest(header, tensors):
        raise _damaged(path, "its digest does not match its content")
    try:  # a matching digest does not mean that twinboot wrote the file
        aliases, partition, settings = (json.loads(header[key]) for key in ("aliases", "partition", "calibration"))
        sigma = tensors["sigma"]
        state, labels, members = (
            {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
            for prefix in ("module.", "labels.", "members.")
        )
        state |= {alias: state[key] for alias, key in aliases.items()}
        if settings.get("scores") is not None:
            settings["scores"] = Scores(tensors["scores"], **settings["scores"])
        _require_valid(partition, labels, sigma, settings)
        if members:
            require_same_number(members)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise _damaged(path, one_line(error)) from None
    return state, partition, labels, sigma, settings, members


def _damaged(path: str | os.PathLike[str], why: str) -> ValueError:
    return ValueError(f"{os.fspath(path)!r} is damaged ({why}): save the estimate again.")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or one_line(error)


def _digest(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = blake2b(json.dumps(dict(sorted(header.items()))).encode(), digest_size=32)
    for name, t in sorted(tensors.items()):
        digest.update(json.dumps([name, str(t.dtype), list(t.shape)]).encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _require_valid(
    description: Mapping[str, Any], labels: Mapping[str, Tensor], sigma: Tensor, settings: Mapping[str, Any]
) -> None:
    """Refuse values that no training gives: they would predict nonsense, or fail much later."""
    if not sigma.is_floating_point() or not bool((sigma >= 0).all()) or not bool(sigma.isfinite().all()):
        raise ValueError("sigma must be finite and at least 0.")
    groups, parameters, owners = (description[key] for key in ("groups", "parameters", "owners"))
    if sigma.shape != (sum(math.prod(shape) for shape in groups.values()),) or len(owners) != len(parameters):
        raise ValueError("sigma does not have one value for each group.")
    for (name, shape), owner in zip(parameters.items(), owners, strict=True):
        own = labels[name] if owner is None else torch.tensor(int(owner))
        inside = not own.is_floating_point() and own.numel() and 0 <= int(own.min()) <= int(own.max()) < len(sigma)
        if not inside or own.broadcast_to(shape).shape != torch.Size(shape):
            raise ValueError(f"the groups of parameter {name!r} do not fit sigma.")
    require_number("temperature", settings["temperature"], positive=True)
    require_number("scale", settings["scale"])
    if settings.get("task") not in (None, *TASKS):
        raise ValueError(f"the task must be {one_of(TASKS)} or None.")
    for name in ("dropout", "centered"):
        if not isinstance(settings.get(name, False), bool):
            raise ValueError(f"{name} must be True or False.")
    if (df := settings.get("df_per_weight")) is not None:
        require_number("df_per_weight", df, positive=True)
    scores: Scores | None = settings.get("scores")
    if scores is None:
        return
    if scores.noise is not None:
        require_number("noise", scores.noise, positive=True)
    values = scores.values
    if not values.ndim or not values.is_floating_point() or not bool((values.isfinite() & (values >= 0)).all()):
        raise ValueError("the scores of calibration samples must be finite and at least 0.")
    if not len(values) or not bool((values.diff(dim=0) >= 0).all()) or not isinstance(scores.settings, Mapping):
        raise ValueError("the scores of calibration samples must be in ascending order, and say how they were found.")


def load_state(module: torch.nn.Module, state: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Load a state dict into a module, or say in one sentence what does not fit."""
    own = module.state_dict()
    if lazy := [name for name, t in own.items() if is_lazy(t)]:
        raise ValueError(f"parameter {lazy[0]!r} has no shape yet: run one batch through the lazy model first.")
    other = f"{os.fspath(path)!r} is of another model"
    for key in [*own, *state]:
        saved, here = (
            f"of shape {tuple(tensors[key].shape)}" if key in tensors else "missing" for tensors in (state, own)
        )
        if saved != here:
            raise ValueError(f"{other}: {key!r} is {saved} in the file and {here} in the model given.")
    saved_ties, own_ties = _aliases(state), _aliases(own)
    for key in {**own_ties, **saved_ties}:
        if own_ties.get(key) != saved_ties.get(key):
            where = "in the file, but not in the model" if key in saved_ties else "in the model, but not in the file"
            raise ValueError(f"{other}: {key!r} is tied to another weight {where}.")
    module.load_state_dict(dict(state))


def _aliases(state: Mapping[str, Any]) -> dict[str, str]:
    """Tied weights: each later name -> the first name of the same tensor."""
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"only tensors can be saved, but {key!r} of the state dict is a {type(value).__name__}.")
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and first.setdefault(place, key) != key:
            aliases[key] = first[place]
    return aliases
