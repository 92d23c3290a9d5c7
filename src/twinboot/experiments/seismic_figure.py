"""Figure 6, the spread of each method over the seeds, and the coverage of intervals."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from .. import plots
from .experiment import Tables
from .scores import LEVELS
from .seismic_run import PENALTIES, ROWS, SHOWN, main


def draw(tables: Tables) -> Figure:
    drawn = Figure(figsize=(14.5, 8.6), layout="constrained")
    grid = drawn.add_gridspec(2, 1, height_ratios=[1, 1.25])
    above, below = drawn.add_subfigure(grid[0]), drawn.add_subfigure(grid[1])
    _fields(above, main(tables["maps"]))
    left, right = below.subplots(1, 2, width_ratios=[1.7, 1])
    _errors(left, main(tables["runs"]))
    _coverage(right, main(tables["deciles"], SHOWN))
    return drawn


def _fields(drawn: SubFigure, cells: pd.DataFrame) -> None:
    cells = cells.assign(error=(cells["field"] - cells["truth"]).abs())
    limit = cells["truth"].abs().max()
    largest = cells["error"].quantile(0.98)
    shades = {"truth": ("RdBu_r", -limit, limit), "field": ("RdBu_r", -limit, limit)}
    names = {"truth": "truth", "field": "reconstruction", "error": "absolute error", "sigma": "sigma"}
    for axes, (column, name) in zip(drawn.subplots(1, 4), names.items(), strict=True):
        colours, low, high = shades.get(column, ("magma", 0.0, largest))
        picture = axes.imshow(cells.pivot(index="down", columns="across", values=column), colours, vmin=low, vmax=high)
        bar = axes.inset_axes((1.04, 0, 0.05, 1))  # as tall as the map
        label = "of the field v" if colours == "magma" else "field v"
        drawn.colorbar(picture, cax=bar, label=label, extend="max" if colours == "magma" else "neither")
        axes.set(title=name, xlabel="cell", xticks=[0, 10, 20], yticks=[0, 10, 20])


def _errors(axes: Axes, runs: pd.DataFrame) -> None:
    methods = [*ROWS, *PENALTIES]
    for place, method in enumerate(methods):
        own = runs[runs["method"] == method]["error"]
        colour = plots.SERIES["standard" not in method] if "Tikhonov" not in method else plots.SERIES[2]
        axes.plot([own.mean()], [place], "|", color=plots.ink(), ms=18, mew=1.5)
        axes.plot(own, [place] * len(own), "o", color=colour, ms=4, alpha=0.5, mew=0)
    for colour, name in zip(plots.SERIES, ("a plain optimizer", "Twin-Boot", "a penalty"), strict=False):
        axes.plot([], [], "o", color=colour, ms=5, label=f"{name}, a dot for each seed")
    axes.plot([], [], "|", color=plots.ink(), ms=12, mew=1.5, label="mean over the seeds")
    axes.legend(loc="upper left")
    axes.set(xscale="log", xlabel="error of the field (mean square)", yticks=range(len(methods)), yticklabels=methods)
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", alpha=0.5)


def _coverage(axes: Axes, parts: pd.DataFrame) -> None:
    for level, colour in zip(LEVELS, plots.SERIES, strict=False):
        axes.plot(parts["decile"], parts[f"covered_{level}"], "o-", color=colour, label=f"{level:.0%} intervals")
        axes.axhline(level, color=colour, ls=":", lw=1)
    axes.set(
        xlabel="decile of sigma",
        ylabel="share of cells whose interval holds the truth",
        ylim=(0, 1),
        xticks=range(1, 11),
    )
    axes.legend(title="dotted: what it should be", loc="lower right")
