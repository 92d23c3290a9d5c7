"""Devices, and batches on the device of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def usable(device: str | torch.device) -> torch.device:
    """The device of that name, after a try whether it is there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"the device {str(device)!r} can't be used: {why}.") from None
    return torch.device(device)


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with all of its tensors on a device, however deep they lie in tuples, lists and mappings."""
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, batch)
