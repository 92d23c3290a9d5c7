"""This process among those that train together, as `torchrun` starts them."""

from __future__ import annotations

from torch import Tensor, distributed


def share() -> tuple[int, int]:
    """The rank of this process and the number of ranks: (0, 1) without `torch.distributed.init_process_group`."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def own() -> tuple[int, ...]:
    """Further parts of a seed that make it this rank's own. None on the first rank, which draws as one process does."""
    rank, _ = share()
    return (rank,) if rank else ()


def mean(value: Tensor) -> Tensor:
    """The mean of a value over all ranks."""
    ranks, total = share()[1], value.clone()
    if ranks > 1:
        distributed.all_reduce(total)
    return total / ranks


def agree(value: int) -> bool:
    """Whether all ranks have the same value."""
    found = [value] * share()[1]
    if len(found) > 1:
        distributed.all_gather_object(found, value)
    return len(set(found)) == 1
