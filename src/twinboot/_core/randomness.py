"""Blocks that seed the global generators, from which models and transforms draw, and restore them at the end.

All threads share those generators, so only one thread at a time is in such a block, and the others wait. Each thread
then draws the same numbers as it would alone.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from . import seeds

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


@contextmanager
def own_randomness(device: torch.device, *purpose: int | str) -> Iterator[None]:
    """Seed all that a model draws by itself, such as dropout, on any device. The seed depends on the purpose alone."""
    seed = seeds.derive("model", *purpose)
    with seeded(seed):
        module: Any = getattr(torch, device.type, None)
        if not hasattr(module, "set_rng_state"):  # as for the CPU, which is seeded already
            yield
            return
        with torch.random.fork_rng([device], device_type=device.type):
            # Not manual_seed, which seeds the current device.
            module.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), device)
            yield
