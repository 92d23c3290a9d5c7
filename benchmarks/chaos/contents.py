"""Estimates of any size, and what files and estimates hold, to be compared bit for bit."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twinboot import Estimate, Twins


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


@cache
def estimate(width: int, seed: int) -> Estimate:
    """Of a network of that width, with a sigma for each unit: a file of a size of one's choice."""
    torch.manual_seed(seed)
    twins = Twins(network(width), groups="unit")
    with torch.no_grad():
        next(twins.parameters()).add_(0.1)
    twins.update()
    return twins.estimate()


def files_in(folder: str | Path) -> dict[str, bytes]:
    places = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in places}


def half_written(folder: str | Path) -> list[str]:
    """Hidden files and folders, as which something is written before it takes its name."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob(".*"))


def digest(found: Any) -> str:
    """Of all values, bit for bit, and of their types."""
    state = hashlib.sha256()
    for part in _parts(found):
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def _parts(found: Any) -> Iterable[bytes]:
    yield type(found).__name__.encode()
    if isinstance(found, Tensor):
        yield f"{found.dtype} {tuple(found.shape)}".encode()
        yield found.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from (*_parts(key), *_parts(value))
    elif isinstance(found, (tuple, list)):
        for value in found:
            yield from _parts(value)
    elif isinstance(found, float):
        yield struct.pack("<d", found)
    else:
        yield repr(found).encode()


def told(estimate: Estimate) -> Any:
    """All that an estimate holds."""
    found = [getattr(estimate, name) for name in ("temperature", "scale", "dropout", "task")]
    return [dict(estimate.module.state_dict()), estimate.sigma, estimate.partition.describe(), found]
