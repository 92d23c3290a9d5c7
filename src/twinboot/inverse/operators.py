"""Forward operators: functions that map a field to measurements.

Any differentiable function of one tensor will do. If it also has a method `rows(index)`, which returns the operator of
those measurements alone, each twin computes only the measurements that it sees, and a step may use a batch of them.
`Dense` is such an operator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Protocol, Self, TypeGuard

import torch
from torch import Tensor
from torch.func import vmap

from .._core.checks import require_tensor, require_types, shown
from .._core.tensors import is_integer

Forward = Callable[[Tensor], Tensor]


class Divisible(Protocol):
    """An operator with a method `rows`: `rows(index)(field)` is `operator(field)[index]`."""

    def __call__(self, field: Tensor, /) -> Tensor: ...

    def rows(self, index: Tensor | slice, /) -> Divisible: ...


def divisible(forward: Forward) -> TypeGuard[Divisible]:
    """Whether an operator has a method `rows`, and not another attribute of that name."""
    return callable(getattr(forward, "rows", None))


class Dense:
    """A matrix that is applied to a function of the field: `matrix @ function(field).flatten()`.

    >>> operator = Dense(torch.ones(4, 6), torch.tanh)
    >>> operator(torch.zeros(2, 3)).shape, operator.rows(slice(1, 3))(torch.zeros(2, 3)).shape
    (torch.Size([4]), torch.Size([2]))
    """

    def __init__(self, matrix: Tensor, function: Forward | None = None) -> None:
        if not isinstance(matrix, Tensor) or matrix.ndim != 2 or not matrix.is_floating_point():
            raise TypeError("matrix must be a tensor of floating-point numbers [measurements, cells].")
        require_tensor("matrix", matrix)
        require_types(Dense.__init__, locals())
        self.function = function
        # A step reads the matrix forwards and backwards. Stored by columns, both together took 0.7 of the time
        # (4096 x 900 on two cores), and neighbouring rows are a view.
        self.columns = matrix.detach().T.contiguous()

    def __call__(self, field: Tensor) -> Tensor:
        require_tensor("field", field)
        values = field if self.function is None else self.function(field)
        if values.dtype != self.columns.dtype:
            raise TypeError(f"the matrix is {self.columns.dtype}, but the field {values.dtype}: convert one of them.")
        if values.numel() != len(self.columns):
            raise ValueError(f"the matrix has {len(self.columns)} columns, but the field {values.numel()} cells.")
        return values.flatten() @ self.columns

    def rows(self, index: Tensor | slice) -> Self:
        require_types(Dense.rows, locals())
        rows = self.columns.shape[1]
        if isinstance(index, Tensor):
            mask = index.dtype == torch.bool and len(index) == rows
            if index.layout is not torch.strided or index.ndim != 1 or not (mask or is_integer(index)):
                raise ValueError(
                    f"index must be a slice, or a tensor of the numbers of rows, 0 to {rows - 1}, not {shown(index)}."
                )
        part = copy.copy(self)
        part.columns = self.columns[:, index]
        return part

    def ends(self, length: int) -> Forward:
        """The operator for a pair of fields [2, ...]: the first `length` rows for one, the last for the other.

        One batched product does both, on two overlapping views of the matrix. PyTorch spreads it over its threads.
        """
        cells, rows = self.columns.shape
        require_types(Dense.ends, {"length": length})
        if not 1 <= length <= rows:
            raise ValueError(f"length must lie between 1 and the {rows} rows of the matrix, not {length}.")
        windows = self.columns.as_strided((2, cells, length), (rows - length, self.columns.stride(0), 1))

        def pair(fields: Tensor) -> Tensor:
            values = fields if self.function is None else self.function(fields)
            return torch.bmm(values.flatten(1)[:, None], windows).squeeze(1)

        return pair


def together(forward: Forward, initial: Tensor, replicas: int) -> Forward:
    """`forward` for a stack of fields: all at once if vmap can do it, else one after another."""
    return vmap(forward) if mappable(forward, initial, replicas) else one_by_one(forward)


def one_by_one(forward: Forward) -> Forward:
    return lambda fields: torch.stack([forward(field.clone()) for field in fields])


def mappable(forward: Forward, initial: Tensor, replicas: int = 2) -> bool:
    """Whether vmap can do an operator, with the same result."""
    runs = vmap(forward), one_by_one(forward)
    try:  # with gradients, because vmap refuses some operators only there, such as those that checkpoint activations
        both = zip(*(_with_gradient(run, initial, replicas) for run in runs), strict=True)
        return all(nearly_equal(a, b) for a, b in both)
    except Exception:  # vmap refuses some operators, each in its own way
        return False


def _with_gradient(run: Forward, start: Tensor, replicas: int) -> tuple[Tensor, Tensor]:
    """The result of an operator for a stack of fields, and the gradient of its sum."""
    with torch.enable_grad():
        fields = torch.stack([start] * replicas).requires_grad_()
        found = run(fields)
        [gradient] = torch.autograd.grad(found.sum(), fields)
    return found.detach(), gradient


def nearly_equal(a: Tensor, b: Tensor, unit: Tensor | None = None) -> bool:
    """Whether two tensors agree but for rounding, for values of the size of `unit`, by default `b`."""
    largest = float((b if unit is None else unit).abs().max())
    return a.shape == b.shape and torch.allclose(a, b, 1e-3, 1e-5 * largest)
