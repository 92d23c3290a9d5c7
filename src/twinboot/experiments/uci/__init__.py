"""Beyond the paper: nine regression sets of the literature on Bayesian networks, with their standard splits.

The file is read in `data.py`, the methods are in `methods.py`, the runs in `run.py`; here is what is said.
"""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from ..intervals import interval, with_error
from ..runner.experiment import Status, Tables, Verdict
from .config import QUICK, Config
from .figure import draw
from .methods import LEVEL, METHODS
from .run import parts

__all__ = ["CAPTION", "QUESTION", "QUICK", "TITLE", "Config", "figure", "numbers", "parts", "verdicts"]

TITLE = "Nine regression sets"
QUESTION = "Does Twin-Boot predict better than a network that is stopped by a hold-out, and are its intervals right?"
CAPTION = (
    "Left and middle: each method against the single network that is stopped by a hold-out, on the same splits: how "
    "its root mean squared error and its negative log-likelihood on the test rows differ; left of the line is better, "
    "and beyond the grey strip the axis is logarithmic, because two sets differ by far more than all others. "
    f"Right: how many test rows its {LEVEL:.0%} intervals hold. Bars are 95 % intervals over the splits, which share "
    "rows, so that in truth they are somewhat wider."
)
PLACE = "not in the paper"
FEW = 5  # splits, below which an interval over them says little
COLUMNS = {"rmse": "RMSE, target's units", "nll": "NLL, nats"}


def figure(config: Config, tables: Tables) -> Figure:
    return draw(tables["runs"])


def differences(runs: pd.DataFrame, column: str, method: str, other: str = "single") -> dict[str, tuple[float, float]]:
    """Of two methods on the same splits, for each set: the mean, and half of its 95 % interval."""
    found = {}
    for name, own in runs.groupby("set", sort=False):
        wide = own.pivot(index="split", columns="method", values=column)
        found[str(name)] = interval(wide[method] - wide[other])
    return found


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
    shown: dict[str, list[str]] = {}
    for method, name in METHODS.items():
        own = runs[runs["method"] == method].groupby("set", sort=False)[column]
        # As many digits as the least of the errors needs for two.
        shown[name + unit] = [
            with_error(mean, error, f"{{:.{_digits(error)}f}}")
            for mean, error in zip(own.mean(), own.sem(), strict=True)
        ]
    first = runs[runs["method"] == "single"].groupby("set", sort=False)
    return pd.DataFrame({"set": list(first.groups), "splits": first["split"].nunique().to_list(), **shown})


def _digits(error: float) -> int:
    """After the point, for two digits of an error that count."""
    return 2 if not error > 0 else min(max(1 - math.floor(math.log10(error)), 0), 6)


def _paired(runs: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for name, own in runs.groupby("set", sort=False):
        row = {"set": name}
        for column, title in COLUMNS.items():
            wide = own.pivot(index="split", columns="method", values=column)
            for method in ("mean", "draws"):
                difference = wide[method] - wide["single"]
                error = difference.sem()
                row[f"{title.split(',')[0]}, {METHODS[method].split(', ')[1]}"] = with_error(
                    difference.mean(), error, f"{{:+.{_digits(error)}f}}"
                )
        rows.append(row)
    return pd.DataFrame(rows)


def _about(runs: pd.DataFrame) -> pd.DataFrame:
    wide = runs.groupby(["set", "method"], sort=False).mean(numeric_only=True).unstack("method")
    draws = wide["spread"]["draws"] ** 2
    return pd.DataFrame(
        {
            "set": wide.index,
            "training rows": wide["rows"]["single"].map("{:.0f}".format).to_list(),
            "trained on, single": wide["used"]["single"].map("{:.0f}".format).to_list(),
            "trained on, twins": wide["used"]["mean"].map("{:.0f}".format).to_list(),
            "epoch kept, single": wide["epoch"]["single"].map("{:.0f}".format).to_list(),
            "epoch kept, twins": wide["epoch"]["mean"].map("{:.0f}".format).to_list(),
            "core s, single": wide["seconds"]["single"].map("{:.1f}".format).to_list(),
            "core s, twins": wide["seconds"]["mean"].map("{:.1f}".format).to_list(),
            "share of the draws in the variance": (draws / (draws + wide["noise"]["draws"] ** 2))
            .map("{:.0%}".format)
            .to_list(),
        }
    )


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    runs = tables["runs"]
    few = bool(runs.groupby("set")["split"].nunique().min() < FEW)
    return [
        _lower(runs, few, "rmse", "mean", "The mean of the twins has a lower error than a network with a hold-out."),
        _lower(runs, few, "nll", "draws", "Draws around the mean have a lower NLL than a network with a hold-out."),
        _covering(runs, few),
    ]


def _lower(runs: pd.DataFrame, few: bool, column: str, method: str, claim: str) -> Verdict:
    """Held: clearly lower in more than half of the sets, clearly higher in none. Partly: in more sets than not."""
    found = differences(runs, column, method)
    lower = [name for name, (mean, half) in found.items() if mean + half < 0]
    higher = [name for name, (mean, half) in found.items() if mean - half > 0]
    if few:
        status: Status = "undecided"
    elif not higher and len(lower) > len(found) / 2:
        status = "held"
    else:
        status = "partly" if len(lower) > len(higher) else "not held"
    against_all = differences(runs, column, method, "all")
    beaten = sum(mean + half < 0 for mean, half in against_all.values())
    beating = sum(mean - half > 0 for mean, half in against_all.values())
    return Verdict(
        claim,
        PLACE,
        status,
        f"Clearly lower for {_listed(lower)}; the single network wins clearly for {_listed(higher)}; of "
        f"{len(found)} sets. Against a single network on all rows for as many epochs, whose noise is that of its "
        f"training residuals: clearly lower in {beaten}, clearly higher in {beating}. Clearly: beyond the 95 % "
        "interval over the splits.",
        ours=True,
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def _covering(runs: pd.DataFrame, few: bool) -> Verdict:
    share = {method: runs[runs["method"] == method].groupby("set", sort=False)["covered"].mean() for method in METHODS}
    near = {method: int(((found - LEVEL).abs() <= 0.02).sum()) for method, found in share.items()}
    sets = len(share["draws"])
    status: Status = "held" if near["draws"] == sets else "partly" if near["draws"] >= sets / 2 else "not held"
    told = "; ".join(
        f"{METHODS[method]}: {found.min():.1%} ({found.idxmin()}) to {found.max():.1%} ({found.idxmax()}), within two "
        f"points in {near[method]} of {sets}"
        for method, found in share.items()
    )
    return Verdict(
        f"{LEVEL:.0%} intervals of Twin-Boot's draws hold {LEVEL:.0%} of new measurements.",
        PLACE,
        "undecided" if few else status,
        f"{told}.",
        ours=True,
    )
