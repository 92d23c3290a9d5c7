"""Each method against the single network with a hold-out, and the coverage of its intervals, for each set."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .. import plots
from ..intervals import interval
from .methods import LEVEL, METHODS

COLOURS = dict(zip(METHODS, (plots.SERIES[0], plots.SERIES[3], plots.SERIES[1], plots.SERIES[2]), strict=True))
MARKERS = dict(zip(METHODS, "osD^", strict=True))


def draw(runs: pd.DataFrame) -> Figure:
    sets = list(runs["set"].unique())
    drawn = Figure(figsize=(14.5, 2.2 + 0.6 * len(sets)), layout="constrained")
    errors, likelihoods, covered = drawn.subplots(1, 3, sharey=True)
    others = [method for method in METHODS if method != "single"]
    _dots(errors, runs, others, _percent)
    _dots(likelihoods, runs, others, lambda own, method: own["nll"][method] - own["nll"]["single"])
    _dots(covered, runs, list(METHODS), lambda own, method: 100 * own["covered"][method])
    for axes, linear, ticks in ((errors, 5.0, (-20, -5, 0, 5, 20, 100)), (likelihoods, 0.1, (-1, -0.1, 0, 0.1, 1))):
        axes.axvline(0, color=COLOURS["single"], lw=1.5)
        axes.set_xscale("symlog", linthresh=linear)  # two sets differ far more than the others
        axes.set_xticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
        axes.minorticks_off()
        strip = axes.axvspan(-linear, linear, color=plots.ink(), alpha=0.06, lw=0)
    covered.axvline(100 * LEVEL, color=plots.ink(), ls=":", lw=1.5, label=f"{LEVEL:.0%}, as it should be")
    errors.set(yticks=range(len(sets)), yticklabels=sets, ylim=(len(sets) - 0.5, -0.5))
    below = "\nlinear up to ±{}, then logarithmic"
    errors.set(title="RMSE against the single network's", xlabel="difference, % (left: lower error)" + below.format(5))
    nats = "difference, nats (left: better)" + below.format(0.1)
    likelihoods.set(title="NLL against the single network's", xlabel=nats)
    covered.set(title=f"Test rows in their {LEVEL:.0%} interval", xlabel="%")
    handles, labels = covered.get_legend_handles_labels()
    labels = [f"{label} (the line at 0)" if label == METHODS["single"] else label for label in labels]
    drawn.legend(
        [*handles, strip],
        [*labels, "even axis; beyond, logarithmic"],
        title="Bars: 95 % interval over the splits",
        loc="outside lower center",
        ncols=3,
        fontsize=11,
    )
    return drawn


def _percent(own: pd.DataFrame, method: str) -> pd.Series:
    """The difference of the RMSE, relative to the mean of the single network's."""
    single = own["rmse"]["single"]
    return 100 * (own["rmse"][method] - single) / single.mean()


def _dots(axes: Axes, runs: pd.DataFrame, methods: list[str], value: Callable[[pd.DataFrame, str], pd.Series]) -> None:
    """For each set, a dot with a 95 % interval for each method, one below the other."""
    for place, (_, own) in enumerate(runs.groupby("set", sort=False)):
        wide = own.pivot(index="split", columns="method")
        for row, method in enumerate(methods):
            mean, half = interval(value(wide, method))
            height = place + 0.2 * (row - (len(methods) - 1) / 2)
            label = METHODS[method] if place == 0 else None
            marker, colour = MARKERS[method], COLOURS[method]
            axes.errorbar(mean, height, xerr=half, fmt=marker, color=colour, ms=5, lw=1.5, label=label)
        if place:
            axes.axhline(place - 0.5, color=plots.ink(), lw=0.4, alpha=0.3)
    axes.grid(axis="x", alpha=0.5)
