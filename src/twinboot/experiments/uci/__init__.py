"""Beyond the paper: nine regression sets of the literature on Bayesian networks, with their standard splits.

data.py reads the file, methods.py has the settings and the methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..._core.seeds import derive
from .. import plots
from ..datasets.array_files import checksum
from ..intervals import interval, with_error
from ..runner.experiment import Part, Tables, Tick, UnavailableError, Verdict, one_thread, status
from .data import LAYOUT, Table, read, split
from .methods import LEVEL, METHODS, Config, score, single, twins

__all__ = ["CAPTION", "QUESTION", "QUICK", "TITLE", "Config", "figure", "numbers", "parts", "verdicts"]

TITLE = "Nine regression sets"
QUESTION = "Does Twin-Boot predict better than a network that is stopped by a hold-out, and are its intervals right?"
CAPTION = (
    "Left and middle: root mean squared error and negative log-likelihood on the test rows, minus those of the single "
    "network that a hold-out stops, on the same splits. Left of the line is better. Beyond the grey strip the axis is "
    f"logarithmic, because two sets differ far more than the others. Right: share of test rows in their {LEVEL:.0%} "
    "intervals. Bars are 95 % intervals over the splits; these share rows, so the true intervals are somewhat wider."
)
QUICK = Config(splits=3, updates=1000, epochs=10)
FEW = 5  # with fewer splits, an interval over them says little
COLOURS = dict(zip(METHODS, (plots.SERIES[0], plots.SERIES[3], plots.SERIES[1], plots.SERIES[2]), strict=True))
MARKERS = dict(zip(METHODS, "osD^", strict=True))
COLUMNS = {"rmse": "RMSE, target's units", "nll": "NLL, nats"}


def parts(config: Config) -> list[Part]:
    """The first split of each set, then the second of each, and so on."""
    if config.data is None:
        raise UnavailableError(f"uci needs a file that is not part of this package: give --data FILE, {LAYOUT}.")
    tables = read(config.data)
    if checksum(config.data) != config.checksum:
        raise ValueError(f"{config.data} is not the file that the checksum belongs to: was it changed?")
    if missing := [name for name in config.sets if name not in tables]:
        raise ValueError(f"{config.data} has no set {missing[0]!r}, only {', '.join(tables)}.")
    return [
        Part(f"{name} {which}", 3, partial(_run, config, name, tables[name], which))
        for which in range(config.splits)
        for name in config.sets or tables
        if which < len(tables[name].test)
    ]


def _run(config: Config, name: str, table: Table, which: int, tick: Tick) -> dict[str, pd.DataFrame]:
    data, seed = split(table, which), derive(config.seed, name, which)
    with one_thread():
        found = {"single": single(config, data, seed)}
        tick()
        found["all"] = single(config, data, seed, epochs=found["single"].epoch)
        tick()
        found |= twins(config, data, seed)
        tick()
    rows = [
        {"set": name, "split": which, "method": method, "rows": len(data.train_x), "inputs": data.train_x.shape[1]}
        | score(found[method], data.test_y, data.unit)
        for method in METHODS
    ]
    return {"runs": pd.DataFrame(rows)}


def figure(config: Config, tables: Tables) -> Figure:
    runs, sets = tables["runs"], list(tables["runs"]["set"].unique())
    drawn = Figure(figsize=(14.5, 2.2 + 0.6 * len(sets)), layout="constrained")
    errors, likelihoods, covered = drawn.subplots(1, 3, sharey=True)
    others = [method for method in METHODS if method != "single"]
    _dots(errors, others, _wide(runs, "rmse"), lambda own, single: 100 * (own - single) / single.mean())
    _dots(likelihoods, others, _wide(runs, "nll"), lambda own, single: own - single)
    _dots(covered, list(METHODS), _wide(runs, "covered"), lambda own, single: 100 * own)
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


def _dots(axes: Axes, methods: list[str], sets: dict[str, pd.DataFrame], value: Callable[..., pd.Series]) -> None:
    """For each set, a dot with a 95 % interval for each method, one below the other. `value` is a function of the
    method's values and those of the single network."""
    for place, wide in enumerate(sets.values()):
        for row, method in enumerate(methods):
            mean, half = interval(value(wide[method], wide["single"]))
            height = place + 0.2 * (row - (len(methods) - 1) / 2)
            label = METHODS[method] if place == 0 else None
            marker, colour = MARKERS[method], COLOURS[method]
            axes.errorbar(mean, height, xerr=half, fmt=marker, color=colour, ms=5, lw=1.5, label=label)
        if place:
            axes.axhline(place - 0.5, color=plots.ink(), lw=0.4, alpha=0.3)
    axes.grid(axis="x", alpha=0.5)


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    runs = tables["runs"]
    found = {f"{title}: mean over splits ± standard error": _means(runs, column) for column, title in COLUMNS.items()}
    found[f"Test rows that {LEVEL:.0%} intervals hold: mean over splits ± standard error"] = _means(
        runs.assign(covered=100 * runs["covered"]), "covered", " %"
    )
    found["Twin-Boot minus the single network with a hold-out, same splits: mean ± standard error"] = _paired(runs)
    found["Means over splits"] = _about(runs)
    return found


def _means(runs: pd.DataFrame, column: str, unit: str = "") -> pd.DataFrame:
    sets = _wide(runs, column)
    shown: dict[str, list[Any]] = {"set": list(sets), "splits": list(map(len, sets.values()))}
    for method, name in METHODS.items():
        shown[name + unit] = [_rounded(wide[method]) for wide in sets.values()]
    return pd.DataFrame(shown)


def _rounded(values: pd.Series, sign: str = "") -> str:
    """A mean with two significant digits of its standard error."""
    mean, error = values.mean(), values.sem()
    digits = 2 if not error > 0 else min(max(1 - math.floor(math.log10(error)), 0), 6)
    return with_error(mean, error, f"{{:{sign}.{digits}f}}")


def _wide(runs: pd.DataFrame, column: str) -> dict[str, pd.DataFrame]:
    """For each set, the values of a column with a row for each split and a column for each method."""
    sets = runs.groupby("set", sort=False)
    return {str(name): own.pivot(index="split", columns="method", values=column) for name, own in sets}


def _paired(runs: pd.DataFrame) -> pd.DataFrame:
    shown: dict[str, list[str]] = {"set": list(runs["set"].unique())}
    for column, title in COLUMNS.items():
        for method in ("mean", "draws"):
            heading = f"{title.split(',')[0]}, {METHODS[method].split(', ')[1]}"
            shown[heading] = [_rounded(wide[method] - wide["single"], "+") for wide in _wide(runs, column).values()]
    return pd.DataFrame(shown)


def _about(runs: pd.DataFrame) -> pd.DataFrame:
    wide = runs.groupby(["set", "method"], sort=False).mean(numeric_only=True).unstack("method")
    shown = {"set": wide.index, "training rows": wide["rows"]["single"].map("{:.0f}".format).to_list()}
    for title, column in (("trained on", "used"), ("epoch kept", "epoch"), ("core s", "seconds")):
        for who, method in (("single", "single"), ("twins", "mean")):
            form = "{:.1f}" if column == "seconds" else "{:.0f}"
            shown[f"{title}, {who}"] = wide[column][method].map(form.format).to_list()
    draws = wide["spread"]["draws"] ** 2
    share = draws / (draws + wide["noise"]["draws"] ** 2)
    return pd.DataFrame(shown | {"share of the draws in the variance": share.map("{:.0%}".format).to_list()})


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    runs = tables["runs"]
    few = bool(runs.groupby("set")["split"].nunique().min() < FEW)
    return [
        _lower(runs, few, "rmse", "mean", "The mean of the twins has a lower error than a network with a hold-out."),
        _lower(runs, few, "nll", "draws", "Draws around the mean have a lower NLL than a network with a hold-out."),
        _covering(runs, few),
    ]


def clearly_apart(runs: pd.DataFrame, column: str, method: str, other: str = "single") -> tuple[list[str], list[str]]:
    """The sets in which a method is clearly lower than another on the same splits, and clearly higher."""
    found = {name: interval(wide[method] - wide[other]) for name, wide in _wide(runs, column).items()}
    lower = [name for name, (mean, half) in found.items() if mean + half < 0]
    return lower, [name for name, (mean, half) in found.items() if mean - half > 0]


def _lower(runs: pd.DataFrame, few: bool, column: str, method: str, claim: str) -> Verdict:
    """Held: clearly lower in more than half of the sets, clearly higher in none. Partly: in more sets than not."""
    lower, higher = clearly_apart(runs, column, method)
    sets = runs["set"].nunique()
    beaten, beating = map(len, clearly_apart(runs, column, method, "all"))
    return Verdict(
        claim,
        "not in the paper",
        status(not higher and len(lower) > sets / 2, len(lower) > len(higher), few),
        f"Clearly lower for {', '.join(lower) or 'none'}; the single network wins clearly for "
        f"{', '.join(higher) or 'none'}; of {sets} sets. Against a single network on all rows for as many epochs, "
        f"whose noise is that of its training residuals: clearly lower in {beaten}, clearly higher in {beating}. "
        "Clearly: beyond the 95 % interval over the splits.",
        ours=True,
    )


def _covering(runs: pd.DataFrame, few: bool) -> Verdict:
    share = {method: runs[runs["method"] == method].groupby("set", sort=False)["covered"].mean() for method in METHODS}
    near = {method: int(((found - LEVEL).abs() <= 0.02).sum()) for method, found in share.items()}
    sets = len(share["draws"])
    evidence = "; ".join(
        f"{METHODS[method]}: {found.min():.1%} ({found.idxmin()}) to {found.max():.1%} ({found.idxmax()}), within two "
        f"points in {near[method]} of {sets}"
        for method, found in share.items()
    )
    return Verdict(
        f"{LEVEL:.0%} intervals of Twin-Boot's draws hold {LEVEL:.0%} of new measurements.",
        "not in the paper",
        status(near["draws"] == sets, near["draws"] >= sets / 2, few),
        f"{evidence}.",
        ours=True,
    )
