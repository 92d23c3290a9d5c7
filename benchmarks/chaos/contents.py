"""What files and estimates hold, to be compared bit for bit."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinboot import Estimate


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
