from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from twinboot import Estimate, Twins
from twinboot._core.copies import Places, replicate
from twinboot._core.tensors import mean


class Quantized(nn.Parameter):
    """A parameter that is more than its data."""


def test_copies_have_trainable_weights_of_their_own_and_one_set_of_frozen_ones() -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    model[0].bias = Quantized(torch.zeros(2), requires_grad=False)
    first, second = replicate(model, 2)
    assert first[0].weight is second[0].weight
    assert first[0].weight is not model[0].weight
    assert first[0].weight.data_ptr() == model[0].weight.data_ptr()
    assert first[0].bias is model[0].bias
    assert len({m[1].weight.data_ptr() for m in (first, second, model)}) == 3
    [alone] = replicate(model, copy_frozen=True)
    assert alone[0].weight.data_ptr() != model[0].weight.data_ptr()


def test_places_follow_parameters_that_are_replaced() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    places = Places(model, ["0.weight"])
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
    assert places.read()[0] is model[0].weight


def test_the_mean_of_equal_tensors_is_exactly_their_value() -> None:
    t = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mean([t] * 3), t)
    half = [torch.tensor([1.0], dtype=torch.float16), torch.tensor([1.0009765625], dtype=torch.float16)]
    assert mean(half).item() == 1.00048828125  # between two neighbours of half precision


class Masked(nn.Linear):
    """An expanded buffer, whose entries share their memory, and a sparse one."""

    def __init__(self, value: float) -> None:
        super().__init__(3, 1)
        self.register_buffer("mask", torch.full((2, 1, 3), value).expand(2, 4, 3))
        self.register_buffer("links", torch.eye(2).to_sparse(), persistent=False)


@pytest.mark.parametrize("stacked", [False, True])
def test_buffers_that_were_expanded_can_be_loaded_into_copies(stacked: bool, tmp_path: Path) -> None:
    saved, twins = (Twins(Masked(value), stacked=stacked) for value in (2.0, 1.0))
    twins.load_state_dict(saved.state_dict())
    saved.estimate().save(tmp_path / "estimate")
    for estimate in (twins.estimate(), Estimate.load(tmp_path / "estimate", Masked(1.0))):
        assert torch.equal(estimate.module.get_buffer("mask"), torch.full((2, 4, 3), 2.0))
        assert estimate.module.get_buffer("links").is_sparse


def test_only_expanded_buffers_get_new_memory() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.zeros(1, 3).expand(2, 3))
    model.register_buffer("image", torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last))
    first, second = replicate(model, 2)
    assert first.mask.is_contiguous()
    assert first.mask.data_ptr() != second.mask.data_ptr()
    assert first.image.stride() == model.image.stride()
    assert model.mask.stride() == (0, 1)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x)


def test_a_twin_that_was_wrapped_in_place_is_the_one_that_runs() -> None:
    """As activation checkpointing and quantization do."""
    twins = Twins(nn.Linear(2, 1))
    for number, twin in enumerate(twins):
        twins.copies[number] = Wrapped(twin)
    with twins.sampled():
        sum(y.sum() for y in twins(torch.ones(3, 2), torch.ones(3, 2))).backward()
    assert [twin.calls for twin in twins] == [1, 1]
    assert twins[1].calls == 1
    assert isinstance(twins[:1], nn.ModuleList)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_number_of_numpy_is_a_number_of_twins(stacked: bool) -> None:
    twins = Twins(nn.Linear(2, 1), np.int64(3), stacked=stacked)  # type: ignore[arg-type]
    Twins(nn.Linear(2, 1), 3, stacked=stacked).load_state_dict(twins.state_dict())
