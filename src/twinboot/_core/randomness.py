"""What models and transforms draw from the global generators, by a seed; the generators stay as they are.

All threads share those generators, so one thread at a time has such a block, and the others wait for its end: what is
drawn in several threads is what each of them would draw alone.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from . import seeds

_lock = threading.RLock()


def _renew() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # a worker may be forked while another thread, which it does not have, is at work
    os.register_at_fork(after_in_child=_renew)


@contextmanager
def alone() -> Iterator[None]:
    """No other thread is in such a block, or in one of those below, at the same time."""
    with _lock:
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """On the CPU: whoever draws from the generators of torch, numpy or random in the block draws from this seed."""
    with alone():
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - what transforms use
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
    """On any device: what a model draws by itself, as dropout does, depends on the purpose alone, such as a step."""
    seed = seeds.derive("model", *purpose)
    with seeded(seed):
        module: Any = getattr(torch, device.type, None)
        if not hasattr(module, "set_rng_state"):  # neither has the CPU, which is seeded already
            yield
            return
        with torch.random.fork_rng([device], device_type=device.type):
            # Not manual_seed, which is for the current device, whichever that is.
            module.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), device)
            yield
