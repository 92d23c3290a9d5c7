"""A small problem for the methods that are compared: three kinds of images, and a network of a few units."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from twinboot.experiments import networks
from twinboot.experiments.images.methods import find
from twinboot.experiments.images.single import Problem, Trained


def patterns(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of three bright corners with noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=generator)
    x = 0.7 * torch.randn(n, 1, 8, 8, generator=generator)
    for label, corner in enumerate([(0, 0), (0, 4), (4, 0)]):
        x[y == label, :, corner[0] : corner[0] + 4, corner[1] : corner[1] + 4] += 1
    return x, y


def network(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    return networks.small(3, 1, 0.125, "batch", dropout, seed)


PROBLEM = Problem(*patterns(150, 0), network, epochs=6, batch=16, lr=0.005, samples=4, seed=0)


def trained(method: str, scratch: Path, problem: Problem = PROBLEM, ticks: list[int] | None = None) -> Trained:
    if method == "ivon":
        pytest.importorskip("ivon", reason="the extra compare is not installed")
    scratch.mkdir(exist_ok=True)
    return find(method).train(problem, scratch, lambda: ticks.append(1) if ticks is not None else None)
