"""What models and transforms draw from the global generators, by a seed; the generators stay as they are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from . import seeds


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """On the CPU: whoever draws from the generators of torch, numpy or random in the block draws from this seed."""
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
    """On a device too: what a model draws by itself, as dropout does, depends on the purpose alone, such as a step."""
    seed = seeds.derive("model", *purpose)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), seeded(seed):
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield
