"""Figures 4 and 5, and the accuracy, likelihood and calibration of each method."""

from __future__ import annotations

import textwrap
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from .. import plots
from ..runner.experiment import Tables
from .twins import TWINS

LEAST = 0.005  # share of the images: bins with fewer have no dot
SPREAD = 0.45  # height of the dots of a row, so that they stay clear of other rows
LEFT_OUT = ", last epoch alone"  # rows that matter for their gap, which is not shown
DRAWS, REPEATED = TWINS["twins-draws"][0], "Twin-Boot with repeated samples"  # other draws here are of weights
CURVES = {"hold-out": ("single model", "its hold-out"), "twins": ("mean of the twins", "out-of-bag images")}
BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}  # of a legend
UPRIGHT = 10  # layers whose names fit beside each other


def draw(tables: Tables, base: str, ours: str, more: str) -> Figure:
    """Reliability diagrams are of `base`, of `ours` and its mean, and of `more`, as far as these rows exist."""
    rows = tables["rows"][~tables["rows"]["row"].str.endswith(LEFT_OUT)]
    heights = {"curves": 5.2} | ({"sigma": 4.4} if "sigma" in tables else {})
    heights["rows"] = 1.4 + 0.36 * rows["row"].nunique()
    drawn = Figure(figsize=(15, sum(heights.values())), layout="constrained")
    subfigures = drawn.subfigures(len(heights), 1, height_ratios=list(heights.values()), squeeze=False)[:, 0]
    parts = dict(zip(heights, subfigures, strict=True))
    base, ours = _or_other(base, rows, twins=False), _or_other(ours, rows, twins=True)
    there, others = set(rows["row"]), [ours, f"{ours}, mean", more]
    diagrams = [(row, plots.TWINS[row in others]) for row in (base, *others) if row in there]
    shown = tables["curves"][tables["curves"]["method"].isin(CURVES) & (tables["curves"]["epoch"].max() > 1)]
    panels = list(parts["curves"].subplots(1, len(diagrams) + (len(shown) > 0), squeeze=False)[0])
    if len(shown):
        _curves(panels.pop(0), shown)
    for axes, (row, colour) in zip(panels, diagrams, strict=True):
        _reliability(axes, tables["bins"][tables["bins"]["row"] == row], row, colour)
    if "sigma" in parts:
        _sigma(parts["sigma"], sigma_by_layer(tables["sigma"]))
    _standing(parts["rows"], rows)
    return drawn


def _or_other(wanted: str, rows: pd.DataFrame, twins: bool) -> str:
    """The wanted row, or the first of its kind."""
    alike = [row for row in rows["row"] if row.startswith("Twin-Boot") == twins]
    return wanted if wanted in alike else next(iter(alike), wanted)


def _curves(axes: Axes, curves: pd.DataFrame) -> None:
    for (method, (name, others)), colour in zip(CURVES.items(), plots.TWINS, strict=True):
        own = curves[curves["method"] == method].groupby("epoch")
        if len(own):
            axes.plot(own["train"].mean(), "--", color=colour, label=f"{name}, training images")
            seen = own["validation"].mean()
            axes.plot(seen, "-", color=colour, label=f"{name}, {others}")
            losses = curves[curves["method"] == method].groupby("seed")["loss"]  # on images that are not trained on
            chosen = sorted(set(curves.loc[losses.idxmin(), "epoch"]))
            axes.plot(chosen, seen[chosen], "o", color=colour, mec=plots.ink(), zorder=3)
    axes.plot([], [], "o", mfc="none", mec=plots.ink(), label="chosen epochs")
    axes.set(title="Accuracy while training", xlabel="epoch", ylabel="accuracy", ylim=(None, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(**BELOW)


def _reliability(axes: Axes, bins: pd.DataFrame, name: str, colour: str) -> None:
    """The mean over the seeds, weighted by the images in a bin."""
    weighted = bins.assign(**{c: bins[c] * bins["share"] for c in ("confidence", "accuracy")}).groupby("bin").sum()
    share = weighted["share"] / weighted["share"].sum()
    drawn = share >= LEAST
    confidence, accuracy = (weighted[c][drawn] / weighted["share"][drawn] for c in ("confidence", "accuracy"))
    axes.plot([0, 1], [0, 1], color=plots.ink(), lw=1, ls=":", label="perfect calibration")
    places, label = (share.index + 0.5) / len(share), f"share of images (highest: {share.max():.0%})"
    axes.bar(places, share / share.max() * 0.25, 0.9 / len(share), color=colour, alpha=0.25, label=label)
    label = f"accuracy, bins of {LEAST:.1%} or more"
    axes.plot(confidence, accuracy, "o-", color=colour, clip_on=False, zorder=3, label=label)
    title = textwrap.fill(name[0].upper() + name[1:], 26)
    axes.set(title=title, xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    axes.legend(**BELOW)


def sigma_by_layer(sigma: pd.DataFrame) -> pd.DataFrame:
    """Mean sigma over the seeds, with a row for each layer and a column for each epoch, of `twins` if they ran."""
    method = "twins" if (sigma["method"] == "twins").any() else sigma["method"].iloc[0]
    return sigma[sigma["method"] == method].groupby(["layer", "epoch"], sort=False)["sigma"].mean().unstack("epoch")


def _sigma(drawn: SubFigure, mean: pd.DataFrame) -> None:
    """Over the epochs, if there are several, and at the end."""
    colours = mpl.colormaps["viridis"](np.linspace(0.2, 0.9, len(mean)))  # without the darkest, for dark pages
    *before, final = drawn.subplots(1, 2, width_ratios=[1, 1.6]) if mean.shape[1] > 1 else [drawn.subplots()]
    for over in before:
        for (layer, values), colour in zip(mean.iterrows(), colours, strict=True):
            over.plot(values, color=colour, label=layer)
        over.xaxis.set_major_locator(MaxNLocator(integer=True))
        over.set(title="Sigma of each layer, colours as beside", xlabel="epoch", ylabel="sigma", ylim=(0, None))
    final.bar(range(len(mean)), mean.iloc[:, -1], color=colours)
    final.set(title="Sigma at the end", ylabel="sigma", xlim=(-0.6, len(mean) - 0.4))
    final.set_xticks(range(len(mean)), list(mean.index), rotation=90 if len(mean) > UPRIGHT else 0)


def _standing(drawn: SubFigure, rows: pd.DataFrame) -> None:
    names = list(dict.fromkeys(rows["row"]))
    shown = {
        "accuracy": ("Accuracy", "share that is right, higher is better"),
        "nll": ("Negative log-likelihood", "nats, logarithmic, lower is better"),
        "ece": ("Calibration error", "ECE, logarithmic, lower is better"),
    }
    panels, several = drawn.subplots(1, len(shown), sharey=True), rows["seed"].nunique() > 1
    for axes, (column, (title, unit)) in zip(panels, shown.items(), strict=True):
        for place, name in enumerate(names):
            own = rows[rows["row"] == name][column].to_numpy()
            colour = plots.TWINS[name.startswith("Twin-Boot")]
            ends = place - SPREAD / 2 - 0.1, place + SPREAD / 2 + 0.1
            if several:
                axes.plot([own.mean()] * 2, ends, color=plots.ink(), lw=1.5, zorder=2)
            # One below the other, so that equal values can be seen.
            places = place + np.linspace(-0.5, 0.5, len(own)) * SPREAD if len(own) > 1 else [place]
            axes.plot(own, places, "o", color=colour, ms=5, mew=0, zorder=3)
            if place % 2:  # a strip through all panels
                axes.axhspan(place - 0.5, place + 0.5, color=mpl.rcParams["grid.color"], alpha=0.4, lw=0, zorder=0)
        axes.set(title=title, xlabel=unit)
        if column == "accuracy":
            axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        else:
            axes.set_xscale("log")
            axes.set_xticks(*plots.log_ticks(*axes.get_xlim()))
            axes.minorticks_off()
        axes.grid(axis="x", alpha=0.7)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(names)), [name.replace(DRAWS, REPEATED) for name in names])
    panels[0].set_ylim(len(names) - 0.4, -0.6)  # the first on top
    for colour, who in zip(plots.TWINS, ("others", "Twin-Boot"), strict=True):
        panels[0].plot([], [], "o", color=colour, ms=5, label=f"{who}, a dot for each seed" if several else who)
    if several:
        panels[0].plot([], [], "|", color=plots.ink(), ms=12, mew=1.5, label="mean over the seeds")
    drawn.legend(loc="outside lower right", ncols=3)
