"""Means with their errors: how they are computed from seeds or splits, and how people read them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from statistics import NormalDist

import pandas as pd


def interval(values: pd.Series) -> tuple[float, float]:
    """A mean and the half width of its 95 % confidence interval, by Student's distribution."""
    n = len(values)
    if n < 2:
        return float(values.mean()), math.nan
    return float(values.mean()), float(_student(n - 1) * values.std() / math.sqrt(n))


def change(wide: pd.DataFrame, ours: Hashable, theirs: Hashable) -> tuple[float, float]:
    """From their column to ours on the same seeds, relative to the mean of theirs: mean, and half of its interval."""
    mean, half = interval(wide[ours] - wide[theirs])
    unit = float(wide[theirs].mean())
    return mean / unit, half / unit


def with_error(value: float, error: float, form: str) -> str:
    """A number with its error, as far as they are known.

    >>> with_error(0.1234, 0.05, "{:+.2f}"), with_error(-0.5, math.nan, "{:.0%}"), with_error(math.nan, 1.0, "{}")
    ('+0.12 ± 0.05', '-50%', '')
    """
    if math.isnan(value):
        return ""
    return form.format(value) + ("" if math.isnan(error) else f" ± {form.replace('+', '').format(error)}")


def plus_minus(values: Iterable[float], errors: Iterable[float], digits: int) -> list[str]:
    """A column of numbers with their errors."""
    return [with_error(value, error, f"{{:.{digits}f}}") for value, error in zip(values, errors, strict=True)]


def _student(degrees: int) -> float:
    """The quantile of Student's distribution at 97.5 %: in closed form for one and two degrees of freedom, then by the
    terms of an expansion in 1 / degrees, to 0.2 % at three of them and ever better (Abramowitz and Stegun 26.7.5)."""
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / float(degrees) ** power for power, term in enumerate(terms))
