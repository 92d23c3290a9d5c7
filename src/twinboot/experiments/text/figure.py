"""Likelihood, calibration and detection of each method, for each number of labels."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .. import plots
from ..intervals import interval

PANELS = {
    "nll": "NLL, nats\n(lower is better)",
    "ece": "calibration error\n(lower is better)",
    "ood_entropy": "AUROC, out of scope\n(higher is better)",
}
COLOURS = {"twins": plots.SERIES[0], "error_bars": plots.SERIES[1]}  # start of a row's name -> colour
OTHERS = "#8a8f98"
# So many times the median: a method with a larger score is off the scale. Only a number shows it.
FAR = {"nll": 2.0, "ece": 6.0}


def draw(runs: pd.DataFrame) -> Figure:
    """A line for each method, with the cheapest at the top, in a block for each number of labels."""
    blocks = [own for _, own in runs.groupby("labels", sort=False)]
    lines = [own["method"].nunique() + 1.0 for own in blocks]
    drawn = Figure(figsize=(11, max(4.4, 1.2 + 0.3 * sum(lines))), layout="constrained")
    axes = drawn.subplots(len(blocks), len(PANELS), sharex="col", sharey="row", squeeze=False, height_ratios=lines)
    for row, own in zip(axes, blocks, strict=True):
        costs = own.groupby("method", sort=False)["cost"].mean().sort_values(kind="stable")
        for panel, score in zip(row, PANELS, strict=True):
            _panel(panel, own, score, list(costs.index))
        row[0].set_yticks(range(len(costs)), [f"{method}  {cost:.1f}" for method, cost in costs.items()])
        row[0].set_ylim(len(costs) - 0.5, -0.5)
        row[0].set_ylabel(f"{own['labels'].iloc[0]} queries per intent")
    for panel, title in zip(axes[0], PANELS.values(), strict=True):
        panel.set_title(title)
    drawn.supxlabel("Behind each name: time relative to a plain adapter", fontsize=11)
    return drawn


def _panel(panel: Axes, runs: pd.DataFrame, score: str, methods: list[str]) -> None:
    far = FAR.get(score, math.inf) * runs.groupby("method")[score].mean().median()
    for place, method in enumerate(methods):
        colour = next((own for start, own in COLOURS.items() if method.startswith(start)), OTHERS)
        mean, half = interval(runs.loc[runs["method"] == method, score])
        if mean > far:
            text = f"{mean:.2f} \N{RIGHTWARDS ARROW}"
            panel.text(0.99, place, text, color=colour, ha="right", va="center", transform=panel.get_yaxis_transform())
            continue
        panel.errorbar(mean, place, xerr=None if pd.isna(half) else half, fmt="o", color=colour, ms=6, lw=1.4)
    panel.grid(axis="x", alpha=0.5)
