"""Batches on the device of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with all of its tensors on a device, however deep they lie in tuples, lists and mappings."""
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, batch)
