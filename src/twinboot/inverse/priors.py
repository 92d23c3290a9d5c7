"""What is known of a field before it is measured, for `invert(prior=...)`.

A prior is a function r from a field to residuals, and a weight: without measurements a field has the probability

    exp(-weight / 2 * |r(field)|^2)

`Smooth` says that neighbouring cells are alike, `Near` that cells are near the initial field, `Edges` that neighbours
are alike but for a few jumps, `Residuals` whatever a function says. Several together are multiplied. A weight of
`"unseen"` is the one with which measurements are predicted best that a fit has not seen, by cross-validation.

To add a prior, add a class with the methods of `Prior`.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .._core.checks import is_number, require_number, require_types, require_whole, shown
from .operators import Forward

Weight = float | Literal["unseen"]
ORDERS = (1, 2, 3)  # of differences that `Smooth` tries; higher ones fit polynomials where nothing is measured


class Prior(ABC):
    """What `invert` asks of a prior."""

    weight: Weight
    decades = 0.5  # between two weights that are tried

    @abstractmethod
    def residuals(self, initial: Tensor) -> Forward:
        """The function r, for a search that starts at `initial`."""

    def candidates(self, initial: Tensor) -> Sequence[Prior]:
        """What the cross-validation chooses from, beside the weight."""
        return [self]

    def weighted(self, weight: float) -> Prior:
        """The same prior with a number as its weight."""
        found = copy.copy(self)
        object.__setattr__(found, "weight", weight)
        return found

    def spectrum(self, shape: tuple[int, ...]) -> Spectrum | None:
        """The eigenvalues and eigenvectors of the second derivatives of |r|^2 / 2, if they are known. The search is
        quicker with them."""
        return None


@dataclass(frozen=True)
class Smooth(Prior):
    """Neighbouring cells are alike: differences of the field along each axis are small.

    Args:
        order: of the differences: 1 (neighbours have the same value), 2 (the same slope) or 3 (the same curvature).
            The smoother the field, the higher. With a lower order than that of the field, error bars are too large. By
            default the order is chosen as the weight is.
        weight: 1 / variance of a difference, or `"unseen"`.
        axes: the axes along which the field is smooth, by default all.

    >>> Smooth(order=1).residuals(torch.zeros(3))(torch.tensor([1.0, 2.0, 5.0]))
    tensor([1., 3.])
    """

    order: int | Literal["unseen"] = "unseen"
    weight: Weight = "unseen"
    axes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.order != "unseen":
            require_whole("order", self.order, 1)
        _require_weight(self.weight)
        require_types(type(self).__init__, {"axes": self.axes})

    @property
    def decades(self) -> float:  # type: ignore[override]
        """A weight goes with the 2 order-th power of a length in the field: equal steps of that length."""
        return 0.5 * (1 if self.order == "unseen" else self.order)

    def residuals(self, initial: Tensor) -> Forward:
        order, axes = int(self.order), self._along(tuple(initial.shape))
        return lambda field: torch.cat([field.diff(order, dim=axis).flatten() for axis in axes])

    def candidates(self, initial: Tensor) -> Sequence[Prior]:
        if self.order != "unseen":
            return [self]
        axes = _axes(self.axes, initial.ndim)
        most = max([initial.shape[axis] for axis in axes], default=0) - 1
        return [replace(self, order=order) for order in ORDERS if order <= max(most, 1)]

    def spectrum(self, shape: tuple[int, ...]) -> Spectrum:
        """Each axis has its own matrix of differences d, and R'R is the Kronecker sum of their d'd. Its eigenvectors
        are the products of theirs, and its eigenvalues the sums."""
        bases, values = [], torch.zeros(shape, dtype=torch.double)
        for axis in self._along(shape):
            differences = torch.eye(shape[axis], dtype=torch.double).diff(int(self.order), dim=0)
            own, basis = torch.linalg.eigh(differences.T @ differences)
            bases.append((axis, basis))
            values += own.clamp(min=0).view(-1, *[1] * (len(shape) - axis - 1))
        return Spectrum(values, bases)

    def _along(self, shape: tuple[int, ...]) -> list[int]:
        found = [axis for axis in _axes(self.axes, len(shape)) if shape[axis] > int(self.order)]
        if not found:
            raise ValueError(f"a field of shape {shape} has no differences of order {self.order}: give a lower order.")
        return found


@dataclass(frozen=True)
class Near(Prior):
    """Cells are near the initial field, each by itself.

    Args:
        std: the standard deviation of a cell around `initial`. It sets the weight, 1 / std^2.
        weight: `"unseen"`, if `std` is not given.

    >>> Near(std=0.5).weight
    4.0
    """

    std: float | None = None
    weight: Weight = "unseen"

    def __post_init__(self) -> None:
        if self.std is not None:
            require_number("std", self.std, positive=True)
            if self.weight not in ("unseen", 1 / float(self.std) ** 2):
                raise ValueError("Near takes std or weight, not both: the weight is 1 / std^2.")
            object.__setattr__(self, "weight", 1 / float(self.std) ** 2)
        _require_weight(self.weight)

    def residuals(self, initial: Tensor) -> Forward:
        start = initial.detach().clone()
        return lambda field: (field - start).flatten()

    def spectrum(self, shape: tuple[int, ...]) -> Spectrum:
        return Spectrum(torch.ones(shape, dtype=torch.double), [])


@dataclass(frozen=True)
class Edges(Prior):
    """Neighbouring cells are alike, but for jumps: layers, organs, letters. A jump counts by its size, not by its
    square, as in total variation (a pseudo-Huber loss, Charbonnier 1994). Draws are approximate: this prior is not
    Gaussian.

    Args:
        scale: the size of a difference from which on it counts as a jump.
        weight: 1 / variance of a difference that is small against `scale`, or `"unseen"`.

    >>> Edges(scale=0.1).residuals(torch.zeros(3))(torch.tensor([0.0, 0.01, 5.0])).square()
    tensor([9.9751e-05, 9.7820e-01])
    """

    scale: float
    weight: Weight = "unseen"

    def __post_init__(self) -> None:
        require_number("scale", self.scale, positive=True)
        _require_weight(self.weight)

    def residuals(self, initial: Tensor) -> Forward:
        differences, scale = Smooth(order=1).residuals(initial), float(self.scale)

        def residuals(field: Tensor) -> Tensor:  # their square is 2 scale^2 (sqrt(1 + (d / scale)^2) - 1)
            d = differences(field)
            return d * (2 / (1 + (1 + (d / scale).square()).sqrt())).sqrt()

        return residuals

    def spectrum(self, shape: tuple[int, ...]) -> Spectrum:
        return Smooth(order=1).spectrum(shape)  # of a field without jumps


@dataclass(frozen=True)
class Residuals(Prior):
    """A function of yours: field -> residuals that are independent, with a variance of 1 / weight each.

    >>> Residuals(lambda field: field.diff(), weight=100.0).weight
    100.0
    """

    function: Forward
    weight: Weight = "unseen"

    def __post_init__(self) -> None:
        require_types(Residuals.__init__, {"function": self.function})
        _require_weight(self.weight)

    def residuals(self, initial: Tensor) -> Forward:
        with torch.no_grad():
            found = self.function(initial.detach().clone())
        if not isinstance(found, Tensor) or not found.is_floating_point() or not found.numel():
            raise TypeError(f"a prior must give a tensor of residuals, not {shown(found)}.")
        if not bool(found.isfinite().all()):
            raise ValueError("a prior gives residuals that are not finite for the initial field.")
        return lambda field: self.function(field).flatten()


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of a symmetric matrix on fields, and its eigenvectors along some axes; along the others, those of
    the identity."""

    values: Tensor
    bases: list[tuple[int, Tensor]]

    def inverse(self, fields: Tensor, values: Tensor) -> Tensor:
        """The inverse of the matrix with these eigenvalues times each of the fields [members, ...]."""
        bases = [(axis, basis.to(fields)) for axis, basis in self.bases]
        for axis, basis in bases:
            fields = (fields.movedim(axis + 1, -1) @ basis).movedim(-1, axis + 1)
        fields = fields / values.to(fields)
        for axis, basis in bases:
            fields = (fields.movedim(axis + 1, -1) @ basis.T).movedim(-1, axis + 1)
        return fields


def as_priors(prior: Any) -> tuple[Prior, ...]:
    """The priors that `invert` got: one, several, functions among them, or none."""
    if prior is None:
        return ()
    if isinstance(prior, str) or is_number(prior):
        raise TypeError(
            f"prior must be Smooth(), Near(std=...), a function of the field or several of these, not {shown(prior)}: "
            "a standard deviation around the initial field is Near(std=...)."
        )
    several = prior if isinstance(prior, (list, tuple)) else [prior]
    for one in several:
        if isinstance(one, type) or not (isinstance(one, Prior) or callable(one)):
            raise TypeError(
                f"prior must be Smooth(), Near(), a function of the field or several of these, not {shown(one)}."
            )
    return tuple(one if isinstance(one, Prior) else Residuals(one) for one in several)


def _axes(axes: Sequence[int] | None, dimensions: int) -> list[int]:
    if axes is None:
        return list(range(dimensions))
    if any(not -dimensions <= axis < dimensions for axis in axes) or not len(axes):
        raise ValueError(f"axes must be axes of the field, 0 to {dimensions - 1}, not {shown(axes)}.")
    return sorted({axis % dimensions for axis in axes})


def _require_weight(weight: object) -> None:
    if weight == "unseen" and isinstance(weight, str):
        return
    if not is_number(weight) or not 0 < float(weight) < math.inf:  # type: ignore[arg-type]
        raise ValueError(f'weight must be a number above 0 or "unseen", not {shown(weight)}.')
