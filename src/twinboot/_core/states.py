"""Plain data in a state dict, as a tensor of bytes, so that no pickle is needed; and how to compare it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def pack(data: Mapping[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)


def unpack(packed: Tensor) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(bytes(packed.tolist()))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise ValueError("the checkpoint is damaged: its description is not valid text.") from None
    return data


def require_same(then: Mapping[str, Any], here: Mapping[str, Any], advice: str) -> None:
    """Refuse a checkpoint whose description differs from the current one. The message names the first difference."""
    for key in here:
        if key not in then:
            raise ValueError(f"the checkpoint does not fit: it says nothing of {key!r}; {advice}.")
        old, new = then[key], here[key]
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                entry = next(k for k in [*new, *old] if old.get(k) != new.get(k))
                key, old, new = f"{entry!r} of the {key}", old.get(entry, "missing"), new.get(entry, "missing")
            raise ValueError(f"the checkpoint does not fit: {key} was {old} and is {new} here; {advice}.")
