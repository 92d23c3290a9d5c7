from typing import Any

import pytest
import torch
from loops import assert_same_bits, seeded
from torch import Tensor

from twinboot.inverse.operators import Dense, divisible, together

MATRIX = torch.randn(9, 6, generator=seeded(0))
FIELD = torch.randn(2, 3, generator=seeded(1))


@pytest.mark.parametrize("function", [None, torch.tanh, lambda v: v.T.exp()])
def test_a_dense_operator_is_a_matrix_after_a_function_of_the_cells(function: Any) -> None:
    values = FIELD if function is None else function(FIELD)
    torch.testing.assert_close(Dense(MATRIX, function)(FIELD), MATRIX @ values.flatten())


INDICES = [torch.tensor([4, 0, 4, 8]), slice(2, 7), slice(None, None, 3), torch.arange(9) % 2 == 0, torch.tensor([-1])]


@pytest.mark.parametrize("index", INDICES)
def test_rows_give_those_entries_of_the_whole(index: Tensor | slice) -> None:
    operator = Dense(MATRIX, torch.tanh)
    torch.testing.assert_close(operator.rows(index)(FIELD), operator(FIELD)[index])


def test_rows_of_rows_are_rows_and_leave_the_operator_as_it_was() -> None:
    operator = Dense(MATRIX, torch.tanh)
    before = operator(FIELD)
    some = operator.rows(torch.tensor([7, 2, 5, 1])).rows(slice(1, 3)).rows(torch.tensor([1, 0]))
    torch.testing.assert_close(some(FIELD), before[[5, 2]])
    assert_same_bits(operator(FIELD), before)
    assert divisible(some)


def test_rows_that_lie_together_share_the_memory_of_the_whole() -> None:
    operator = Dense(MATRIX)
    shared = operator.rows(slice(3, 6)).columns
    assert shared.untyped_storage().data_ptr() == operator.columns.untyped_storage().data_ptr()
    operator.columns.zero_()
    assert not operator.rows(slice(3, 6))(FIELD).any()
    assert not shared.any()


def test_gradients_reach_the_field_and_not_the_matrix() -> None:
    matrix, field = MATRIX.clone().requires_grad_(), FIELD.clone().requires_grad_()
    Dense(matrix, torch.tanh)(field).sum().backward()
    assert matrix.grad is None
    torch.testing.assert_close(field.grad, (MATRIX.sum(0).view(2, 3) * (1 - FIELD.tanh() ** 2)))


@pytest.mark.parametrize("matrix", [[[1.0]], torch.ones(3), torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.long)])
def test_what_is_no_matrix_of_real_numbers_is_refused(matrix: Any) -> None:
    with pytest.raises(TypeError, match=r"^matrix must be a tensor of floating-point numbers \[measurements, cells\]"):
        Dense(matrix)


@pytest.mark.parametrize("function", [None, lambda v: torch.cat([v, v])])
def test_a_field_of_another_size_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=r"^the matrix has 6 columns, but the field 1[04] cells\.$"):
        Dense(MATRIX, function)(torch.zeros(10 if function is None else 7))


def test_a_stack_of_fields_goes_through_the_operator_in_one_call() -> None:
    shapes = []

    def forward(v: Tensor) -> Tensor:
        shapes.append(v.shape)
        return MATRIX @ v.tanh().flatten()

    run = together(forward, FIELD, 3)
    fields = torch.randn(3, 2, 3, generator=seeded(2))
    shapes.clear()
    torch.testing.assert_close(run(fields), torch.stack([MATRIX @ f.tanh().flatten() for f in fields]))
    assert shapes == [FIELD.shape]


def branches(v: Tensor) -> Tensor:
    return MATRIX @ v.flatten() if v.sum() > 0 else MATRIX @ v.flatten() ** 2


def asks(v: Tensor) -> Tensor:
    return MATRIX @ v.flatten() * v.abs().max().item()


class Twice(torch.autograd.Function):
    """Doubles a tensor, but its rule for vmap is wrong."""

    generate_vmap_rule = False

    @staticmethod
    def forward(v: Tensor) -> Tensor:
        return 2 * v

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient

    @staticmethod
    def vmap(info: Any, dims: Any, v: Tensor) -> Any:
        return 3 * v, dims[0]


@pytest.mark.parametrize("forward", [branches, asks, lambda v: Twice.apply(v).flatten()])
def test_an_operator_that_vmap_refuses_or_gets_wrong_takes_the_fields_one_by_one(forward: Any) -> None:
    fields = torch.stack([FIELD, -FIELD]).requires_grad_()
    found = together(forward, FIELD, 2)(fields)
    torch.testing.assert_close(found, torch.stack([forward(FIELD), forward(-FIELD)]))
    first = FIELD.clone().requires_grad_()
    [own] = torch.autograd.grad(forward(first).sum(), first)
    torch.testing.assert_close(torch.autograd.grad(found[0].sum(), fields)[0], torch.stack([own, 0 * own]))


def test_one_by_one_the_fields_are_safe_from_an_operator_that_writes() -> None:
    def writes(v: Tensor) -> Tensor:
        assert v.sum().item() is not None
        return MATRIX @ v.clamp_(min=0).flatten()

    fields = torch.stack([FIELD, -FIELD])
    before = fields.clone()
    together(writes, FIELD, 2)(fields)
    assert_same_bits(fields, before)


def test_the_ends_of_a_pair_are_the_rows_of_each_field_alone() -> None:
    matrix = torch.randn(11, 6, generator=torch.Generator().manual_seed(1))
    fields = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(2))
    operator = Dense(matrix, torch.tanh)
    for length in (1, 7, 11):
        found = operator.ends(length)(fields)
        torch.testing.assert_close(found[0], operator.rows(slice(0, length))(fields[0]))
        torch.testing.assert_close(found[1], operator.rows(slice(11 - length, 11))(fields[1]))
    part = operator.rows(slice(2, 9))  # a view, whose rows are not next to each other in memory
    torch.testing.assert_close(part.ends(4)(fields)[1], operator.rows(slice(5, 9))(fields[1]))


def test_a_field_of_another_dtype_than_the_matrix_is_refused_in_one_sentence() -> None:
    with pytest.raises(TypeError, match=r"the matrix is torch.float64, but the field torch.float32: convert one"):
        Dense(torch.eye(3, dtype=torch.float64))(torch.zeros(3))
