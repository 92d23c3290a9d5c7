"""Figure 2: on a landscape with two wells, which reset keeps the twins in one, and is sigma then the local uncertainty?

The twins start on the ridge between the wells, where each bootstrap sample pulls its twin to one side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor
from torch.func import vmap

from .. import plots
from ..intervals import formatted
from ..runner.experiment import Part, Tables, Tick, Verdict, agrees, overall, status
from .landscape import WELLS, Reset, Setting, exact_line, mean_landscape, rms, steps, train

TITLE = "Two wells: one basin kept or lost"
QUESTION = "Do resets keep the twins in one well, so that their distance is the uncertainty there and no more?"
CAPTION = (
    "The same data, start and order of batches in each panel: the first run in which the twins without resets end in "
    "different wells, if there is one. Triangles: the twins' mean at a reset. Contours: the mean loss for endless "
    "data. Circles: sigma around the twins' mean, every 40 steps (thin) and at the end (thick). Squares: the end of "
    "each path."
)
MODES: dict[Reset, str] = {
    "none": "no reset",
    "mean": "mean reset",
    "sample": "sampling reset",
    "centered": "centered reset",
}
STRIDE = 40  # steps between two circles
STRAY = 5  # times the exact sigma: of the twins at the bottom of a well, a share of e^-25 is that far apart
MEDIAN = math.sqrt(math.log(2))  # of sigma / rms: sigma^2 of two twins with two equal weights is exponential


@dataclass(frozen=True, kw_only=True)
class Config(Setting):
    """Figure 2: twins that start on the ridge between two wells, with each kind of reset."""

    size: int = 100
    """How many data, M. Not stated; few, so that sigma can be seen in the picture."""
    start: tuple[float, float] = (0.0, 0.8)
    """Where the twins start. Not stated; on the ridge, at the rim of the wells."""
    seeds: int = 1000
    """Runs for each kind of reset, each with its own data."""


QUICK = Config(seeds=200)


def parts(config: Config) -> list[Part]:
    exact_line(config)  # fails now, rather than after the work, if the noise leaves no two wells
    return [Part("runs", len(MODES) * steps(config), partial(_runs, config))]


def _runs(config: Config, tick: Tick) -> dict[str, pd.DataFrame]:
    trained = {mode: train(config, mode, tick, keep_path=True) for mode in MODES}
    first, second = trained["none"].wells(config.width)
    apart = (first != second) & (first >= 0) & (second >= 0)
    shown = int(apart.float().argmax())  # the first run that splits; run 0 if none does
    names, runs, paths = {-1: "neither", 0: "left", 1: "right"}, [], []
    for mode, run in trained.items():
        well_1, well_2 = ([names[w] for w in twin.tolist()] for twin in run.wells(config.width))
        ends = {"seed": range(config.seeds), "well_1": well_1, "well_2": well_2, "sigma": run.sigma.tolist()}
        runs.append(pd.DataFrame({"reset": mode, **ends}))
        columns = {"reset": mode, "run": shown, "step": range(len(run.path)), "sigma": run.path_sigma[:, shown]}
        for twin, w in enumerate(run.path[:, :, shown].unbind(1), start=1):
            paths.append(pd.DataFrame({**columns, "twin": twin, "w1": w[:, 0], "w2": w[:, 1]}))
    return {"runs": pd.concat(runs, ignore_index=True), "paths": pd.concat(paths, ignore_index=True)}


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """For each reset: the share of runs whose twins end in different wells, or with a twin in neither, and sigma."""
    lost = (runs[["well_1", "well_2"]] == "neither").any(axis=1)
    apart = (runs["well_1"] != runs["well_2"]) & ~lost
    together = runs["sigma"].where(~apart & ~lost)
    columns = {"apart": apart, "lost": lost, "together": together, "split": runs["sigma"].where(apart)}
    grouped = runs.assign(**columns).groupby("reset", sort=False)
    found = grouped.agg(apart=("apart", "mean"), lost=("lost", "mean"), sigma_median=("together", "median"))
    # Where no or every run is apart, chance could still have hidden three.
    deviation, number = (found["apart"] * (1 - found["apart"])).pow(0.5), grouped.size().pow(0.5)
    found["apart_error"] = deviation.clip(lower=1.5 / number) / number
    found["sigma_apart"] = [rms(own["split"])[0] for _, own in grouped]
    found[["sigma", "sigma_error"]] = [rms(own["together"]) for _, own in grouped]
    return found


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    found = summary(tables["runs"])
    exact = exact_line(config)
    shown = formatted(
        found.assign(title=[MODES[reset] for reset in found.index], share=[_share(row) for _, row in found.iterrows()]),
        {
            "reset": ("title",),
            "twins in different wells": ("share",),
            "a twin in neither": ("lost", "{:.1%}"),
            "rms sigma, same well": ("sigma", "{:.4f}", "sigma_error"),
            "median sigma, same well": ("sigma_median", "{:.4f}"),
            "rms sigma, different wells": ("sigma_apart", "{:.3f}"),
        },
    )
    title = f"{config.seeds} runs for each reset, ± standard error; exact sigma of one well: rms {exact:.4f}, "
    title += f"median {MEDIAN * exact:.4f}{_strays(tables['runs'], STRAY * exact)}"
    return {title: shown}


def _strays(runs: pd.DataFrame, limit: float) -> str:
    """A note on runs whose twins are nearest to the same well but still too far apart to have reached it."""
    strays = runs[(runs["well_1"] == runs["well_2"]) & (runs["well_1"] != "neither") & (runs["sigma"] > limit)]
    told = "; ".join(
        f"{MODES[mode]}: sigma {', '.join(own.sort_values().map('{:.2f}'.format))}"
        for mode in MODES
        if len(own := strays[strays["reset"] == mode]["sigma"])
    )
    note = "; the rms includes runs whose twins are still on their way into the same well"
    return f"{note} ({told})" if told else ""


def _share(row: pd.Series) -> str:
    return f"{row['apart']:.1%} ± {row['apart_error']:.1%}" if row["apart"] > 0 else "none"


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    found, exact = summary(tables["runs"]), exact_line(config)
    none, mean, sample, centered = (found.loc[mode] for mode in MODES)
    few = config.seeds < 50
    # The density of sigma at its median is MEDIAN / exact, by the exponential distribution of its square.
    median_error = exact / (2 * MEDIAN * math.sqrt(config.seeds))
    most = max(kind["apart"] + 2 * kind["apart_error"] for kind in (mean, sample))
    split = f" Sigma is then {none['sigma_apart']:.2f} instead of {exact:.3f}: not half the distance of the wells in "
    split += "each direction, because noise of that size pulls the twins inward."
    return [
        Verdict(
            "Without a reset the twins end in different wells, and sigma is the distance between them.",
            "Section 4.1, Figure 2 left",
            status(none["apart"] > 0.9, none["apart"] > 0, few),
            f"In {_share(none)} of the runs. Both samples come from the same data, so "
            "they mostly pull to the same side: a third would split if the first pull alone decided."
            + (split if none["apart"] > 0 else ""),
        ),
        Verdict(
            "Periodic resets keep the twins in one well.",
            "Section 4.1, Figure 2 middle and right",
            status(most < 0.01, most < none["apart"], few),
            f"In different wells end: {_share(mean)} with the mean reset, {_share(sample)} with the sampling reset, "
            f"{_share(centered)} with the centered one, of {config.seeds} each. A "
            "pair that has split has its mean near the ridge: the mean reset puts both twins there, the sampling reset "
            "draws both from a distribution as wide as the split, the centered one puts them on opposite sides again.",
        ),
        Verdict(
            "The distance of twins in one well is a measure of the local uncertainty.",
            "Section 4.1, Figure 2 right",
            "undecided" if few else overall([agrees(sample["sigma_median"], median_error, MEDIAN * exact, margin=0.1)]),
            f"With the sampling reset, twins that ended in one well have rms sigma {sample['sigma']:.4f} ± "
            f"{sample['sigma_error']:.4f}, exact for many data {exact:.4f}; median {sample['sigma_median']:.4f}, exact "
            f"{MEDIAN * exact:.4f}. The few runs that are still on their way to a well weigh in the first, not in the "
            "second.",
        ),
    ]


def figure(config: Config, tables: Tables) -> Figure:
    drawn = Figure(figsize=(12.5, 9.0), layout="constrained")
    found = summary(tables["runs"])
    grid = drawn.subplots(2, 2, sharex=True, sharey=True)
    height = _landscape(config)
    for axes, mode in zip(grid.flat, MODES, strict=True):
        _draw(axes, config, tables["paths"], mode, height)
        share = f"{found.loc[mode, 'apart']:.1%}" if found.loc[mode, "apart"] > 0 else "none"
        axes.set_title(f"{MODES[mode].capitalize()}: {share} of {config.seeds} runs end in different wells")
    for axes in grid[1]:
        axes.set_xlabel("$w_1$")
    for axes in grid[:, 0]:
        axes.set_ylabel("$w_2$")
    handles, labels = grid[0, 1].get_legend_handles_labels()
    ring = partial(Line2D, [], [], marker="o", mfc="none", ls="none", ms=12, color=plots.ink())
    handles += [ring(alpha=0.35, mew=0.9), ring(mew=1.8), Line2D([], [], color=plots.ink(), lw=0.6, alpha=0.35)]
    labels += [f"$\\sigma$, every {STRIDE} steps", "$\\sigma$ at the end", "mean loss for endless data"]
    drawn.legend(handles, labels, loc="outside lower center", ncols=5)
    return drawn


@cache  # the same on light and dark pages
def _landscape(config: Config) -> tuple[Tensor, Tensor, Tensor]:
    x, y = torch.linspace(-2.0, 2.0, 81, dtype=torch.float64), torch.linspace(-1.2, 1.2, 49, dtype=torch.float64)
    points = torch.cartesian_prod(x, y)
    height = vmap(mean_landscape(config.width, config.noise, config.datum), chunk_size=500)(points)
    return x, y, height.view(len(x), len(y)).T


def _draw(axes: Axes, config: Config, paths: pd.DataFrame, mode: Reset, height: tuple[Tensor, Tensor, Tensor]) -> None:
    axes.contour(*height, levels=12, colors=plots.ink(), linewidths=0.6, alpha=0.35, linestyles="solid")
    axes.plot(*WELLS.T, "+", color=plots.TRUTH, ms=11, mew=2, ls="none", label="the wells, $\\mu_1$ and $\\mu_2$")
    own = paths[paths["reset"] == mode]
    for twin, color in enumerate(plots.TWINS, start=1):
        path = own[own["twin"] == twin]
        axes.plot(path["w1"], path["w2"], color=color, lw=0.9, alpha=0.85, label=f"twin {twin}")
        end = path["w1"].iloc[-1:], path["w2"].iloc[-1:]
        axes.plot(*end, "s", color=color, ms=7, mec="white", ls="none", zorder=5, label=f"twin {twin}, end")
    mean = own.groupby("step")[["w1", "w2", "sigma"]].mean()
    for _, row in mean[::STRIDE].iterrows():
        plots.circle(axes, (row["w1"], row["w2"]), row["sigma"], color=plots.ink(), alpha=0.35, lw=0.9)
    if mode != "none":
        due = [epoch * steps(config) // config.epochs for epoch in config.resets if epoch <= config.epochs]
        reset = mean.loc[due]
        axes.plot(reset["w1"], reset["w2"], "^", color=plots.ink(), ms=6, ls="none", zorder=4, label="mean at a reset")
    last = mean.iloc[-1]
    plots.circle(axes, (last["w1"], last["w2"]), last["sigma"], color=plots.ink(), lw=1.8, zorder=6)
    axes.plot(*config.start, "o", color=plots.ink(), ms=6, ls="none", label="start")
    text = f"final $\\sigma$ {last['sigma']:.3f}, exact in one well {exact_line(config):.3f}"
    box = {"fc": axes.get_facecolor(), "ec": "none", "pad": 2}
    axes.text(0.98, 0.03, text, transform=axes.transAxes, ha="right", fontsize=9, bbox=box)
    axes.set(xlim=(-2, 2), ylim=(-1.2, 1.2), aspect="equal")
