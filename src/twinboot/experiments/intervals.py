"""Means over seeds or splits, with their confidence intervals, and how tables print them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import pandas as pd
import torch
from scipy.special import ndtri, stdtrit
from torch import Tensor


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


def with_interval(values: pd.Series, form: str) -> str:
    """The mean of some values with half of its 95 % interval.

    >>> with_interval(pd.Series([0.1, 0.2, 0.3]), "{:.2f}")
    '0.20 ± 0.25'
    """
    return with_error(*interval(values), form)


def formatted(found: pd.DataFrame, columns: Mapping[str, tuple[str, ...]]) -> pd.DataFrame:
    """A table for people. `columns`: title -> (column,), (column, format) or (column, format, column of its errors).

    >>> found = pd.DataFrame({"name": ["a", "b"], "mean": [0.25, math.nan], "error": [0.125, 1.0]})
    >>> formatted(found, {"who": ("name",), "mean ± error": ("mean", "{:.1f}", "error")}).to_dict("list")
    {'who': ['a', 'b'], 'mean ± error': ['0.2 ± 0.1', '']}
    """
    shown = {}
    for title, (column, *more) in columns.items():
        values = found[column].to_list()
        if more:
            form, *errors = more
            known = found[errors[0]] if errors else [math.nan] * len(found)
            values = [with_error(value, error, form) for value, error in zip(values, known, strict=True)]
        shown[title] = values
    return pd.DataFrame(shown)


def covered(error: Tensor, sigma: Tensor, level: float) -> float:
    """The share of the cells whose normal interval of that level contains the true value."""
    half_width = float(ndtri(0.5 + level / 2))
    return (error.abs() < half_width * sigma).float().mean().item()


def correlation(sigma: Tensor, error: Tensor) -> float:
    """The correlation of sigma with |error| over the cells; 0 if sigma is the same everywhere."""
    found = torch.corrcoef(torch.stack([sigma.flatten(), error.abs().flatten()]))[0, 1].item()
    return found if math.isfinite(found) else 0.0
