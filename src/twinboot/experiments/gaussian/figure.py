"""The four panels of the Gaussian experiment."""

from __future__ import annotations

import math

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .. import plots
from ..runner.experiment import Tables
from .run import Config, pooled, relative_variance, summary


def figure(config: Config, tables: Tables) -> Figure:
    """One run, the estimates against the truth, their bias, and their spread against their cost."""
    drawn = Figure(figsize=(12.5, 10.5), layout="constrained")
    axes = drawn.subplots(2, 2)
    _draw_path(axes[0, 0], config, tables)
    _draw_spread(axes[0, 1], config, tables["estimates"])
    _draw_bias(axes[1, 0], config, tables["estimates"])
    _draw_cost(axes[1, 1], config, tables["estimates"])
    return drawn


def _draw_path(axes: Axes, config: Config, tables: Tables) -> None:
    path, optima = tables["path"], tables["optima"]
    for twin, color in enumerate(plots.TWINS, start=1):
        own = path[path["twin"] == twin]
        axes.plot(own["w1"], own["w2"], "o-", ms=3, color=color, lw=1.4, label=f"twin {twin}")
        best = optima[optima["twin"] == twin]
        axes.plot(best["w1"], best["w2"], "*", color=color, ms=15, mec="white", label=f"best for sample {twin}")
    mean = path.groupby("step")[["w1", "w2", "sigma"]].mean()
    for _, row in pd.concat([mean[:: config.stride], mean[-1:]]).iterrows():
        plots.circle(axes, (row["w1"], row["w2"]), row["sigma"], color=plots.ink(), alpha=0.6, lw=1)
    truth = math.sqrt(config.variance / config.points)
    plots.circle(axes, (0, 0), truth, color=plots.TRUTH, lw=1.8, ls="--")
    axes.plot(0, 0, "+", color=plots.TRUTH, ms=13, mew=2, label="true mean; dashed: true $\\sigma$")
    label = f"estimated $\\sigma$, every {config.stride} steps and last"
    axes.plot([], [], "o", mfc="none", color=plots.ink(), alpha=0.6, ms=10, label=label)
    axes.set(
        title=f"One run of {mean.index.max()} steps, M = {config.points}",
        xlabel="$w_1$",
        ylabel="$w_2$",
        aspect="equal",
    )
    axes.set_adjustable("datalim")
    axes.legend(loc="upper right")


def _draw_spread(axes: Axes, config: Config, estimates: pd.DataFrame) -> None:
    """Each run's sigma, and the quantiles of theory: sigma^2 / tau^2 is exponential for two twins and two weights."""
    own = estimates[estimates["estimator"] == "twins"]
    truth, sigma = (config.variance / own["size"]).pow(0.5), own["sigma2"].pow(0.5)
    axes.plot(truth, sigma, "o", ms=3, mew=0, alpha=0.15, color=plots.SERIES[0])
    axes.plot([], [], "o", ms=5, color=plots.SERIES[0], alpha=0.5, label=f"two twins, each of {config.seeds} data sets")
    by_size = sigma.groupby(truth.to_numpy())
    rms = by_size.apply(lambda s: math.sqrt((s**2).mean()))
    axes.plot(rms.index, rms, "o", ms=8, color=plots.SERIES[0], mec="white", label="their root mean square")
    quantiles = by_size.quantile([0.1, 0.9]).unstack()
    for level in (0.1, 0.9):
        axes.plot(quantiles.index, quantiles[level], "_", ms=13, mew=2, color=plots.SERIES[1])
    axes.plot([], [], "_", ms=13, mew=2, color=plots.SERIES[1], label="their 10 % and 90 % quantiles")
    line = torch.tensor([truth.min() * 0.8, truth.max() * 1.25])
    axes.plot(line, line, "--", color=plots.TRUTH, lw=1.5, label="true $\\sigma = \\sigma_{data} / \\sqrt{M}$")
    for level in (0.1, 0.9):
        label = "10 % and 90 % in theory" if level == 0.1 else None
        axes.plot(line, line * math.sqrt(-math.log(1 - level)), ":", color=plots.TRUTH, lw=1.2, label=label)
    axes.set(
        xscale="log", yscale="log", title=f"Estimate against truth, M from {max(config.sizes)} to {min(config.sizes)}"
    )
    axes.set(xlabel="true $\\sigma = \\sigma_{data} / \\sqrt{M}$", ylabel="estimated $\\sigma$")
    axes.set_ylim(min(float(line[0]) / 12, sigma.min() / 1.5), float(line[1]) * 4)
    axes.set_xticks(rms.index, [f"{x:.2g}" for x in rms.index])
    axes.minorticks_off()
    axes.legend(loc="lower right")


def _draw_bias(axes: Axes, config: Config, estimates: pd.DataFrame) -> None:
    found = summary(config, estimates)
    shown = ["twins", "twins, constant rate", "twins, few steps", *(f"bootstrap {b}" for b in config.replicas[-1:])]
    axes.axhline(1, color=plots.TRUTH, ls="--", lw=1.5, label="$\\sigma$ of the bootstrap")
    for i, (name, color) in enumerate(zip(shown, plots.SERIES, strict=False)):
        own = found[found["estimator"] == name]
        root = own["mean"].pow(0.5)
        sizes = own["size"] * 1.06 ** (i - 1.5)  # side by side
        axes.errorbar(sizes, root, own["error"] / root, fmt="o", ms=5, color=color, capsize=3, label=name)
        axes.plot(own["size"], own["expected"].pow(0.5), color=color, lw=1, alpha=0.8)
    axes.plot([], [], color=plots.ink(), lw=1, label="lines: closed form")
    axes.set(xscale="log", xlabel="number of data M", ylabel="rms $\\sigma$ / $\\sigma$ of the bootstrap")
    axes.set_title("Bias of the estimate")
    axes.set_ylim(min(0.7, axes.get_ylim()[0]), max(1.35, axes.get_ylim()[1] * 1.1))
    axes.set_xticks(config.sizes, map(str, config.sizes))
    axes.minorticks_off()
    axes.grid(alpha=0.5)
    axes.legend(loc="upper right", ncols=2)


def _draw_cost(axes: Axes, config: Config, estimates: pd.DataFrame) -> None:
    found = pooled(config, estimates).dropna()
    trainings = torch.logspace(math.log10(2), math.log10(max((250, *config.replicas))), 100).tolist()
    theory = [sum(relative_variance(b, size) for size in config.sizes) / len(config.sizes) for b in trainings]
    axes.plot(trainings, theory, color=plots.ink(), lw=1, label="theory, two weights")
    for weights in (100, 10_000):
        axes.plot(2, 2 / weights, "o", color=plots.SERIES[0], ms=9, mfc="none")
        text = f"two twins, a group of {weights:,} weights (theory)"
        axes.annotate(text, (2, 2 / weights), (8, -3), textcoords="offset points", fontsize=9)
    for name, color in (("twins", plots.SERIES[0]), ("bootstrap", plots.SERIES[3])):
        own = found[found["estimator"].str.startswith(name)]
        axes.plot(own["trainings"], own["variance"], "o", ms=9, color=color, label=f"{name}, measured")
    axes.set(
        xscale="log", yscale="log", xlabel="cost: trainings of the model", ylabel="relative variance of $\\sigma^2$"
    )
    axes.set_title("Spread of one estimate, and its cost")
    axes.set_xticks([2, 10, 50, 200], ["2", "10", "50", "200"])
    axes.minorticks_off()
    axes.grid(alpha=0.5)
    axes.legend(loc="upper right")
