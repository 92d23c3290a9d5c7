"""Beyond the paper: nine regression sets of the literature on Bayesian networks, with their standard splits.

data.py reads the file, methods.py has the settings and the methods, figure.py draws.
"""

from __future__ import annotations

import math
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from ..._core.seeds import derive
from ..datasets.array_files import checksum
from ..intervals import interval, with_error
from ..runner.experiment import Part, Status, Tables, Tick, UnavailableError, Verdict, one_thread
from .data import LAYOUT, Table, read, split
from .figure import draw
from .methods import LEVEL, METHODS, Config, on_all, score, single, twins

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
        found["all"] = on_all(config, data, seed, found["single"].epoch)
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
    return draw(tables["runs"])


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
    first = runs[runs["method"] == "single"].groupby("set", sort=False)
    shown = {"set": list(first.groups), "splits": first["split"].nunique().to_list()}
    for method, name in METHODS.items():
        own = runs[runs["method"] == method].groupby("set", sort=False)[column]
        shown[name + unit] = [_rounded(mean, error) for mean, error in zip(own.mean(), own.sem(), strict=True)]
    return pd.DataFrame(shown)


def _rounded(mean: float, error: float, sign: str = "") -> str:
    """A mean with two significant digits of its error."""
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
            differences = [wide[method] - wide["single"] for wide in _wide(runs, column).values()]
            heading = f"{title.split(',')[0]}, {METHODS[method].split(', ')[1]}"
            shown[heading] = [_rounded(values.mean(), values.sem(), "+") for values in differences]
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
    status: Status = "partly" if len(lower) > len(higher) else "not held"
    if not higher and len(lower) > sets / 2:
        status = "held"
    beaten, beating = map(len, clearly_apart(runs, column, method, "all"))
    return Verdict(
        claim,
        "not in the paper",
        "undecided" if few else status,
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
    status: Status = "held" if near["draws"] == sets else "partly" if near["draws"] >= sets / 2 else "not held"
    evidence = "; ".join(
        f"{METHODS[method]}: {found.min():.1%} ({found.idxmin()}) to {found.max():.1%} ({found.idxmax()}), within two "
        f"points in {near[method]} of {sets}"
        for method, found in share.items()
    )
    return Verdict(
        f"{LEVEL:.0%} intervals of Twin-Boot's draws hold {LEVEL:.0%} of new measurements.",
        "not in the paper",
        "undecided" if few else status,
        f"{evidence}.",
        ours=True,
    )
