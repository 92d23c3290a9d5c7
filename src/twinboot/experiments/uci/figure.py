"""Each method against the single network with a hold-out, and the coverage of its intervals, set by set."""

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
    against = [method for method in METHODS if method != "single"]
    _dots(
        errors,
        runs,
        against,
        lambda own, method: (
            100
            * (
                own["rmse"][method] / own["rmse"]["single"].mean()
                - own["rmse"]["single"] / own["rmse"]["single"].mean()
            )
        ),
    )
    _dots(likelihoods, runs, against, lambda own, method: own["nll"][method] - own["nll"]["single"])
    _dots(covered, runs, list(METHODS), lambda own, method: 100 * own["covered"][method])
    for axes, even, ticks in ((errors, 5.0, (-20, -5, 0, 5, 20, 100)), (likelihoods, 0.1, (-1, -0.1, 0, 0.1, 1))):
        axes.axvline(0, color=COLOURS["single"], lw=1.5)
        axes.set_xscale("symlog", linthresh=even)  # two sets differ by far more than all others
        axes.set_xticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
        axes.minorticks_off()
        zone = axes.axvspan(-even, even, color=plots.ink(), alpha=0.06, lw=0)
    covered.axvline(100 * LEVEL, color=plots.ink(), ls=":", lw=1.5, label=f"{LEVEL:.0%}, as it should be")
    errors.set(yticks=range(len(sets)), yticklabels=sets, ylim=(len(sets) - 0.5, -0.5))
    errors.set(
        title="RMSE against the single network's",
        xlabel="difference, % (left: lower error)\nlinear up to ±5, then logarithmic",
    )
    likelihoods.set(
        title="NLL against the single network's",
        xlabel="difference, nats (left: better)\nlinear up to ±0.1, then logarithmic",
    )
    covered.set(title=f"Test rows in their {LEVEL:.0%} interval", xlabel="%")
    handles, labels = covered.get_legend_handles_labels()
    shown = {METHODS["single"]: "single, stopped by a hold-out (the line at 0)"}
    labels = [shown.get(label, label) for label in labels]
    handles.append(zone)
    labels.append("even axis; beyond, logarithmic")
    drawn.legend(
        handles, labels, title="Bars: 95 % interval over the splits", loc="outside lower center", ncols=3, fontsize=11
    )
    return drawn


def _dots(axes: Axes, runs: pd.DataFrame, methods: list[str], value: Callable[[pd.DataFrame, str], pd.Series]) -> None:
    """For each set a dot and a 95 % interval for each method, one below the other."""
    for place, (_, own) in enumerate(runs.groupby("set", sort=False)):
        wide = own.pivot(index="split", columns="method")
        for row, method in enumerate(methods):
            mean, half = interval(value(wide, method))
            axes.errorbar(
                mean,
                place + 0.2 * (row - (len(methods) - 1) / 2),
                xerr=half,
                fmt=MARKERS[method],
                color=COLOURS[method],
                ms=5,
                lw=1.5,
                label=METHODS[method] if place == 0 else None,
            )
        if place:
            axes.axhline(place - 0.5, color=plots.ink(), lw=0.4, alpha=0.3)
    axes.grid(axis="x", alpha=0.5)
