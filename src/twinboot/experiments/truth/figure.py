"""Spread ratio, rank correlation and coverage of each method, for each size and learning rate."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from .. import plots
from ..intervals import interval
from .scores import LEVEL, PLAIN
from .verdicts import COVERED, RATIO

# Start of a row's name -> colour and marker. Of two rows with the same, one is not filled.
STYLES = {
    "fit": (plots.SERIES[0], "o"),
    "error_bars": (plots.SERIES[1], "D"),
    "MC dropout": (plots.SERIES[2], "s"),
    "ensemble": (plots.SERIES[3], "^"),
    "bootstrap": (plots.TRUTH, "v"),
    "IVON": ("#8a8f98", "P"),
    "Laplace": ("#a0703c", "X"),
    "SWAG": ("#1aa7b8", "p"),
}
PANELS: dict[str, tuple[str, tuple[float, float] | None, float | None]] = {  # score -> title, band, line
    "ratio": ("Spread relative to the truth", RATIO, 1.0),
    "rank": ("Rank correlation with the true spread", None, None),
    "covered": (f"Share of inputs in their {LEVEL:.0%} interval", COVERED, LEVEL),
}
HOLLOW = ("error_bars, sigma", "MC dropout", "ensemble of 2", "bootstrap of 2")
WIDTH = 0.8  # of the methods of one size, which are side by side


def draw(found: pd.DataFrame) -> Figure:
    """A row of panels for each learning rate. In a panel, all methods side by side for each size."""
    rows = found[found["method"] != PLAIN]
    sizes, lrs, methods = (sorted(rows["size"].unique()), sorted(rows["lr"].unique()), list(rows["method"].unique()))
    drawn = Figure(figsize=(15.0, 1.8 + 3.2 * len(lrs)), layout="constrained")
    axes = drawn.subplots(len(lrs), len(PANELS), sharex=True, sharey="col", squeeze=False)
    for line, lr in zip(axes, lrs, strict=True):
        for panel, score in zip(line, PANELS, strict=True):
            _panel(panel, rows[rows["lr"] == lr], score, sizes, methods)
        line[0].set_ylabel(f"learning rate {lr:g}")
    for panel, (title, _, _) in zip(axes[0], PANELS.values(), strict=True):
        panel.set_title(title)
    for panel in axes[-1]:
        panel.set_xlabel("samples in the training set")
    _log(axes[0][0], rows["ratio"])
    for panel, score in zip(axes[0][1:], ("rank", "covered"), strict=True):
        panel.set_ylim(min(0.0, rows[score].min() - 0.05), 1.02)
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=11)
    return drawn


def _panel(panel: Axes, rows: pd.DataFrame, score: str, sizes: list[int], methods: list[str]) -> None:
    _, band, right = PANELS[score]
    if band:
        panel.axhspan(*band, color=plots.ink(), alpha=0.1, lw=0)
    if right is not None:
        panel.axhline(right, color=plots.ink(), ls=":", lw=1.2)
    for which, method in enumerate(methods):
        for place, size in enumerate(sizes):
            own = rows[(rows["method"] == method) & (rows["size"] == size)][score]
            mean, half = interval(own)
            x = place + WIDTH * ((which + 0.5) / len(methods) - 0.5)
            label = method if place == 0 else None
            bar = None if pd.isna(half) else _bar(mean, half, score)
            panel.errorbar(x, mean, yerr=bar, ms=6, lw=1.2, label=label, **_style(method))
    for place in range(1, len(sizes)):
        panel.axvline(place - 0.5, color=plots.ink(), lw=0.5, alpha=0.4)
    panel.set_xticks(range(len(sizes)), [f"{size:g}" for size in sizes])
    panel.set_xlim(-0.5, len(sizes) - 0.5)
    panel.grid(axis="y", alpha=0.5)


def _bar(mean: float, half: float, score: str) -> list[list[float]]:
    """On a logarithmic axis a bar ends above 0; no correlation is above 1, and no share below 0 or above 1."""
    if score == "ratio":
        return [[min(half, 0.95 * mean)], [half]]
    return [[half if score == "rank" else min(half, mean)], [min(half, 1 - mean)]]


def _style(method: str) -> dict[str, Any]:
    colour, marker = next(style for start, style in STYLES.items() if method.startswith(start))
    return {"color": colour, "fmt": marker, "mfc": "none" if method in HOLLOW else colour}


def _log(panel: Axes, ratios: pd.Series) -> None:
    low, high = min(0.5, ratios.min() / 1.3), max(2.0, ratios.max() * 1.3)
    panel.set_yscale("log")
    panel.set_ylim(low, high)
    panel.set_yticks(*plots.log_ticks(low, high))
    panel.yaxis.set_minor_locator(NullLocator())
