"""Figures 4 and 5, and where each method stands in likelihood and calibration."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .. import plots
from .experiment import Tables


def draw(tables: Tables, base: str, ours: str) -> Figure:
    drawn = Figure(figsize=(16, 11), layout="constrained")
    grid = drawn.add_gridspec(2, 2, width_ratios=[1, 1.15])
    above, left, right = (drawn.add_subfigure(grid[place]) for place in (np.s_[0, :], np.s_[1, 0], np.s_[1, 1]))
    curves, *diagrams = above.subplots(1, 3)
    _curves(curves, tables["curves"])
    for axes, name, colour in zip(diagrams, (base, ours), plots.TWINS, strict=True):
        _reliability(axes, tables["bins"][tables["bins"]["row"] == name], name, colour)
    if "sigma" in tables:
        _sigma(left.subplots(1, 2), tables["sigma"])
    _standing(right.subplots(1, 2, sharey=True), tables["rows"])
    return drawn


def _curves(axes: Axes, curves: pd.DataFrame) -> None:
    shown = {"hold-out": "single model", "twins": "mean of the twins"}
    for (method, name), colour in zip(shown.items(), plots.TWINS, strict=True):
        own = curves[curves["method"] == method].groupby("epoch")
        if len(own):
            axes.plot(own["train"].mean(), "--", color=colour, label=f"{name}, training images")
            axes.plot(own["validation"].mean(), "-", color=colour, label=f"{name}, others")
    axes.set(title="Accuracy", xlabel="epoch", ylabel="accuracy", ylim=(None, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right")


def _reliability(axes: Axes, bins: pd.DataFrame, name: str, colour: str) -> None:
    """The mean over the seeds, weighted by the images in a bin; the width of a bar's colour says how many they are."""
    if bins.empty:  # of a method that was not asked for
        axes.set_axis_off()
        return
    weighted = bins.assign(**{c: bins[c] * bins["share"] for c in ("confidence", "accuracy")}).groupby("bin").sum()
    share = weighted["share"]
    confidence, accuracy = (weighted[c][share > 0] / share[share > 0] for c in ("confidence", "accuracy"))
    axes.plot([0, 1], [0, 1], color=plots.ink(), lw=1, ls=":")
    axes.bar(
        (share.index + 0.5) / len(share),
        share / share.max() * 0.25,
        0.9 / len(share),
        color=colour,
        alpha=0.25,
        label="share of the images (not to scale)",
    )
    axes.plot(confidence, accuracy, "o-", color=colour, label="accuracy")
    axes.set(title=name[0].upper() + name[1:], xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    axes.legend(loc="upper left")


def sigma_by_layer(sigma: pd.DataFrame) -> pd.DataFrame:
    """A row for each layer and a column for each epoch, the mean over seeds, of the usual twins or the first others."""
    method = "twins" if (sigma["method"] == "twins").any() else sigma["method"].iloc[0]
    return sigma[sigma["method"] == method].groupby(["layer", "epoch"], sort=False)["sigma"].mean().unstack("epoch")


def _sigma(both: Sequence[Axes], sigma: pd.DataFrame) -> None:
    over, final = both
    mean = sigma_by_layer(sigma)
    colours = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(mean)))
    for (layer, values), colour in zip(mean.iterrows(), colours, strict=True):
        over.plot(values, color=colour, label=layer)
    over.xaxis.set_major_locator(MaxNLocator(integer=True))
    over.set(title="Sigma of each layer", xlabel="epoch", ylabel="sigma", ylim=(0, None))
    final.barh(range(len(mean)), mean.iloc[:, -1], color=colours)
    final.set(title="Sigma at the end", xlabel="sigma", yticks=range(len(mean)), yticklabels=mean.index)
    final.invert_yaxis()


def _standing(both: Sequence[Axes], rows: pd.DataFrame) -> None:
    likelihood, calibration = both
    names = list(dict.fromkeys(rows["row"]))
    shown = {"nll": (likelihood, "negative log-likelihood (nats)"), "ece": (calibration, "calibration error (ECE)")}
    for column, (axes, title) in shown.items():
        for place, name in enumerate(names):
            own = rows[rows["row"] == name][column]
            colour = plots.TWINS[name.startswith("Twin-Boot")]
            axes.plot(own, [place] * len(own), "o", color=colour, ms=4, alpha=0.5, mew=0)
            axes.plot([own.mean()], [place], "|", color=plots.ink(), ms=14, mew=2)
        axes.set(xlabel=title, yticks=range(len(names)), yticklabels=names)
        axes.grid(axis="both", alpha=0.5)
    likelihood.invert_yaxis()
