"""Which one this process is of those that train together, as `torchrun` starts them."""

from __future__ import annotations

from torch import Tensor, distributed


def share() -> tuple[int, int]:
    """This process's rank, and how many there are: (0, 1) without `torch.distributed.init_process_group`."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def own() -> tuple[int, ...]:
    """What a seed needs besides, to be this rank's own. Nothing on the first, which draws what one process would."""
    rank, _ = share()
    return (rank,) if rank else ()


def mean(value: Tensor) -> Tensor:
    """The mean over all ranks of what each has."""
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
