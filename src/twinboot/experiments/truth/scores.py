"""Columns of the tables, and the scores that follow from them.

    truth: a row for each training set and input, with the prediction of the plain model
    draws: a row for each training set, method and input, with the prediction and its spread
    runs: a row for each training set and method, the plain training among them

The expected prediction is the mean over plain models of *other* training sets, and the true variance is their variance.
For classes, intervals are for the log-odds of the class of the label: probabilities are skewed near 0 and 1.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from scipy.stats import spearmanr
from torch import Tensor

from .methods import Found
from .tasks import Kind

LEVEL = 0.90
CLAMP = 1e-7  # probabilities are kept so far from 0 and 1
CELL = ["size", "lr"]
PLAIN = "plain"
Array = NDArray[np.float64]


def shown_value(kind: Kind, predicted: Tensor, target: Tensor) -> Tensor:
    """[..., inputs, outputs] -> [..., inputs], what intervals are for: the log-odds of the label's class, or values."""
    return log_odds(_of_label(predicted, target)) if kind == "classification" else predicted[..., 0]


def log_odds(p: Tensor) -> Tensor:
    p = p.double().clamp(CLAMP, 1 - CLAMP)
    return (p / (1 - p)).log()


def _of_label(predicted: Tensor, target: Tensor) -> Tensor:
    return predicted[..., torch.arange(len(target)), target]


def truth_rows(kind: Kind, predicted: Tensor, target: Tensor) -> pd.DataFrame:
    """The prediction of a plain model for each input: each output, and what intervals are for."""
    outputs = {f"output{k}": _rounded(values) for k, values in enumerate(predicted.unbind(1))}
    return pd.DataFrame(
        {"input": range(len(target)), **outputs, "value": _rounded(shown_value(kind, predicted, target))}
    )


def draw_rows(kind: Kind, found: Found, target: Tensor) -> pd.DataFrame:
    """The prediction of a method for each input, and its spread."""
    values = shown_value(kind, found.draws, target)
    rows = {
        "input": range(len(target)),
        "variance": _rounded(found.draws.var(0).sum(1)),
        "value": _rounded(shown_value(kind, found.point, target)),
        "std": _rounded(values.std(0)),
    }
    if kind == "classification":
        rows["probability"] = _rounded(_of_label(found.point, target))
        rows["probability_std"] = _rounded(_of_label(found.draws, target).std(0))
    return pd.DataFrame(rows)


def quality(kind: Kind, draws: Tensor, point: Tensor, target: Tensor) -> dict[str, float]:
    """How good the mean over the draws and the point prediction are."""
    rows = {}
    for name, predicted in (("", draws.mean(0)), ("point_", point)):
        if kind == "classification":
            rows[f"{name}nll"] = -_of_label(predicted, target).clamp(min=CLAMP).log().mean().item()
            rows[f"{name}accuracy"] = (predicted.argmax(1) == target).double().mean().item()
        else:
            rows[f"{name}rmse"] = (predicted - target).square().mean().sqrt().item()
    return rows


def _rounded(values: Tensor) -> Array:
    """Five significant digits, to keep the files small."""
    flat = values.double().numpy()
    with np.errstate(divide="ignore"):
        digits = 10.0 ** (4 - np.floor(np.log10(np.abs(flat), out=np.zeros_like(flat), where=flat != 0)))
    return np.asarray(np.round(flat * digits) / digits)


def with_scores(truth: pd.DataFrame, draws: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The rows of `runs`, with the scores of the spread, which the plain training has not.

    ratio: root mean square spread of the method relative to that of the truth
    rank: rank correlation of the two over the inputs
    covered: share of the inputs whose interval holds the expected prediction; covered_probs: of probabilities
    own_ratio: as ratio, for the prediction of the label alone, relative to the method's own predictions over the sets
    cost: training time relative to the plain training's, its median over the sets
    """
    cells = truths(truth)
    own_spread, keys, found = _own_spread(draws), [*CELL, "method", "set"], []
    degrees = runs.set_index(keys)["df"]
    for key, own in draws.groupby(keys, sort=False):
        size, lr, method, number = key
        found.append(
            dict(zip(keys, key, strict=True))
            | cells[size, lr].score(number, own, degrees[key])
            | {"own_ratio": own_ratio(own, own_spread[size, lr, method])}
        )
    unit = runs[runs["method"] == PLAIN].groupby(CELL)["seconds"].median().rename("unit")
    scored = runs.merge(pd.DataFrame(found), on=keys, how="left").merge(unit, on=CELL)
    return scored.assign(cost=scored["seconds"] / scored["unit"])


def truths(truth: pd.DataFrame) -> dict[tuple[int, float], Truth]:
    """The truth of each cell, by size and learning rate."""
    return {cell: Truth(own) for cell, own in truth.groupby(CELL)}


class Truth:
    """The truth of a cell: the predictions of plain models, [sets, inputs, outputs]."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.sets = list(rows["set"].unique())
        columns = [name for name in rows if name.startswith("output") and rows[name].notna().all()]
        self.outputs = np.stack([rows[rows["set"] == s][columns].to_numpy(float) for s in self.sets])
        self.values = np.stack([rows[rows["set"] == s]["value"].to_numpy(float) for s in self.sets])
        self.variance = self.outputs.var(0, ddof=1).sum(1)

    @property
    def best_rank(self) -> float:
        """The rank correlation that a perfect method would have, because the truth itself is an estimate. It is the
        square root of the reliability, which follows from two halves of the sets by the formula of Spearman and Brown.
        """
        one, other = (half.var(0, ddof=1).sum(1) for half in (self.outputs[::2], self.outputs[1::2]))
        between = max(rank_correlation(one, other), 0.0)
        return math.sqrt(2 * between / (1 + between))

    def score(self, number: int, own: pd.DataFrame, df: float) -> dict[str, float]:
        others = [place for place, other in enumerate(self.sets) if other != number]
        variance = own["variance"].to_numpy(float)
        found = {
            "ratio": math.sqrt(variance.mean() / self.variance.mean()),
            "rank": rank_correlation(variance, self.variance),
            "covered": covered(own["value"], own["std"], df, self.values[others].mean(0)),
        }
        if "probability" in own and own["probability"].notna().all():
            expected = (1 / (1 + np.exp(-self.values[others]))).mean(0)
            found["covered_probs"] = covered(own["probability"], own["probability_std"], df, expected)
        return found


def covered(point: pd.Series, std: pd.Series, df: float, expected: Array) -> float:
    """The share of the inputs whose interval holds the expected prediction: normal, or Student's t."""
    half = quantile(df) * std.to_numpy(float)
    return float((np.abs(point.to_numpy(float) - expected) <= half).mean())


def quantile(df: float) -> float:
    """How many standard deviations an interval reaches to each side.

    >>> round(quantile(math.inf), 3), round(quantile(1), 3)
    (1.645, 6.314)
    """
    return float(stdtrit(min(df, 1e9), 0.5 + LEVEL / 2))


def rank_correlation(one: Array, other: Array) -> float:
    """Spearman's, and 0 if one of them is the same everywhere."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return float(spearmanr(one, other).statistic)


def _own_spread(draws: pd.DataFrame) -> dict[tuple[float, float, str], float]:
    """Mean variance over the sets of a method's own prediction, by cell and method; NaN with one set."""
    column = _label_columns(draws)[0]
    spread = draws.groupby([*CELL, "method", "input"])[column].var()
    return {key: float(own.mean()) for key, own in spread.groupby(level=[0, 1, 2])}


def own_ratio(own: pd.DataFrame, spread: float) -> float:
    if not spread > 0:
        return math.nan
    return math.sqrt(own[_label_columns(own)[1]].pow(2).mean() / spread)


def _label_columns(draws: pd.DataFrame) -> tuple[str, str]:
    return ("probability", "probability_std") if "probability" in draws else ("value", "std")
