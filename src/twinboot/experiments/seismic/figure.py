"""Figure 6, the spread of each method over the seeds, and the coverage of intervals."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from .. import plots
from ..runner.experiment import Tables
from .run import PENALTIES, ROWS, SHOWN, main
from .scores import LEVELS


def draw(tables: Tables) -> Figure:
    drawn = Figure(figsize=(13, 9), layout="constrained")
    grid = drawn.add_gridspec(2, 1, height_ratios=[1, 1.6])
    above, below = drawn.add_subfigure(grid[0]), drawn.add_subfigure(grid[1])
    _fields(above, main(tables["maps"]))
    left, right = below.subplots(1, 2, width_ratios=[1.7, 1])
    _errors(left, main(tables["runs"]))
    _coverage(right, main(tables["deciles"], SHOWN))
    below.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="medium")
    return drawn


def _fields(drawn: SubFigure, cells: pd.DataFrame) -> None:
    """Two maps of the field and two of its errors, each pair with one scale and one bar."""
    cells = cells.assign(error=(cells["field"] - cells["truth"]).abs())
    limit = cells["truth"].abs().max()
    largest = cells["error"].quantile(0.98)
    signed, positive = ("RdBu_r", -limit, limit), ("magma", 0.0, largest)
    maps = {
        "truth": ("Truth", signed, None),
        "field": ("Reconstruction", signed, "field v"),
        "error": ("Absolute error", positive, None),
        "sigma": ("Sigma", positive, "error, and sigma, of v"),
    }
    for axes, (column, (name, (colours, low, high), scale)) in zip(drawn.subplots(1, 4), maps.items(), strict=True):
        picture = axes.imshow(cells.pivot(index="down", columns="across", values=column), colours, vmin=low, vmax=high)
        axes.set(title=name, xlabel="cell", xticks=[0, 10, 20], yticks=[0, 10, 20])
        if scale:
            bar = axes.inset_axes((1.06, 0, 0.07, 1))  # as tall as the map
            more = "max" if colours == "magma" else "neither"
            drawn.colorbar(picture, cax=bar, label=scale, extend=more, ticks=MaxNLocator(5))


def _errors(axes: Axes, runs: pd.DataFrame) -> None:
    methods = [*ROWS, *PENALTIES]
    for place, method in enumerate(methods):
        own = runs[runs["method"] == method]["error"]
        colour = plots.SERIES["standard" not in method] if "Tikhonov" not in method else plots.SERIES[2]
        axes.plot([own.mean()], [place], "|", color=plots.ink(), ms=18, mew=1.5)
        axes.plot(own, [place] * len(own), "o", color=colour, ms=5, alpha=0.65, mew=0)
    for colour, name in zip(plots.SERIES, ("plain Adam", "Twin-Boot", "a penalty"), strict=False):
        axes.plot([], [], "o", color=colour, ms=6, label=f"{name}, each seed")
    axes.plot([], [], "|", color=plots.ink(), ms=12, mew=1.5, label="mean over the seeds")
    axes.set(title="Error of the field", xscale="log", xlabel="mean square error")
    axes.set_yticks(range(len(methods)), [_said(method) for method in methods])
    axes.set_xticks(*plots.log_ticks(*axes.get_xlim()))
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.grid(axis="x")


def _said(method: str) -> str:
    """The name of a row for who has not read the table: stored runs have the short one."""
    return method.replace("standard", "plain Adam").replace(" u,", " response u,")


def _coverage(axes: Axes, parts: pd.DataFrame) -> None:
    for level, colour in zip(LEVELS, plots.SERIES, strict=False):
        axes.plot(parts["decile"], parts[f"covered_{level}"], "o-", color=colour, label=f"{level:.0%} intervals")
        axes.axhline(level, color=colour, ls=":", lw=1)
    axes.set(
        title="Intervals that hold the truth",
        xlabel="decile of sigma",
        ylabel="share of the cells",
        ylim=(0, 1),
        xticks=range(1, 11),
    )
    axes.legend(title="dotted: as it should be", loc="lower right", fontsize="medium")
