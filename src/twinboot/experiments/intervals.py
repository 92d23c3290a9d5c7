"""Means over seeds or splits, with their confidence intervals, and how tables print them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import pandas as pd
from scipy.special import stdtrit


def interval(values: pd.Series) -> tuple[float, float]:
    """A mean and the half width of its 95 % confidence interval, by Student's t."""
    n = len(values)
    if n < 2:
        return float(values.mean()), math.nan
    return float(values.mean()), float(stdtrit(n - 1, 0.975) * values.std() / math.sqrt(n))


def change(wide: pd.DataFrame, ours: Hashable, theirs: Hashable) -> tuple[float, float]:
    """The difference of two columns, seed by seed, as a share of the mean of `theirs`: mean and half width."""
    mean, half = interval(wide[ours] - wide[theirs])
    unit = float(wide[theirs].mean())
    return mean / unit, half / unit


def with_error(value: float, error: float, form: str) -> str:
    """A number with its error; NaN is left out.

    >>> with_error(0.1234, 0.05, "{:+.2f}"), with_error(-0.5, math.nan, "{:.0%}"), with_error(math.nan, 1.0, "{}")
    ('+0.12 ± 0.05', '-50%', '')
    """
    if math.isnan(value):
        return ""
    return form.format(value) + ("" if math.isnan(error) else f" ± {form.replace('+', '').format(error)}")


def plus_minus(values: Iterable[float], errors: Iterable[float], digits: int) -> list[str]:
    """A column of numbers with their errors."""
    return [with_error(value, error, f"{{:.{digits}f}}") for value, error in zip(values, errors, strict=True)]
