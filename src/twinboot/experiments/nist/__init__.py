"""Beyond the paper: NIST's nonlinear regressions, whose estimates are certified to eleven digits.

data.py reads the files. Standard errors by redrawn twins are compared with a classical bootstrap: many more samples,
each fitted anew from three starts, NIST's two and the certified values. The fit with the lowest loss counts.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from twinboot import Bootstrap, standard_errors

from ..._core.seeds import derive
from ...parameters.local import Locals
from ...parameters.newton import settle
from ...parameters.problem import Problem
from ...parameters.result import HEAVY, quantile_se
from .. import plots
from ..runner.experiment import Part, Tables, Tick, Verdict, one_thread, require_at_least, status
from .data import LAYOUT as LAYOUT
from .data import Set, read

TITLE = "NIST's nonlinear regressions"
QUESTION = "Does standard_errors find the certified estimates, and the standard errors of a classical bootstrap?"
CAPTION = (
    "Each dot is a parameter; sets with few samples are at the bottom. Its standard error is relative to that of a "
    "classical bootstrap of the same data, which fits each sample anew from three starts. Left: redrawn twins. "
    "Hollow: the draws run away, no standard error is given, and the dot is the one from quantiles. Middle: the "
    "sandwich, the limit for large samples. Right: NIST's standard deviations, which assume equal variances. Grey: "
    "within 15 %."
)
DIGITS = 6  # of an estimate, that count as found
NEAR = 0.15  # of a standard error, relative to that of the classical bootstrap: the roughness of 200 draws is 5 to 7 %
ENOUGH = 24 / 27  # the share of the sets that must be right
CHUNK = 1000  # classical fits at once
STEPS = 500  # most steps of a classical fit, from a start that may be far away


@dataclass(frozen=True, kw_only=True)
class Config:
    """Beyond the paper: NIST's 27 nonlinear regressions, from a directory of yours; two of them without one."""

    data: str | None = None
    """Directory with the files *.dat as NIST publishes them. By default two of them, which come with this package."""
    checksum: str = ""
    """SHA-256 of these files, computed when they are first read. A run does not resume with other files."""
    sets: tuple[str, ...] = ()
    """Names of the sets to use. By default all."""
    rounds: int = 100
    """Pairs of twins: 200 draws, with which a standard error is known to 5 % if the draws are normal."""
    fits: int = 2000
    """Samples of the classical bootstrap, each fitted from three starts: its standard errors are known to 1.6 %."""
    seed: int = 0
    """Of all samples."""

    def __post_init__(self) -> None:
        require_at_least(self, 2, "rounds")
        require_at_least(self, 50, "fits")
        if self.data is not None and not self.checksum:
            object.__setattr__(self, "checksum", checksum(self.data))


QUICK = Config(fits=300)


def checksum(directory: str) -> str:
    found = hashlib.sha256()
    for path in sorted(Path(directory).glob("*.dat")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def parts(config: Config) -> list[Part]:
    sets = read(config.data)
    if config.data is not None and checksum(config.data) != config.checksum:
        raise ValueError(f"{config.data} does not have the files that the checksum belongs to: were they changed?")
    if missing := [name for name in config.sets if name not in sets]:
        raise ValueError(f"there is no set {missing[0]!r}, only {', '.join(sets)}.")
    ticks = 2 + 3 * math.ceil(config.fits / CHUNK)
    return [Part(name, ticks, partial(_run, config, sets[name])) for name in config.sets or sets]


def _run(config: Config, own: Set, tick: Tick) -> dict[str, pd.DataFrame]:
    with one_thread():
        runs = []
        for number, start in enumerate(own.starts, 1):
            runs.append(_twins(config, own, number, start))
            tick()
        return {"twins": pd.concat(runs, ignore_index=True), "classical": _classical(config, own, tick)}


def _twins(config: Config, own: Set, number: int, start: Tensor) -> pd.DataFrame:
    """What standard_errors finds from a start, and what it says."""
    began, seed = time.process_time(), derive(config.seed, own.name, "twins")
    said: list[str] = []
    rows: dict[str, Any] = dict.fromkeys(("estimate", "se", "quantile_se", "sandwich"), math.nan)
    few = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = standard_errors(
                own.model(start), own.dataset(), "regression", rounds=config.rounds, seed=seed, progress=False
            )
        except (ValueError, FloatingPointError) as error:
            said.append(str(error))
        else:
            said += [str(one.message) for one in caught if one.category is UserWarning]
            few = any("so few" in note for note in found.notes)
            rows = {
                "estimate": _vector(found.estimate),
                "se": _vector(found.se),
                "quantile_se": _vector(found.quantile_se),
                "sandwich": found.sandwich().diagonal().sqrt().tolist(),
            }
    about = {"set": own.name, "level": own.level, "samples": len(own.dataset()), "start": number}
    frame = pd.DataFrame({"parameter": [f"b{k + 1}" for k in range(len(start))], "certified": own.certified.tolist()})
    frame = frame.assign(deviation=own.deviations.tolist(), **rows, **about, few=few, said=" ".join(said))
    return frame.assign(seconds=time.process_time() - began)


def _vector(named: dict[str, Tensor]) -> list[float]:
    return [value.item() for value in named.values()]


def _classical(config: Config, own: Set, tick: Tick) -> pd.DataFrame:
    """Standard errors from many samples, each fitted from NIST's starts and from the certified estimates; the fit with
    the lowest loss counts."""
    began = time.process_time()
    best: list[Tensor] = []
    settled: list[Tensor] = []
    for counts in _samples(config, own):
        fits = []
        for start in (*own.starts, own.certified):
            problem = Problem(own.model(start), own.dataset(), "regression")
            cold = problem.start.expand(len(counts), -1)
            fits.append(settle(Locals(problem), cold, counts, tolerance=1e-4, damping=1e-3, steps=STEPS))
            tick()
        lowest = torch.stack([fit.local.loss for fit in fits]).argmin(0)
        rows = torch.arange(len(counts))
        best.append(torch.stack([fit.members for fit in fits])[lowest, rows])
        settled.append(torch.stack([fit.done for fit in fits])[lowest, rows])
    draws, done = torch.cat(best), torch.cat(settled)
    spread = draws[done].std(0) if int(done.sum()) > 1 else torch.full_like(draws[0], math.nan)
    return pd.DataFrame(
        {
            "set": own.name,
            "parameter": [f"b{k + 1}" for k in range(draws.shape[1])],
            "se": spread.tolist(),
            "quantile_se": quantile_se(draws).tolist(),
            "lost": 1 - done.double().mean().item(),
            "seconds": time.process_time() - began,
        }
    )


def _samples(config: Config, own: Set) -> Iterator[Tensor]:
    n = len(own.dataset())
    counts = Bootstrap(n, config.fits, derive(config.seed, own.name, "classical")).counts.double()
    yield from counts.split(CHUNK)


def scores(tables: Tables) -> pd.DataFrame:
    """A row for each parameter, from the better start of its set: digits, and standard errors relative to those of the
    classical bootstrap."""
    twins = _with_words(tables["twins"])
    error = (twins["estimate"] / twins["certified"] - 1).abs().clip(lower=1e-11)
    twins["digits"] = (-error.map(math.log10)).fillna(0.0).clip(lower=0.0)
    by_start = twins.groupby(["set", "start"], sort=False)["digits"].min().unstack("start").fillna(0.0)
    better = by_start.idxmax(axis=1)  # the first if they are equal
    own = twins[twins["start"] == twins["set"].map(better)]
    merged = own.merge(tables["classical"], on=["set", "parameter"], suffixes=("", "_classical"))
    for column in ("se", "sandwich", "deviation"):
        merged[f"{column}_ratio"] = merged[column] / merged["se_classical"]
    merged["tails"] = merged["se_classical"] / merged["quantile_se_classical"]
    merged["quantile_ratio"] = merged["quantile_se"] / merged["quantile_se_classical"]
    merged["first"] = merged["set"].map(by_start[1])
    merged["second"] = merged["set"].map(by_start[2])
    return merged


def _with_words(twins: pd.DataFrame) -> pd.DataFrame:
    """Where nothing was said, a table that was read from a file has NaN."""
    said = twins["said"].astype(object)
    return twins.assign(said=said.where(said.notna(), ""))


def verdict_of(own: pd.DataFrame) -> str:
    """What became of a set, by the rows of its parameters: "right", "said", "few", "rare" or "wrong"."""
    near = (own["se_ratio"] - 1).abs() <= NEAR
    found = own["digits"].min() >= DIGITS
    if found and bool(near.all()):
        return "right"
    if own["said"].iloc[0]:
        return "said"
    if bool(own["few"].iloc[0]):
        return "few"
    return "rare" if found and bool((near | (own["tails"] > HEAVY)).all()) else "wrong"


WORDS = {
    "right": "right",
    "said": "not right, and it says so",
    "few": "not right, with the note that samples are few",
    "rare": "not right and not said, but the classical spread is that of a few rare samples",
    "wrong": "wrong",
}


def figure(config: Config, tables: Tables) -> Figure:
    found = scores(tables)
    sizes = found.groupby("set")["samples"].first().sort_values(ascending=False, kind="stable")
    names = list(sizes.index)
    drawn = Figure(figsize=(12, max(4.4, 1.8 + 0.27 * len(names))), layout="constrained")
    panels = drawn.subplots(1, 3, sharey=True, sharex=True)
    shown = ("se_ratio", "sandwich_ratio", "deviation_ratio")
    titles = ("Redrawn twins", "Sandwich", "NIST, equal variances")
    for axes, column, title, colour in zip(panels, shown, titles, plots.SERIES, strict=False):
        _dots(axes, found, names, column, colour)
        axes.set(title=title, xscale="log")
        axes.axvspan(1 / (1 + NEAR), 1 + NEAR, color=plots.ink(), alpha=0.08, lw=0)
        axes.axvline(1, color=plots.ink(), lw=1)
        axes.grid(axis="y", alpha=0.4)
    ticks = (0.25, 0.5, 1, 2, 4)
    panels[0].set(yticks=range(len(names)), yticklabels=[f"{name} ({sizes[name]})" for name in names])
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    panels[0].set_xlim(0.2, 5)
    panels[0].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panels[0].minorticks_off()
    drawn.supxlabel("standard error, relative to that of the classical bootstrap (beyond the axis: at its end)")
    return drawn


def _dots(axes: Axes, found: pd.DataFrame, names: list[str], column: str, colour: str) -> None:
    rows = found["set"].map({name: place for place, name in enumerate(names)})
    away = found["se"].isna() if column == "se_ratio" else pd.Series(False, index=found.index)
    values = found[column].where(~away, found["quantile_ratio"]).clip(0.21, 4.8)
    axes.scatter(values[~away], rows[~away], s=22, color=colour)
    axes.scatter(values[away], rows[away], s=22, facecolors="none", edgecolors=colour)


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    found = scores(tables)
    groups = [(str(name), own) for name, own in found.groupby("set", sort=False)]
    estimates = pd.DataFrame(
        [
            {
                "set": name,
                "difficulty": own["level"].iloc[0],
                "samples": own["samples"].iloc[0],
                "parameters": len(own),
                "digits from start 1": f"{own['first'].iloc[0]:.1f}",
                "digits from start 2": f"{own['second'].iloc[0]:.1f}",
            }
            for name, own in groups
        ]
    )
    errors = pd.DataFrame(
        [
            {
                "set": name,
                "twins": _range(own["se_ratio"]),
                "twins, from quantiles": _range(own["quantile_ratio"]),
                "sandwich": _range(own["sandwich_ratio"]),
                "NIST": _range(own["deviation_ratio"]),
                "classical, spread / from quantiles": _range(own["tails"]),
                "classical fits without a minimum": f"{100 * own['lost'].iloc[0]:.1f} %",
                "core s, twins": f"{own['seconds'].iloc[0]:.1f}",
                "core s, classical": f"{own['seconds_classical'].iloc[0]:.1f}",
                "verdict": WORDS[verdict_of(own)],
            }
            for name, own in groups
        ]
    )
    said = pd.DataFrame(
        [
            {"set": name, "start": start, "what it says": own["said"].iloc[0]}
            for (name, start), own in _with_words(tables["twins"]).groupby(["set", "start"], sort=False)
            if own["said"].iloc[0]
        ],
        columns=["set", "start", "what it says"],
    )
    return {
        "Estimates: correct digits of the worst parameter": estimates,
        "Standard errors from the better start, relative to the classical bootstrap: least to most": errors,
        "What standard_errors says": said,
    }


def _range(values: pd.Series) -> str:
    known = values.dropna()
    if known.empty:
        return "none"
    ends = f"{known.min():.2f} to {known.max():.2f}"
    return ends if len(known) == len(values) else f"{ends}; none for {len(values) - len(known)}"


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    found = scores(tables)
    groups = {str(name): own for name, own in found.groupby("set", sort=False)}
    digits = {name: own["digits"].min() for name, own in groups.items()}
    kinds = {name: verdict_of(own) for name, own in groups.items()}
    good = [name for name, value in digits.items() if value >= DIGITS]
    right = [name for name, kind in kinds.items() if kind == "right"]
    steady = [name for name, own in groups.items() if bool((own["tails"] <= HEAVY).all())]
    sets, few = len(groups), config.rounds < 50 or config.fits < 500
    by_kind = "; ".join(
        f"{words}: {', '.join(name for name, kind in kinds.items() if kind == key) or 'none'}"
        for key, words in WORDS.items()
        if key != "right"
    )
    deviations = (found["se_ratio"] - 1).abs().dropna()
    quantiles = (found["quantile_ratio"] - 1).abs().dropna()
    return [
        Verdict(
            f"From the better of two starts, estimates have {DIGITS} digits.",
            "not in the paper",
            status(len(good) >= ENOUGH * sets, len(good) >= sets / 2),
            f"In {len(good)} of {sets} sets; the least is {min(digits.values()):.1f} digits "
            f"({min(digits, key=lambda name: digits[name])}).",
            ours=True,
        ),
        Verdict(
            f"Standard errors from {config.rounds} rounds are within {NEAR:.0%} of those of a classical bootstrap.",
            "not in the paper",
            status(len(right) >= ENOUGH * sets, len(right) >= sets / 2, few),
            f"For all parameters in {len(right)} of {sets} sets; of the {len(steady)} whose classical draws have no "
            f"heavy tails, in {len(set(steady) & set(right))} ({by_kind}). Median of the differences over all "
            f"parameters: {deviations.median():.1%}; from quantiles {quantiles.median():.1%}.",
            ours=True,
        ),
        Verdict(
            "None is wrong without a word.",
            "not in the paper",
            status(not {"wrong", "rare"} & set(kinds.values()), "wrong" not in kinds.values(), few),
            f"{by_kind[0].upper()}{by_kind[1:]}. Rare: the standard deviation of the {config.fits} classical draws is "
            f"more than {HEAVY} times that from their quantiles, because of samples that {2 * config.rounds} draws "
            "need not contain.",
            ours=True,
        ),
    ]
