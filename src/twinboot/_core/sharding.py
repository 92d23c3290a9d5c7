"""Weights of which each process holds a part, as `torch.distributed.fsdp.fully_shard` leaves them.

All that Twin-Boot does to weights it does entry by entry, on the part that is here; only the sums behind each sigma
need the other processes. Noise for a reset is drawn for the whole tensor and cut, so that it does not depend on how
many processes there are.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, distributed, nn


def is_sharded(t: Tensor) -> bool:
    return hasattr(t, "to_local")  # a DTensor: to import its class takes a second, which most users would wait in vain


def local(t: Tensor) -> Tensor:
    """The part of a tensor that is here, in the memory of the tensor's own; of an ordinary one itself."""
    return t._local_tensor if is_sharded(t) else t  # type: ignore[attr-defined]


def whole(t: Tensor) -> Tensor:
    """The tensor with the parts of all processes, which must all ask for it."""
    return t.full_tensor() if is_sharded(t) else t  # type: ignore[attr-defined]


def window(t: Any) -> tuple[slice, ...]:
    """Where in the whole tensor the part lies that is here."""
    if not is_sharded(t):
        return tuple(slice(0, size) for size in t.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def cut(labels: Tensor, t: Tensor) -> Tensor:
    """Of labels that broadcast against a tensor those of the part that is here."""
    if not is_sharded(t):
        return labels
    windows = window(t)[t.ndim - labels.ndim :]
    return labels[tuple(w if size > 1 else slice(None) for w, size in zip(windows, labels.shape, strict=True))]


def holders(t: Any) -> tuple[distributed.ProcessGroup, ...]:
    """The groups of processes, one for each dimension of the mesh, between which a tensor is split."""
    if not is_sharded(t):
        return ()
    return tuple(t.device_mesh.get_group(d) for d, placement in enumerate(t.placements) if placement.is_shard())


def summed(total: Tensor, groups: tuple[distributed.ProcessGroup, ...]) -> Tensor:
    """The sum of what each process found in its part, the same on all of them."""
    for group in groups:
        distributed.all_reduce(total, group=group)
    return total


def reshard(module: nn.Module) -> None:
    """Let go of whole weights that a forward pass may have left: they would not follow what is done to the parts."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported, so not used either
    if fsdp and distributed.is_initialized():
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()


def refuse_copy(module: nn.Module) -> None:
    if any(map(is_sharded, module.parameters())):
        raise RuntimeError(
            "twins that are sharded cannot be copied: call estimate(model) with any instance of the model's class, on "
            "all ranks, and each gets the whole estimate in a copy of it."
        )
