"""The README's loop and small data for it, shared by the tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, PairedLoader, Twins

Loss = Callable[[Tensor, Tensor], Tensor]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(inputs: int = 4, hidden: int = 8, outputs: int = 3, seed: int = 0) -> nn.Sequential:
    """A small network with weights that depend on the seed alone."""
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
    generator = seeded(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5, generator=generator)
    return model


def classes(n: int = 40, inputs: int = 4, outputs: int = 3, seed: int = 1) -> TensorDataset:
    x = torch.randn(n, inputs, generator=seeded(seed))
    return TensorDataset(x, torch.randint(outputs, (n,), generator=seeded(seed + 1)))


def pairs(n: int = 40, batch_size: int = 10, replicas: int = 2, **options: Any) -> PairedLoader:
    return PairedLoader(classes(n), Bootstrap(n, replicas), batch_size, **options)


def train(twins: Twins, batches: Iterable[Any], optimizer: torch.optim.Optimizer, loss: Loss = F.cross_entropy) -> None:
    """One pass of the README's loop, without resets."""
    for pair in batches:
        with twins.sampled():
            sum(loss(twin(x), y) for twin, (x, y) in zip(twins, pair, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(module.state_dict())


def assert_same_bits(first: Any, second: Any) -> None:
    """Equal to the last bit, NaN and signed zeros included, in nested containers too."""
    if isinstance(first, Tensor):
        assert first.dtype == second.dtype
        assert first.shape == second.shape
        assert torch.equal(
            first.detach().contiguous().flatten().view(torch.uint8),
            second.detach().contiguous().flatten().view(torch.uint8),
        )
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same_bits(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_same_bits(a, b)
    else:
        assert first == second
