"""What is known of a field before it is measured, for `invert(prior=...)`.

A prior is a function r from a field to residuals, and a weight: without measurements a field has the probability

    exp(-weight / 2 * |r(field)|^2)

`GaussianProcess` says that the field varies around the initial one over some length, `Smooth` that neighbouring cells
are alike, `Near` that cells are near the initial field, `Edges` that neighbours are alike but for a few jumps,
`Residuals` whatever a function says. Several together are multiplied. A weight of `"unseen"` is found from the
measurements, by those that a fit has not seen (`posterior.py`).

To add a prior, add a class with the methods of `Prior`.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .._core.checks import is_number, require_number, require_types, require_whole, shown
from .operators import Forward

Weight = float | Literal["unseen"]
LENGTHS = (2, 4, 8, 16)  # parts of the field that `GaussianProcess` tries as its length, from the longest on
SHORTEST = 1.5  # cells, of these
SMALLEST_VARIANCE = 1e-7  # of a Gaussian process along an eigenvector, of the largest: below is rounding


class Prior(ABC):
    """What `invert` asks of a prior."""

    weight: Weight
    decades = 0.5  # between two weights that are tried
    # Whether the weight is refined by the evidence. That is right for a prior that describes the field. Differences of
    # first order do not describe a smooth field: there the evidence had up to eight times the error.
    evidence = False

    @abstractmethod
    def residuals(self, initial: Tensor) -> Forward:
        """The function r, for a search that starts at `initial`."""

    def candidates(self, initial: Tensor) -> Sequence[Prior]:
        """What the cross-validation chooses from, beside the weight. Its search ends after one that is clearly worse
        than the best before."""
        return [self]

    def weighted(self, weight: float) -> Prior:
        """The same prior with a number as its weight."""
        found = copy.copy(self)
        object.__setattr__(found, "weight", weight)
        if hasattr(self, "std"):
            object.__setattr__(found, "std", weight**-0.5)
            object.__setattr__(found, "weight", 1 / (weight**-0.5) ** 2)  # as the std would set it
        return found

    def spectrum(self, shape: tuple[int, ...]) -> Spectrum | None:
        """The eigenvalues and eigenvectors of the second derivatives of |r|^2 / 2, if they are known. The search is
        quicker with them."""
        return None


@dataclass(frozen=True)
class GaussianProcess(Prior):
    """The field varies smoothly around the initial one: a Gaussian process with a Matern kernel, the same everywhere.
    Where nothing is measured, the field goes back to `initial` within a few lengths, and sigma grows to `std`.

    Args:
        length: over which cells are alike, in cells, or one number for each axis. By default it is chosen as the weight
            is, from a half, a quarter, an eighth and a sixteenth of the longest axis.
        std: the standard deviation of a cell around `initial`. It sets the weight, 1 / std^2.
        smoothness: 0.5 (rough, no slope), 1.5 (a slope), 2.5 (a curvature) or math.inf (all derivatives).
        weight: `"unseen"`, if `std` is not given.

    >>> GaussianProcess(length=5.0, std=0.5).weight
    4.0
    """

    length: float | Sequence[float] | Literal["unseen"] = "unseen"
    std: float | None = None
    smoothness: float = 2.5
    weight: Weight = "unseen"
    evidence = True

    def __post_init__(self) -> None:
        if not (isinstance(self.length, str) and self.length == "unseen"):
            if isinstance(self.length, str):
                raise ValueError(f'length must be a number of cells or "unseen", not {self.length!r}.')
            for length in self.length if isinstance(self.length, (list, tuple)) else [self.length]:
                require_number("length", length, positive=True)
        if not is_number(self.smoothness) or float(self.smoothness) not in KERNELS:
            raise ValueError(f"smoothness must be 0.5, 1.5, 2.5 or math.inf, not {shown(self.smoothness)}.")
        _take_std(self, self.std)

    def residuals(self, initial: Tensor) -> Forward:
        start, spectrum = initial.detach().clone(), self.spectrum(tuple(initial.shape))
        roots = spectrum.values.sqrt().to(start)
        return lambda field: (roots * spectrum.components(field - start)).flatten()

    def candidates(self, initial: Tensor) -> Sequence[Prior]:
        if self.length != "unseen":
            return [self]
        longest = max(initial.shape, default=1)
        lengths = [longest / part for part in LENGTHS if longest / part >= SHORTEST] or [SHORTEST]
        return [replace(self, length=length) for length in lengths]

    def spectrum(self, shape: tuple[int, ...]) -> Spectrum:
        """The kernel is the product of one along each axis, so its matrix is their Kronecker product."""
        bases, variances = [], torch.ones(shape, dtype=torch.double)
        for axis, (size, length) in enumerate(zip(shape, self._lengths(len(shape)), strict=True)):
            places = torch.arange(size, dtype=torch.double) / length
            own, basis = torch.linalg.eigh(KERNELS[float(self.smoothness)]((places[:, None] - places).abs()))
            bases.append((axis, basis))
            variances *= own.clamp(min=0).view(-1, *[1] * (len(shape) - axis - 1))
        return Spectrum(1 / variances.clamp(min=SMALLEST_VARIANCE * variances.max().item()), bases)

    def _lengths(self, dimensions: int) -> list[float]:
        if not isinstance(self.length, (list, tuple)):
            return [float(self.length)] * dimensions  # type: ignore[arg-type]
        if len(self.length) != dimensions:
            raise ValueError(f"length has {len(self.length)} numbers, but the field has {dimensions} axes.")
        return [float(length) for length in self.length]


KERNELS: dict[float, Callable[[Tensor], Tensor]] = {  # of the distance in lengths (Rasmussen and Williams 2006, 4.2)
    0.5: lambda d: torch.exp(-d),
    1.5: lambda d: (1 + 3**0.5 * d) * torch.exp(-(3**0.5) * d),
    2.5: lambda d: (1 + 5**0.5 * d + 5 / 3 * d**2) * torch.exp(-(5**0.5) * d),
    math.inf: lambda d: torch.exp(-(d**2) / 2),
}


@dataclass(frozen=True)
class Smooth(Prior):
    """Neighbouring cells are alike: differences of the field along each axis are small. `initial` plays no part.

    Args:
        order: of the differences: 1 (neighbours have the same value), 2 (the same slope) or 3 (the same curvature).
            Orders above 1 extrapolate where nothing is measured.
        weight: 1 / variance of a difference, or `"unseen"`.
        axes: the axes along which the field is smooth, by default all.

    >>> Smooth().residuals(torch.zeros(3))(torch.tensor([1.0, 2.0, 5.0]))
    tensor([1., 3.])
    """

    order: int = 1
    weight: Weight = "unseen"
    axes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        require_whole("order", self.order, 1)
        _require_weight(self.weight)
        require_types(type(self).__init__, {"axes": self.axes})

    @property
    def decades(self) -> float:  # type: ignore[override]
        """A weight goes with the 2 order-th power of a length in the field: equal steps of that length."""
        return 0.5 * self.order

    def residuals(self, initial: Tensor) -> Forward:
        axes = self._along(tuple(initial.shape))
        return lambda field: torch.cat([field.diff(self.order, dim=axis).flatten() for axis in axes])

    def spectrum(self, shape: tuple[int, ...]) -> Spectrum:
        """Each axis has its own matrix of differences d, and R'R is the Kronecker sum of their d'd. Its eigenvectors
        are the products of theirs, and its eigenvalues the sums."""
        bases, values = [], torch.zeros(shape, dtype=torch.double)
        for axis in self._along(shape):
            differences = torch.eye(shape[axis], dtype=torch.double).diff(self.order, dim=0)
            own, basis = torch.linalg.eigh(differences.T @ differences)
            bases.append((axis, basis))
            values += own.clamp(min=0).view(-1, *[1] * (len(shape) - axis - 1))
        return Spectrum(values, bases)

    def _along(self, shape: tuple[int, ...]) -> list[int]:
        found = [axis for axis in _axes(self.axes, len(shape)) if shape[axis] > self.order]
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
        _take_std(self, self.std)

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
        with torch.enable_grad():
            found = self.function(initial.detach().clone().requires_grad_().clone())
        if not isinstance(found, Tensor) or not found.is_floating_point() or not found.numel():
            raise TypeError(f"a prior must give a tensor of residuals, not {shown(found)}.")
        if not found.requires_grad:
            raise ValueError("a prior must depend on the field by operations that PyTorch can differentiate.")
        if not bool(found.isfinite().all()):
            raise ValueError("a prior gives residuals that are not finite for the initial field.")
        return lambda field: self.function(field).flatten()


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of a symmetric matrix on fields, and its eigenvectors along some axes; along the others, those of
    the identity."""

    values: Tensor
    bases: list[tuple[int, Tensor]]

    def components(self, fields: Tensor, back: bool = False) -> Tensor:
        """Fields [..., shape] as multiples of the eigenvectors, or back."""
        for axis, basis in self.bases:
            place, matrix = axis - self.values.ndim, basis.to(fields)
            fields = (fields.movedim(place, -1) @ (matrix.T if back else matrix)).movedim(-1, place)
        return fields

    def inverse(self, fields: Tensor, values: Tensor) -> Tensor:
        """The inverse of the matrix with these eigenvalues times each of the fields [members, ...]."""
        return self.components(self.components(fields) / values.to(fields), back=True)


def as_priors(prior: Any) -> tuple[Prior, ...]:
    """The priors that `invert` got: one, several, functions among them, or none."""
    if prior is None:
        return ()
    if isinstance(prior, str) or is_number(prior):
        raise TypeError(
            "prior must be GaussianProcess(), Smooth(), a function of the field or several of these, not "
            f"{shown(prior)}: a standard deviation around the initial field is Near(std=...)."
        )
    several = prior if isinstance(prior, (list, tuple)) else [prior]
    for one in several:
        if isinstance(one, type) or not (isinstance(one, Prior) or callable(one)):
            raise TypeError(
                "prior must be GaussianProcess(), Smooth(), a function of the field or several of these, not "
                f"{shown(one)}."
            )
    return tuple(one if isinstance(one, Prior) else Residuals(one) for one in several)


def _axes(axes: Sequence[int] | None, dimensions: int) -> list[int]:
    if axes is None:
        return list(range(dimensions))
    if any(not -dimensions <= axis < dimensions for axis in axes) or not len(axes):
        raise ValueError(f"axes must be axes of the field, 0 to {dimensions - 1}, not {shown(axes)}.")
    return sorted({axis % dimensions for axis in axes})


def _take_std(prior: GaussianProcess | Near, std: float | None) -> None:
    """Set the weight by a standard deviation, if there is one."""
    if std is not None:
        require_number("std", std, positive=True)
        _require_weight(prior.weight)
        if prior.weight not in ("unseen", 1 / float(std) ** 2):
            raise ValueError(f"{type(prior).__name__} takes std or weight, not both: the weight is 1 / std^2.")
        object.__setattr__(prior, "weight", 1 / float(std) ** 2)
    _require_weight(prior.weight)


def _require_weight(weight: object) -> None:
    if isinstance(weight, str) and weight == "unseen":
        return
    if not is_number(weight) or not 0 < float(weight) < math.inf:  # type: ignore[arg-type]
        raise ValueError(f'weight must be a number above 0 or "unseen", not {shown(weight)}.')
