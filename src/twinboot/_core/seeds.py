"""Random numbers: one seed for a run, an independent seed for each use of it, and blocks for what draws globally.

Every random number of this package comes from a generator with the seed `derive(seed, purpose, count)`. These draws
neither read nor change a global generator. To resume, a run needs its counters alone, and no state of a generator,
whatever the device or the number of workers.

Models and transforms draw from the global generators of torch, numpy and random. `own_randomness` and `seeded` are
blocks that seed these, and restore them at the end. All threads share them, so only one thread at a time is in such a
block, and the others wait. Each thread then draws the same numbers as it would alone. For models that draw nothing,
`may_draw` is False and the seeds, a tenth of a step of a small network, are left out.
"""

from __future__ import annotations

import operator
import os
import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import nn

from .checks import shown

BITS = 1024  # the most of a seed: `derive` prints its parts, and Python does not print integers of thousands of digits


def derive(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on their order.

    >>> derive(0, "noise", 1) == derive(0, "noise", 1)
    True
    >>> derive(0, "noise", 1) == derive(0, "noise", 2)
    False
    """
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def require_seed(seed: SupportsIndex) -> int:
    """The seed as an int. Refuses what is not an integer, or too long."""
    try:
        found = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an integer, not {shown(seed)}.") from None
    if found.bit_length() > BITS:
        raise ValueError(f"seed must be an integer of at most {BITS} bits, not one of {found.bit_length()}.")
    return found


_lock = threading.RLock()


def _renew() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # a thread that does not exist in the forked process may hold the lock
    os.register_at_fork(after_in_child=_renew)


def alone() -> AbstractContextManager[bool]:
    """A block that no other thread enters at the same time, nor one of the blocks below."""
    return _lock


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generators of torch, numpy and random for a block."""
    with alone():
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - transforms use it
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])  # noqa: NPY002


# PyTorch's own layers that draw nothing, in training neither. No subclasses: they may do something else.
_DRAW_NOTHING = {
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten, nn.Embedding, nn.Linear),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def may_draw(model: nn.Module) -> bool:
    """Whether a model might draw random numbers when it runs: False only if it is made of layers that draw none."""
    return any(
        type(m) not in _DRAW_NOTHING or "forward" in vars(m) or any(getattr(m, hooks) for hooks in _HOOKS)
        for m in model.modules()
    )


@contextmanager
def own_randomness(device: torch.device, *purpose: int | str) -> Iterator[None]:
    """Seed all that a model draws by itself, such as dropout, on any device. The seed depends on the purpose alone."""
    seed = derive("model", *purpose)
    with seeded(seed):
        module: Any = getattr(torch, device.type, None)
        if not hasattr(module, "set_rng_state"):  # as for the CPU, which is seeded already
            yield
            return
        with torch.random.fork_rng([device], device_type=device.type):
            # Not manual_seed, which seeds the current device.
            module.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), device)
            yield
