"""Beyond the paper: its seismic task has Gaussian kernels for waves; does what it says hold for the wave equation?

The survey is in `acoustic.py`, the ground in `velocity.py`, the runs in `run.py`; here is what is said of them.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from .. import plots
from ..intervals import with_error
from ..runner.experiment import Status, Tables, Verdict
from .acoustic import DEPTH, places
from .config import QUICK, Config
from .run import LEVEL, METHODS, parts

__all__ = ["CAPTION", "QUESTION", "QUICK", "TITLE", "Config", "figure", "numbers", "parts", "verdicts"]

TITLE = "Full-waveform inversion"
QUESTION = "Does sigma show where a section found from seismic records is wrong, and is the section better?"
CAPTION = (
    "The first run. Stars: shots; triangles: receivers, which lie as deep as the shots. What was found, its sigma and "
    "its error are those of the centered reset. Bottom right: the error of each run, and a bar for their mean."
)
SHOWN = "centered"  # the default of `invert`
FEW = 3  # runs, below which a standard error says little


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """For each method the mean over runs of each column, and its standard error as `COLUMN_error`."""
    grouped = runs.drop(columns="run").groupby("method", sort=False)
    return pd.concat([grouped.mean(), grouped.sem().add_suffix("_error")], axis=1)


def gain(runs: pd.DataFrame, method: str, over: str) -> tuple[float, float]:
    """How much lower the error of a method is than that of another in the same run: mean and standard error."""
    errors = runs.pivot(index="run", columns="method", values="error")
    difference = errors[over] - errors[method]
    return float(difference.mean()), float(difference.sem())


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    found = summary(tables["runs"])
    start = found["start"].iloc[0]
    shown = pd.DataFrame(
        {
            "method": [METHODS[method] for method in found.index],
            "rms error, m/s": _column(found, "error", "{:.1f}"),
            "step kept": found["step"].map("{:.0f}".format).to_list(),
            "shots not used": found["unused"].map("{:.1f}".format).to_list(),
            "rms sigma, m/s": _column(found, "sigma", "{:.1f}"),
            "correlation of sigma with |error|": _column(found, "correlation", "{:.2f}"),
            "of depth with |error|": _column(found, "depth", "{:.2f}"),
            f"covered by {LEVEL:.0%} intervals": _column(found, "covered", "{:.1%}"),
            "core seconds": found["seconds"].map("{:.0f}".format).to_list(),
        }
    )
    of = "One run" if config.seeds == 1 else f"Mean of {config.seeds} runs ± standard error"
    return {f"{of}; the start is off by {start:.1f} m/s": shown}


def _column(found: pd.DataFrame, name: str, form: str) -> list[str]:
    return [_text(row, name, form) for _, row in found.iterrows()]


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    return [_says_where(config, tables["runs"]), _lower_error(config, tables["runs"])]


def _says_where(config: Config, runs: pd.DataFrame) -> Verdict:
    found = summary(runs)
    own = runs[runs["method"] == SHOWN]
    beyond = own["correlation"] - own["depth"]
    sigma, mean, prior = found.loc[SHOWN], found.loc["mean"], found.loc["prior"]
    if config.seeds < FEW:
        status: Status = "undecided"
    elif not _clearly(own["correlation"]):
        status = "not held"
    else:
        status = "held" if _clearly(beyond) else "partly"
    return Verdict(
        "Uncertainty concentrates on poorly constrained regions and correlates with the reconstruction error.",
        "after Section 4.3, Figure 6, which has Gaussian kernels for waves",
        status,
        f"With the centered reset the correlation of sigma with |error| is {_text(sigma, 'correlation', '{:.2f}')} "
        f"({_text(mean, 'correlation', '{:.2f}')} with the mean reset); that of mere depth is "
        f"{_text(sigma, 'depth', '{:.2f}')}. Held would be: above 0 and above depth, each by three standard errors. As "
        f"a measure sigma is {sigma['sigma']:.0f} m/s where the error is {sigma['error']:.0f} m/s, and the {LEVEL:.0%} "
        f"intervals cover {sigma['covered']:.0%} of the cells. By its making sigma leaves out what both twins miss "
        f"alike, such as edges too sharp for waves of {config.frequency:g} Hz. With a floor by a prior the correlation "
        f"is {_text(prior, 'correlation', '{:.2f}')}, and the intervals cover {prior['covered']:.0%}.",
        ours=True,
    )


def _lower_error(config: Config, runs: pd.DataFrame) -> Verdict:
    found = summary(runs)
    gains = {over: gain(runs, SHOWN, over) for over in ("standard", "held out")}
    lower = [value > 3 * error for value, error in gains.values()]
    cost = found.loc[SHOWN, "seconds"] / found.loc["standard", "seconds"]
    status: Status = "held" if all(lower) else "partly" if any(lower) else "not held"
    if config.seeds < FEW:
        status = "undecided"
    against = ", ".join(
        f"{with_error(*gains[over], '{:+.1f}')} m/s against {METHODS[over]} ({found.loc[over, 'error']:.1f})"
        for over in gains
    )
    return Verdict(
        "Twin-Boot has a lower reconstruction error than the standard optimizer.",
        "after Section 4.3, Table 1, which has Gaussian kernels for waves",
        status,
        f"From {found.loc[SHOWN, 'start']:.1f} m/s at the start, the centered reset ends at "
        f"{_text(found.loc[SHOWN], 'error', '{:.1f}')} m/s and the mean reset at "
        f"{_text(found.loc['mean'], 'error', '{:.1f}')}. What the centered reset gains: {against}. It takes {cost:.1f} "
        "times as long as Adam on all shots (1.4 times in the paper).",
        ours=True,
    )


def _text(row: pd.Series, name: str, form: str) -> str:
    return with_error(row[name], row[f"{name}_error"], form)


def _clearly(values: pd.Series) -> bool:
    """Above 0 by three standard errors."""
    return bool(values.mean() > 3 * values.sem())


def figure(config: Config, tables: Tables) -> Figure:
    cells = tables["maps"]
    maps = {name: cells.pivot(index="row", columns="column", values=name) for name in cells.columns[2:]}
    error, sigma = (maps[SHOWN] - maps["truth"]).abs(), maps[f"{SHOWN} sigma"]
    height, width = error.shape
    drawn = Figure(figsize=(14, 3.9 + 2 * min(4.2 * height / width, 4.0)), layout="constrained")
    above, below = drawn.subplots(2, 3)
    low, high = maps["truth"].min().min(), maps["truth"].max().max()
    for axes, (title, name) in zip(above, {"Truth": "truth", "Start": "start", "Found": SHOWN}.items(), strict=True):
        image = _map(axes, config, maps[name], title, "viridis", low, high)
    drawn.colorbar(
        image, ax=above.tolist(), label="velocity, m/s", location="bottom", aspect=60, extend="both", extendfrac=0.015
    )
    top = max(error.stack().quantile(0.99), sigma.max().max())  # a few sharp edges would leave the rest in the dark
    for axes, title, values in zip(below, ("Sigma", "|Error|"), (sigma, error), strict=False):
        image = _map(axes, config, values, title, "magma", 0, top)
    drawn.colorbar(
        image,
        ax=below[:2].tolist(),
        label="sigma and |error| of the velocity, m/s",
        location="bottom",
        aspect=40,
        extend="max",
        extendfrac=0.02,
    )
    for axes in (above[0], below[0]):
        axes.set_ylabel("depth, km")
    _errors(below[2], tables["runs"])
    handles, labels = below[0].get_legend_handles_labels()
    shown = zip(
        "oo|", (*plots.TWINS, plots.ink()), ("error of a run of Adam", "of Twin-Boot", "mean of the runs"), strict=True
    )
    for mark, colour, text in shown:
        handles.append(Line2D([], [], marker=mark, ls="none", color=colour, ms=8, mew=1.5))
        labels.append(text)
    drawn.legend(handles, labels, loc="outside lower center", ncols=5)
    return drawn


def _map(
    axes: Axes, config: Config, values: pd.DataFrame, title: str, colors: str, low: float, high: float
) -> AxesImage:
    (height, width), km = values.shape, config.cell / 1000
    image = axes.imshow(
        values.to_numpy(), cmap=colors, vmin=low, vmax=high, extent=(0, width * km, height * km, 0), aspect="equal"
    )
    shots, receivers = ((places(count, width).numpy() + 0.5) * km for count in (config.shots, config.receivers))
    depth = (DEPTH + 0.5) * km
    axes.plot(shots, [depth] * len(shots), "*", color=plots.TRUTH, ms=7, mec="white", mew=0.5, label="shot")
    # In truth as deep as the shots; drawn above the section, where both can be seen.
    above = [-0.02 * height * km] * len(receivers)
    axes.plot(receivers, above, "v", color=plots.ink(), ms=4, clip_on=False, label="receiver")
    axes.set_title(title, pad=9)
    axes.set(xlabel="distance, km", xlim=(0, width * km), ylim=(height * km, 0))
    return image


def _errors(axes: Axes, runs: pd.DataFrame) -> None:
    runs = runs[runs["method"] != "prior"]  # whose field is that of the centered reset
    for place, (method, group) in enumerate(runs.groupby("method", sort=False)):
        axes.plot(group["error"].mean(), place, "|", color=plots.ink(), ms=16, mew=1.5)
        axes.plot(
            group["error"],
            [place] * len(group),
            "o",
            color=plots.TWINS[method in ("mean", "centered")],
            ms=6,
            alpha=0.8,
        )
        axes.text(0.02, place - 0.32, METHODS[str(method)], transform=axes.get_yaxis_transform(), fontsize=9)
    start = runs["start"].iloc[0]
    axes.axvline(start, color=plots.ink(), ls=":", lw=1.2)
    axes.text(start, place + 0.45, "start ", ha="right", fontsize=9)
    axes.set(ylim=(place + 0.6, -0.8), yticks=[], xlabel="rms error, m/s", title="Error by method")
    axes.margins(x=0.08)
