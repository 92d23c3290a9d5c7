"""Large tensors in pieces: no entry is missing, and draws do not depend on how the tensor is stored."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import mlp, seeded, snapshot

from twinboot import Twins
from twinboot._core import tensors
from twinboot.resets import MODES

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=3)


@given(shape=SHAPES, most=st.integers(1, 40))
def test_pieces_are_views_of_rows_and_small_enough(shape: list[int], most: int) -> None:
    t = torch.arange(math.prod(shape)).view(shape)
    with mock.patch.object(tensors, "AT_ONCE", most):
        found = tensors.split(t)
    assert torch.equal(torch.cat(list(found)) if t.ndim else found[0], t)
    assert all(piece.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for piece in found)
    row = math.prod(shape[1:])
    assert all(piece.numel() <= max(most, row) for piece in found)
    assert len(found) == 1 or t.numel() > most


@given(shape=SHAPES, most=st.integers(1, 40))
def test_copies_are_filled_with_the_draws_of_their_pieces(shape: list[int], most: int) -> None:
    generator, other = seeded(1), seeded(1)
    whole = torch.zeros(2, *shape)
    with mock.patch.object(tensors, "AT_ONCE", most):
        tensors.fill_copies_by_piece_(whole, lambda t: [t.normal_(generator=generator)].clear())
        drawn = [torch.empty(2, *piece.shape).normal_(generator=other) for piece in tensors.split(whole[0])]
    assert torch.equal(whole, torch.cat(drawn, 1) if shape else drawn[0])


@pytest.mark.parametrize("groups", ["layer", "unit", "all"])
def test_sigma_and_resets_do_not_depend_on_the_pieces_but_for_rounding_and_draws(groups: str) -> None:
    found = []
    for most in (10, 2**20):
        with mock.patch.object(tensors, "AT_ONCE", most):
            twins = Twins(mlp(), groups=groups if groups != "all" else lambda name, p: "all")
            with torch.no_grad():
                for p in twins.parameters():
                    p.add_(torch.rand(p.shape, generator=seeded(p.numel())))
                for p in twins[1].parameters():
                    p.mul_(1.5)
            twins.update()
            sigma = twins.partition.sigma.clone()
            twins.reset("mean")
            found.append((sigma, snapshot(twins[0])))
            for mode in MODES:
                twins.reset(mode)
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)
