"""Exchange tensors among the ranks of a group.

They are sent as bytes: nothing is summed on the way, so all bits arrive as they were, in any dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, distributed

from .._core.tensors import AT_ONCE, in_order, overwrite_


def gather(flat: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """The flat tensor of each rank, as rows, in the order of the ranks."""
    rows = flat.new_empty(distributed.get_world_size(group), len(flat))
    distributed.all_gather(list(rows.view(torch.uint8)), flat.view(torch.uint8), group=group)
    return rows


def gather_each(tensors: Iterable[Tensor], group: distributed.ProcessGroup) -> Iterator[list[Tensor]]:
    """For each tensor the tensors of all ranks, in order of rank. This rank's is the tensor itself.

    At most one bucket of each rank is in memory, or its largest tensor.
    """
    rank = distributed.get_rank(group)
    for bucket in _buckets(tensors):
        flat = [in_order(t.detach()).reshape(-1) for t in bucket]
        rows = gather(flat[0] if len(flat) == 1 else torch.cat(flat), group)  # no copy of a large tensor
        received = [row.split([t.numel() for t in bucket]) for row in rows]
        for i, t in enumerate(bucket):
            yield [t if r == rank else _shaped(parts[i], t) for r, parts in enumerate(received)]


def copy_first_(t: Tensor, group: distributed.ProcessGroup) -> None:
    """Overwrite the tensor by that of the group's first rank."""
    ordered = in_order(t.detach())
    flat = ordered.reshape(-1).clone()
    distributed.broadcast(flat.view(torch.uint8), group=group, group_src=0)
    overwrite_(ordered, flat.view(ordered.shape))


def same_everywhere(number: int, groups: Sequence[distributed.ProcessGroup], device: torch.device) -> bool:
    """Whether all ranks have the same number. `groups`: one for each dimension of the mesh. All ranks get the same
    answer, so that they can stop together."""
    span = torch.tensor([number, -number], device=device)
    for group in groups:
        span = gather(span, group).amax(0)
    return bool(span.sum() == 0)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype and device, up to a size: each message costs about 0.1 ms, however small."""
    bucket: list[Tensor] = []
    for t in tensors:
        is_full = sum(b.numel() for b in bucket) + t.numel() > AT_ONCE
        if bucket and (is_full or bucket[0].dtype != t.dtype or bucket[0].device != t.device):
            yield bucket
            bucket = []
        bucket.append(t)
    if bucket:
        yield bucket


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """The received entries, in the shape and memory order of `like`. A sum over them then has the same bits."""
    if not in_order(like).is_contiguous():
        return flat.view(like.shape)
    return flat.as_strided(like.shape, like.stride())
