"""`StandardErrors`: estimates with their standard errors, intervals and draws."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .._core.checks import one_line, require_level, require_one_of
from ..estimate.student import combined, half_width

Kind = Literal["t", "percentile", "bca"]
KINDS = ("t", "percentile", "bca")
NORMAL = NormalDist()
# A normal distribution has one standard deviation between these and the median.
LOW, HIGH = NORMAL.cdf(-1.0), NORMAL.cdf(1.0)
# The most that the standard deviation of draws may be of that from their quantiles. It is 1 for a normal distribution,
# 1.24 for Student's t with 4 degrees of freedom and 1.45 with 3. Beyond, the spread of draws has no finite fourth
# moment, or no second: its estimate does not become steady with more draws.
HEAVY = 1.5
UNDETERMINED = 0.16  # the share of bootstrap samples without a minimum at which quantiles say nothing either


@dataclass(frozen=True, eq=False)
class StandardErrors:
    """The result of `standard_errors`. `print(found)` shows it as a table.

    Attributes:
        estimate: the fitted parameters by name.
        module: a copy of the model with these parameters.
        labels: a name for each entry of the parameters, in the order of the columns of `draws`: `"weight[0, 1]"`.
        draws: [draws, entries], the parameters of each twin. None if they are too many to keep.
        settled: [draws], whether the twin's data determine all parameters and it came to its minimum.
        df: the degrees of freedom of the data: samples minus parameters, or clusters or blocks minus 1.
        runaway: the labels of the entries whose draws have no standard deviation: they run away in some samples.
        notes: what the table says below its last line.
    """

    estimate: dict[str, Tensor]
    module: nn.Module
    labels: list[str]
    draws: Tensor | None
    settled: Tensor
    df: float
    notes: list[str]
    runaway: list[str]
    _center: Tensor = field(repr=False)
    _variance: Tensor = field(repr=False)
    _relative: Tensor = field(repr=False)
    _influence: Tensor | None = field(repr=False)  # of each unit that is drawn, [units, entries]

    @property
    def se(self) -> dict[str, Tensor]:
        """The standard errors by name: standard deviations of the draws. NaN for entries that run away."""
        return self._named(self._se())

    def _se(self) -> Tensor:
        away = torch.tensor([label in set(self.runaway) for label in self.labels], device=self._variance.device)
        return torch.where(away, torch.nan, self._variance.sqrt())

    @property
    def quantile_se(self) -> dict[str, Tensor]:
        """Standard errors from quantiles: half of the distance between the 15.9 % and the 84.1 % quantile of the draws.
        The same for normal draws, and steadier where draws have heavy tails."""
        return self._named(quantile_se(self._kept("quantile_se")))

    @property
    def precision(self) -> float:
        """The relative error that the number of draws leaves to the standard errors: the largest of those of all
        entries that do not run away."""
        known = self._relative[self._se().isfinite()]
        return known.max().item() if len(known) else math.inf

    def covariance(self) -> Tensor:
        """The covariance matrix of all entries, in the order of `labels`. NaN for those that run away."""
        found = torch.cov(self._kept("covariance").T).reshape(len(self.labels), -1)
        away = self._se().isnan()
        return torch.where(away | away[:, None], torch.nan, found)

    def sandwich(self) -> Tensor:
        """The covariance matrix for large samples, without draws: inverse curvature, times that of the gradients, times
        inverse curvature (HC0; with clusters, that of their sums). For comparison."""
        if self._influence is None:
            raise ValueError("the sandwich needs second derivatives, which this fit did not compute.")
        return self._influence.T @ self._influence

    def interval(self, level: float = 0.95, kind: Kind = "t") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The lower and the upper ends of confidence intervals, each by name.

        Args:
            level: the probability with which an interval contains the true parameter.
            kind: `"t"`: estimate ± Student's quantile times the standard error. The degrees of freedom are those of the
                draws and of the data. `"percentile"`: quantiles of the draws. `"bca"`: the same, corrected for bias and
                for a standard error that changes with the parameter (Efron 1987). The last two follow draws that are
                not symmetric, and need more of them: at least 2 / (1 - level).
        """
        require_level(level)
        require_one_of(KINDS, "kind", kind)
        if kind == "t":
            low, high = self._student(level)
        else:
            low, high = self._quantiles(level, kind)
        return self._named(low), self._named(high)

    def _student(self, level: float) -> tuple[Tensor, Tensor]:
        df = combined(max(len(self.settled) - 1.0, 1.0), self.df)
        half = half_width(level, df) * self._se()
        return self._center - half, self._center + half

    def _quantiles(self, level: float, kind: Kind) -> tuple[Tensor, Tensor]:
        draws = self._kept(f"a {kind} interval")
        if len(draws) * (1 - level) < 2:
            raise ValueError(
                f"a {kind} interval of level {level} needs at least {math.ceil(2 / (1 - level))} draws, not "
                f"{len(draws)}: give more rounds."
            )
        tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64).to(draws)
        places = tails[:, None].expand(2, draws.shape[1])
        if kind == "bca":
            if self._influence is None:
                raise ValueError(
                    'kind="bca" needs second derivatives, which this fit did not compute: use "percentile".'
                )
            share = (draws < self._center).double().mean(0) + (draws == self._center).double().mean(0) / 2
            shift = torch.special.ndtri(share.clamp(0.5 / len(draws), 1 - 0.5 / len(draws)))
            cubes, squares = self._influence.pow(3).sum(0), self._influence.square().sum(0)
            bend = cubes / (6 * squares.pow(1.5).clamp(min=1e-300))
            both = shift + torch.special.ndtri(tails)[:, None]
            places = torch.special.ndtr(shift + both / (1 - bend * both))
        ordered = draws.sort(0).values
        # Weibull's places: the k-th of m ordered draws is the quantile k / (m + 1).
        spot = (places * (len(draws) + 1) - 1).clamp(0, len(draws) - 1)
        below = spot.floor().long()
        above = (below + 1).clamp(max=len(draws) - 1)
        ends = ordered.gather(0, below).lerp(ordered.gather(0, above), spot - below)
        return ends[0], ends[1]

    @torch.no_grad()
    def outputs(self, *inputs: Any) -> Tensor:
        """What the model gives for some inputs with the parameters of each draw, [draws, ...]: the spread of curves."""
        given = tuple(_double(value) for value in inputs)

        def one(draw: Tensor) -> Any:
            return functional_call(self.module, self._named(draw), given)

        draws = self._kept("outputs")
        try:
            one(draws[0])
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the model cannot read these inputs: {one_line(error)}.") from error
        try:
            found: Tensor = vmap(one)(draws)
        except (RuntimeError, NotImplementedError):  # a model that cannot be vmapped
            found = torch.stack([one(draw) for draw in draws])
        return found

    def _kept(self, what: str) -> Tensor:
        if self.draws is None:
            raise ValueError(f"{what} needs the draws, which were too many to keep: give keep_draws=True.")
        return self.draws

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        found, place = {}, 0
        for name, value in self.estimate.items():
            found[name] = vector[place : place + value.numel()].reshape(value.shape)
            place += value.numel()
        return found

    def table(self, level: float = 0.95, kind: Kind = "t") -> str:
        """The table that `str` shows, with intervals of a level and a kind of one's own."""
        ends = self.interval(level, kind)
        low, high = (torch.cat([t.reshape(-1) for t in end.values()]).tolist() for end in ends)
        se = self._se().tolist()
        tail = (1 - level) / 2
        head = ["", "estimate", "std err", "t", f"[{tail:.4g}", f"{1 - tail:.4g}]"]
        rows = [head]
        for label, value, error, *limits in zip(self.labels, self._center.tolist(), se, low, high, strict=True):
            digits = _digits(error, value)
            ratio = f"{value / error:.4g}" if error > 0 else "-"
            shown = ["-" if math.isnan(limit) else _number(limit, digits) for limit in limits]
            rows.append([label, _number(value, digits), "-" if math.isnan(error) else f"{error:.3g}", ratio, *shown])
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = []
        for first, *others in rows:
            cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
            lines.append("   ".join([first.ljust(widths[0]), *cells]))
        rule = "-" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:], rule, *self.notes])

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        away = f", {len(self.runaway)} run away" if self.runaway else ""
        return f"StandardErrors({len(self.labels)} parameters, {len(self.settled)} draws{away})"


def quantile_se(draws: Tensor) -> Tensor:
    """Half of the distance between the quantiles that are two standard deviations apart in a normal distribution.

    >>> round(quantile_se(torch.linspace(-1, 1, 1001)[:, None]).item(), 2)  # uniform on [-1, 1]
    0.68
    """
    ends = torch.quantile(draws, torch.tensor([LOW, HIGH]).to(draws), dim=0)
    return (ends[1] - ends[0]) / 2


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _digits(error: float, value: float) -> int:
    """The decimal places with which an estimate is shown: three significant digits of its standard error."""
    unit = error if error > 0 and math.isfinite(error) else 1e-3 * abs(value)
    return 2 - math.floor(math.log10(unit)) if unit > 0 else 3


def _number(value: float, digits: int) -> str:
    """A number with so many decimals, or with an exponent where that is shorter.

    >>> _number(238.9421, 2), _number(5.5015e-4, 7), _number(123456789.0, -3)
    ('238.94', '0.0005502', '1.23457e+08')
    """
    size = abs(value)
    if size and not 1e-4 <= size < 1e7:
        return f"{value:.{max(digits + math.floor(math.log10(size)), 1)}e}"
    return f"{value:.{max(digits, 0)}f}"
