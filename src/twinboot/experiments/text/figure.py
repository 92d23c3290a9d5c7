"""NLL, calibration and detection against the cost of each method, for each number of labels."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from .. import plots
from ..intervals import interval

PANELS = {
    "nll": "NLL, nats (lower is better)",
    "ece": "Calibration error (lower is better)",
    "ood_entropy": "AUROC of queries out of scope (higher is better)",
}
# Start of a row's name -> colour.
COLOURS = {
    "twins": plots.SERIES[0],
    "error_bars": plots.SERIES[1],
    "MC dropout": plots.SERIES[2],
    "ensemble": plots.SERIES[3],
    "LoRA": plots.TRUTH,
    "Laplace": "#a0703c",
    "IVON": "#8a8f98",
    "MonteCLoRA": "#1aa7b8",
    "PVeRA": "#c2b015",
}
MARKERS = "oDsvP^"  # of rows with the same colour, in their order


def draw(runs: pd.DataFrame) -> Figure:
    """A row of panels for each number of labels."""
    labels, methods = list(runs["labels"].unique()), list(runs["method"].unique())
    drawn = Figure(figsize=(14.5, 2.0 + 3.7 * len(labels)), layout="constrained")
    axes = drawn.subplots(len(labels), len(PANELS), sharex=True, squeeze=False)
    for line, number in zip(axes, labels, strict=True):
        for panel, score in zip(line, PANELS, strict=True):
            _panel(panel, runs[runs["labels"] == number], score, methods)
        line[0].set_ylabel(f"{number} queries per intent")
    for panel, title in zip(axes[0], PANELS.values(), strict=True):
        panel.set_title(title)
    for panel in axes[-1]:
        panel.set_xlabel("time relative to a plain adapter")
    handles, names = axes[0][0].get_legend_handles_labels()
    drawn.legend(handles, names, loc="outside lower center", ncols=4, fontsize=10)
    return drawn


def _panel(panel: Axes, runs: pd.DataFrame, score: str, methods: list[str]) -> None:
    seen: dict[str, int] = {}
    for method in methods:
        colour = next(colour for start, colour in COLOURS.items() if method.startswith(start))
        marker = MARKERS[seen.setdefault(colour, 0) % len(MARKERS)]
        seen[colour] += 1
        own = runs[runs["method"] == method]
        if own.empty:
            continue
        mean, half = interval(own[score])
        bar = None if pd.isna(half) else [[min(half, 0.9 * mean)], [half]]  # it ends above 0 on a logarithmic axis
        panel.errorbar(own["cost"].mean(), mean, yerr=bar, fmt=marker, color=colour, ms=7, lw=1.2, label=method)
    if score in ("nll", "ece"):  # one method may be far off
        panel.set_yscale("log")
        panel.set_yticks(*plots.log_ticks(*panel.get_ylim()))
        panel.yaxis.set_minor_locator(NullLocator())
    panel.set_xscale("log")
    low, high = 0.8 * runs["cost"].min(), 1.2 * runs["cost"].max()
    panel.set_xticks(*plots.log_ticks(low, high))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.5)
