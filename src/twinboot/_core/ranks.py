"""Several processes: the rank of this one, as `torchrun` starts them, and weights of which each holds a part.

With `torch.distributed.fsdp.fully_shard` each process holds a shard of the weights. Twin-Boot changes weights entry by
entry, so each process works on its local part. Only the sums for sigma need the other processes. Noise for a reset is
drawn for the whole tensor and cut, so that it does not depend on the number of processes.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, distributed, nn


def rank_and_size() -> tuple[int, int]:
    """The rank of this process and the number of ranks: (0, 1) without `torch.distributed.init_process_group`."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def own() -> tuple[int, ...]:
    """Further parts of a seed that make it this rank's own. None on the first rank, which draws as one process does."""
    rank, _ = rank_and_size()
    return (rank,) if rank else ()


def mean(value: Tensor) -> Tensor:
    """The mean of a value over all ranks."""
    ranks, total = rank_and_size()[1], value.clone()
    if ranks > 1:
        distributed.all_reduce(total)
    return total / ranks


def agree(value: int) -> bool:
    """Whether all ranks have the same value."""
    found = [value] * rank_and_size()[1]
    if len(found) > 1:
        distributed.all_gather_object(found, value)
    return len(set(found)) == 1


def is_sharded(t: Tensor) -> bool:
    return hasattr(t, "to_local")  # a DTensor, whose class takes a second to import


def local(t: Tensor) -> Tensor:
    """The local part of a sharded tensor, not copied; an ordinary tensor itself."""
    return t._local_tensor if is_sharded(t) else t  # type: ignore[attr-defined]


def whole(t: Tensor) -> Tensor:
    """The tensor with the parts of all processes. All of them must call this."""
    return t.full_tensor() if is_sharded(t) else t  # type: ignore[attr-defined]


def window(t: Any) -> tuple[slice, ...]:
    """Where the local part lies in the whole tensor."""
    if not is_sharded(t):
        return tuple(slice(0, size) for size in t.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def cut(labels: Tensor, t: Tensor) -> Tensor:
    """The labels of the local part, of labels that broadcast against the whole tensor."""
    if not is_sharded(t):
        return labels
    windows = window(t)[t.ndim - labels.ndim :]
    return labels[tuple(w if size > 1 else slice(None) for w, size in zip(windows, labels.shape, strict=True))]


def holders(t: Any) -> tuple[distributed.ProcessGroup, ...]:
    """The process groups, one for each dimension of the mesh, among which a tensor is split."""
    if not is_sharded(t):
        return ()
    return tuple(t.device_mesh.get_group(d) for d, placement in enumerate(t.placements) if placement.is_shard())


def summed(total: Tensor, groups: tuple[distributed.ProcessGroup, ...]) -> Tensor:
    """The sum over the processes, the same on all of them."""
    for group in groups:
        distributed.all_reduce(total, group=group)
    return total


def reshard(module: nn.Module) -> None:
    """Free the whole weights that a forward pass may have left. They would not follow changes of the parts."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # None if it is not in use
    if fsdp and distributed.is_initialized():
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()


def refuse_copy(module: nn.Module) -> None:
    if any(map(is_sharded, module.parameters())):
        raise RuntimeError(
            "sharded twins cannot be copied: call estimate(model) on all ranks, with any instance of the model's "
            "class, and each gets the whole estimate in a copy of it."
        )
