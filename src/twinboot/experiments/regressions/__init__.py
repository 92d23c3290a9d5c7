"""Beyond the paper: regressions whose standard errors are known, over many data sets.

tasks.py has the data, the closed forms and the robust standard errors of statsmodels.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from twinboot import standard_errors

from ..._core.extras import how_to_install
from ..._core.seeds import derive
from .. import plots
from ..runner.experiment import (
    Part,
    Tables,
    Tick,
    UnavailableError,
    Verdict,
    agrees,
    one_thread,
    overall,
    refuse_repeated,
    require_at_least,
    status,
)
from .tasks import TASKS, TRUTH, Line

TITLE = "Regressions with known standard errors"
QUESTION = "Are standard errors by redrawn twins right, and do their intervals hold the true parameters?"
LEVEL = 0.95
NEAR = 0.02  # of the level: a coverage that counts as right
LARGE = 200  # samples from which coverage is judged
CAPTION = (
    "Left: the mean standard error over the data sets, relative to the standard deviation of the estimates over these "
    f"sets; a dot for each parameter. Right: the share of {LEVEL:.0%} intervals that hold the true parameter, mean "
    "over the parameters, with a 95 % interval over the data sets; grey is within two points."
)
WAYS = {"t": "twins, Student's t", "percentile": "twins, percentile", "bca": "twins, BCa", "robust": "statsmodels"}
PARAMETERS = ("intercept", "slope[0]", "slope[1]")
CHUNK = 50  # data sets of a part
ENOUGH = 200  # data sets for a verdict: the coverage of three parameters is then known to about a point


@dataclass(frozen=True, kw_only=True)
class Config:
    """Beyond the paper: standard errors and intervals in regressions whose standard errors are known."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Kinds of regression: linear, logistic, poisson, clusters, series."""
    sizes: tuple[int, ...] = (50, 200, 1000)
    """Numbers of samples. Coverage is judged from 200 on."""
    sets: int = 200
    """Data sets of each kind and size: the mean coverage of three parameters is then known to a point."""
    rounds: int = 100
    """Pairs of twins for each data set."""
    seed: int = 0
    """Of all data and samples."""

    def __post_init__(self) -> None:
        refuse_repeated(self, "tasks", "sizes")
        require_at_least(self, 50, "rounds")
        require_at_least(self, 2, "sets")
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"unknown task {unknown[0]!r}: use {', '.join(TASKS)}.")
        if min(self.sizes) < 50:
            raise ValueError(f"sizes must be at least 50, not {min(self.sizes)}.")


QUICK = Config(sizes=(200,), sets=10)


def parts(config: Config) -> list[Part]:
    if importlib.util.find_spec("statsmodels") is None:
        raise UnavailableError(f"regressions needs statsmodels, to compare with: {how_to_install('compare')}")
    return [
        Part(f"{task} {n} {first}", count, partial(_run, config, task, n, first, count))
        for n in config.sizes
        for task in config.tasks
        for first in range(0, config.sets, CHUNK)
        for count in [min(CHUNK, config.sets - first)]
    ]


def _run(config: Config, task: str, n: int, first: int, count: int, tick: Tick) -> dict[str, pd.DataFrame]:
    frames = []
    with one_thread():
        for number in range(first, first + count):
            frames.append(_one(config, task, n, number))
            tick()
    return {"runs": pd.concat(frames, ignore_index=True)}


def _one(config: Config, task: str, n: int, number: int) -> pd.DataFrame:
    kind, seed = TASKS[task], derive(config.seed, task, n, number)
    sample = kind.draw(np.random.default_rng(seed), n)
    bootstrap = sample.bootstrap(derive(seed, "twins"))
    columns: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small logistic data sets, whose draws run away: counted below
        try:
            found = standard_errors(
                Line(),
                sample.dataset(),
                kind.loss,
                rounds=config.rounds,
                replicas=2 * config.rounds,
                bootstrap=bootstrap,
                progress=False,
            )
        except (ValueError, FloatingPointError):
            columns = dict.fromkeys(("estimate", "se", "quantile_se"), math.nan)
            columns |= dict.fromkeys(("t", "percentile", "bca"), math.nan)
        else:
            columns = {"estimate": _flat(found.estimate), "se": _flat(found.se)}
            columns["quantile_se"] = _flat(found.quantile_se)
            for way in ("t", "percentile", "bca"):
                low, high = (_flat(end) for end in found.interval(LEVEL, way))
                held = [float(a <= true <= b) for a, true, b in zip(low, TRUTH, high, strict=True)]
                columns[way] = [math.nan if math.isnan(a) else one for a, one in zip(low, held, strict=True)]
        try:
            estimate, robust = kind.robust(sample)
        except Exception:  # statsmodels has many names for data that do not determine a fit
            estimate, robust = np.full(3, math.nan), np.full(3, math.nan)
    inside = (np.abs(estimate - TRUTH) <= 1.959964 * robust).astype(float)
    columns |= {"robust_se": robust, "robust": np.where(np.isnan(robust), math.nan, inside)}
    about = {"task": task, "n": n, "set": number, "parameter": PARAMETERS, "closed": kind.closed(n)}
    return pd.DataFrame({**about, **columns})


def _flat(named: dict[str, torch.Tensor]) -> list[float]:
    return torch.cat([value.reshape(-1) for value in named.values()]).tolist()


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each task, size and parameter."""
    rows = []
    for (n, task, parameter), own in runs.groupby(["n", "task", "parameter"], sort=False):
        spread = own["estimate"].std()
        rows.append(
            {
                "n": n,
                "task": task,
                "parameter": parameter,
                "spread": spread,
                "closed": own["closed"].mean() / spread,
                "se": own["se"].mean() / spread,
                "quantile_se": own["quantile_se"].mean() / spread,
                "robust_se": own["robust_se"].mean() / spread,
                "scatter": own["se"].std() / own["se"].mean(),
                "robust_scatter": own["robust_se"].std() / own["robust_se"].mean(),
                "missing": own["se"].isna().mean(),
                **{way: own[way].mean() for way in WAYS},
            }
        )
    return pd.DataFrame(rows)


def coverage(runs: pd.DataFrame) -> pd.DataFrame:
    """For each task and size, and each way: the mean coverage over the parameters, and its standard error."""
    rows = []
    for (n, task), own in runs.groupby(["n", "task"], sort=False):
        row: dict[str, Any] = {"n": n, "task": task}
        for way in WAYS:
            each = own.groupby("set")[way].mean()
            row |= {way: each.mean(), f"{way}_error": each.sem()}
        rows.append(row)
    return pd.DataFrame(rows)


def figure(config: Config, tables: Tables) -> Figure:
    found, held = summary(tables["runs"]), coverage(tables["runs"])
    places = {(row.n, row.task): place for place, row in enumerate(held.itertuples())}
    height = max(4.4, 2.2 + 0.36 * len(places))
    drawn = Figure(figsize=(12, height), layout="constrained")
    ratios, covered = drawn.subplots(1, 2, sharey=True)
    where = [places[key] for key in zip(found["n"], found["task"], strict=True)]
    dots = (("se", "twins", 0.14), ("robust_se", "statsmodels", -0.14), ("closed", "closed form, large samples", 0.0))
    for (column, label, off), colour in zip(dots, plots.SERIES, strict=False):
        ratios.plot(found[column], np.array(where) + off, "o", ms=5, color=colour, label=label)
    ratios.axvline(1, color=plots.ink(), lw=1)
    ratios.set(title="Standard error / spread of the estimates", yticks=range(len(places)), xlabel="ratio")
    ratios.set_yticklabels([f"{TASKS[task].title}, n = {n}" for n, task in places])
    ratios.set_ylim(len(places) - 0.5, -0.5)
    for place, (way, label) in enumerate(WAYS.items()):
        error = 100 * 1.96 * held[f"{way}_error"]
        heights = np.arange(len(places)) + 0.16 * (place - 1.5)
        colour = plots.SERIES[(0, 2, 3, 1)[place]]
        covered.errorbar(100 * held[way], heights, xerr=error, fmt="o", ms=4, lw=1.2, color=colour, label=label)
    covered.axvline(100 * LEVEL, color=plots.ink(), lw=1)
    covered.axvspan(100 * (LEVEL - NEAR), 100 * (LEVEL + NEAR), color=plots.ink(), alpha=0.08, lw=0)
    covered.set(title=f"Coverage of {LEVEL:.0%} intervals", xlabel="%", xlim=(None, min(100.5, covered.get_xlim()[1])))
    for axes in (ratios, covered):
        axes.grid(axis="x", alpha=0.5)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.5 / (height - 1.9)), ncols=2)
    return drawn


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    found, held = summary(tables["runs"]), coverage(tables["runs"])
    ratios = pd.DataFrame(
        {
            "samples": found["n"],
            "regression": [TASKS[task].title for task in found["task"]],
            "parameter": found["parameter"],
            "twins": found["se"].map("{:.3f}".format),
            "twins, from quantiles": found["quantile_se"].map("{:.3f}".format),
            "statsmodels": found["robust_se"].map("{:.3f}".format),
            "closed form": found["closed"].map("{:.3f}".format),
            "scatter, twins": found["scatter"].map("{:.1%}".format),
            "scatter, statsmodels": found["robust_scatter"].map("{:.1%}".format),
            "no standard error": found["missing"].map("{:.1%}".format),
        }
    )
    columns = {
        label: [f"{100 * a:.1f} ± {100 * b:.1f}" for a, b in zip(held[way], held[f"{way}_error"], strict=True)]
        for way, label in WAYS.items()
    }
    about = {"samples": held["n"], "regression": [TASKS[task].title for task in held["task"]]}
    return {
        "Mean standard error / standard deviation of the estimates, and the scatter of a standard error": ratios,
        f"Coverage of {LEVEL:.0%} intervals, %: mean over the parameters ± standard error": pd.DataFrame(
            about | columns
        ),
    }


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    found, held = summary(tables["runs"]), coverage(tables["runs"])
    few = config.sets < ENOUGH
    large, wide = held[held["n"] >= LARGE], found[found["n"] >= LARGE]
    off = (large["t"] - LEVEL).abs()
    near = off <= NEAR
    # The spread of the estimates is itself known to 1 / sqrt(2 (sets - 1)).
    answers = [agrees(ratio, ratio / math.sqrt(2 * (config.sets - 1))) for ratio in wide["se"]]
    ranges = "; ".join(
        f"{label} {100 * large[way].min():.1f} to {100 * large[way].max():.1f} %" for way, label in WAYS.items()
    )
    worst = large.loc[off.idxmax()] if len(large) else None
    at = "" if worst is None else f" Furthest for Student's t: {TASKS[worst['task']].title}, n = {worst['n']}."
    return [
        Verdict(
            f"From {LARGE} samples on, {LEVEL:.0%} intervals by Student's t cover {LEVEL:.0%} to within 2 points.",
            "not in the paper",
            status(bool(near.all()), near.mean() >= 0.5, few or not len(large)),
            f"In {int(near.sum())} of {len(large)} cases. {ranges}.{at}",
            ours=True,
        ),
        Verdict(
            f"From {LARGE} samples on, standard errors are on average the spread of the estimates.",
            "not in the paper",
            "undecided" if few or not answers else overall(answers),
            f"Up to 5 % or three standard errors, for {sum(map(bool, answers))} of {len(wide)} parameters: "
            f"{wide['se'].min():.3f} to {wide['se'].max():.3f} of it. The spread itself is known to "
            f"{1 / math.sqrt(2 * (config.sets - 1)):.1%}. statsmodels: {wide['robust_se'].min():.3f} to "
            f"{wide['robust_se'].max():.3f}.",
            ours=True,
        ),
    ]
