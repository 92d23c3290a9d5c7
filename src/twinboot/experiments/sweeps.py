"""Figure 3: does sigma follow the data (their number and noise), and not the optimizer (its rate and batches)?

One setting is varied at a time, all others stay at the config's. See `landscape.py` for the loss, how a datum enters
it, the exact sigma of a well and the paper's line. The root mean square of sigma over the seeds is what theory speaks
of; the mean, which the paper draws, is lower: E[sigma] = 0.886 sqrt(E[sigma^2]) for two weights of equal variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .. import plots
from ..seeds import derive
from .experiment import Part, Tables, Tick, Verdict
from .landscape import Datum, Mode, Setting, exact_line, paper_line, steps, train

TITLE = "Two wells: what sigma depends on"
QUESTION = "Does sigma follow the number and the noise of the data as theory says, whatever the optimizer's settings?"
CAPTION = (
    "Final sigma when one setting varies. Dots: root mean square over the seeds, with two standard errors. Band: mean "
    "± standard deviation over the seeds, as in the paper. Line: exact for many data. Dashed: the paper's line. "
    "Dotted: the value that the setting has in the other panels."
)
DATA: tuple[Datum, ...] = ("shift", "tilt", "matched")
# Each swept field of the config, what it is called in a figure, and which of the config's fields lists its values.
SWEEPS = {
    "size": ("number of data M", "sizes"),
    "noise": ("noise of the data $\\sigma_{data}$", "noises"),
    "rate": ("learning rate", "rates"),
    "batch": ("mini-batch size", "batches"),
}


@dataclass(frozen=True, kw_only=True)
class Config(Setting):
    """Figure 3: final sigma against the number of data, their noise, the learning rate and the batch size."""

    start: tuple[float, float] = (0.4, 0.6)
    """Where the twins start. Not stated; on the slope of one well, so that the well is not in question."""
    reset: Mode = "mean"
    """Kind of reset (Appendix A.3: mean-reset mode)."""
    sizes: tuple[int, ...] = (50, 100, 200, 400, 800, 1600, 3200)
    """Numbers of data M."""
    noises: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    """Standard deviations of the data."""
    rates: tuple[float, ...] = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
    """Learning rates."""
    batches: tuple[int, ...] = (2, 5, 10, 20, 50, 100, 200, 400)
    """Sizes of mini-batches; the last is the full batch."""
    seeds: int = 200
    """Runs for each point, each with its own data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds < 2:
            raise ValueError(f"seeds must be at least 2, not {self.seeds}.")
        for _ in points(self):  # each checks itself
            pass


def points(config: Config) -> Iterator[tuple[str, Setting]]:
    """The sweep's name and the setting of each point; then the three ways a datum may enter, with all else alike."""
    base = Setting(**{name: getattr(config, name) for name in Setting.__dataclass_fields__})
    for name, (_, values) in SWEEPS.items():
        for i, value in enumerate(getattr(config, values)):
            # Data of its own for each size and noise; the same data for all rates and batches, to compare them.
            seed = derive(config.seed, name, i) if name in ("size", "noise") else config.seed
            yield name, replace(base, **{name: value, "seed": seed})
    for datum in DATA:
        yield "datum", replace(base, datum=datum)


QUICK = Config(
    seeds=100, sizes=(50, 200, 800), noises=(0.1, 0.3, 0.5), rates=(0.025, 0.1, 0.4), batches=(5, 20, 100, 400)
)


def parts(config: Config) -> list[Part]:
    for _, setting in points(config):
        exact_line(setting)  # now rather than after the work: it may find that there are no two wells
    return [
        Part(f"{name}-{getattr(setting, name)}", steps(setting), partial(_point, config, name, setting))
        for name, setting in points(config)
    ]


def _point(config: Config, name: str, setting: Setting, tick: Tick) -> dict[str, pd.DataFrame]:
    run = train(setting, config.start, config.seeds, config.reset, tick)
    wells = run.wells(setting.width)
    columns = {
        "sweep": name,
        "value": str(getattr(setting, name)),
        "seed": range(config.seeds),
        "sigma": run.sigma.tolist(),
        "one_well": ((wells[0] == wells[1]) & (wells[0] >= 0)).tolist(),
    }
    return {"sigma": pd.DataFrame(columns)}


def summary(config: Config, sigma: pd.DataFrame) -> pd.DataFrame:
    """For each point: rms, mean and standard deviation of sigma, the error of the rms, and both lines."""
    found = dict(iter(sigma.groupby(["sweep", sigma["value"].astype(str)])))
    rows = []
    for name, setting in points(config):
        group = found[name, str(getattr(setting, name))]
        squared = group["sigma"].pow(2)
        rms, exact = math.sqrt(squared.mean()), exact_line(setting)
        error = squared.std() / math.sqrt(len(squared)) / 2 / rms
        rows.append(
            {
                "sweep": name,
                "value": getattr(setting, name),
                "rms": rms,
                "error": error,
                "mean": group["sigma"].mean(),
                "std": group["sigma"].std(),
                "exact": exact,
                "paper": paper_line(setting),
                "z": (rms - exact) / error,
                "apart": 1 - group["one_well"].mean(),
            }
        )
    return pd.DataFrame(rows)


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    found = summary(config, tables["sigma"])
    shown = pd.DataFrame(
        {
            "setting": [f"{name} = {value}" for name, value in zip(found["sweep"], found["value"], strict=True)],
            "rms sigma": [f"{r:.5f} ± {e:.5f}" for r, e in zip(found["rms"], found["error"], strict=True)],
            "exact": found["exact"].map("{:.5f}".format),
            "rms / exact": (found["rms"] / found["exact"]).map("{:.3f}".format),
            "in standard errors": found["z"].map("{:+.1f}".format),
            "rms / paper's line": (found["rms"] / found["paper"]).map("{:.2f}".format),
            "mean ± std over seeds": [f"{m:.4f} ± {s:.4f}" for m, s in zip(found["mean"], found["std"], strict=True)],
            "not in one well": found["apart"].map("{:.0%}".format),
        }
    )
    return {f"{config.seeds} runs for each point": shown}


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    found = summary(config, tables["sigma"])
    return [
        _scaling(found),
        _flat(found, "rate", "learning rate"),
        _flat(found, "batch", "mini-batch size"),
        _dashed(found),
    ]


def _scaling(found: pd.DataFrame) -> Verdict:
    """All points together: if the line is right, the sum of z^2 is chi-squared, with as many degrees as points."""
    data = found[found["sweep"].isin(["size", "noise"])]
    off, total, degrees = data[data["z"].abs() > 3], data["z"].pow(2).sum(), len(data)
    fits = total < degrees + 3 * math.sqrt(2 * degrees)
    within = [(data["z"].abs() <= k).sum() for k in (1, 2)]
    return Verdict(
        "Sigma scales with the noise of the data and with 1 / sqrt(M).",
        "Section 4.1, Figure 3",
        "held" if fits and off.empty else "partly" if len(off) < degrees / 3 else "not held",
        f"Of {degrees} points {within[0]} lie within one standard error of the exact line and {within[1]} within two "
        f"(by chance {0.683 * degrees:.0f} and {0.954 * degrees:.0f}); the sum of their squared deviations is "
        f"{total:.1f}, "
        f"expected {degrees}." + _outliers(off),
    )


def _flat(found: pd.DataFrame, name: str, what: str) -> Verdict:
    values = found[found["sweep"] == name]
    ratio, off = values["rms"] / values["exact"], values[values["z"].abs() > 3]
    good = ratio.drop(off.index)
    return Verdict(
        f"Sigma is largely invariant to the {what}.",
        "Section 4.1, Figure 3",
        "held" if off.empty else "partly" if len(off) < len(values) / 2 else "not held",
        f"Rms sigma is {good.min():.2f} to {good.max():.2f} of the exact line for {len(good)} of {len(values)} values, "
        "all on "
        "the same data." + _outliers(off),
    )


def _outliers(off: pd.DataFrame) -> str:
    """Which points lie off the line by more than three standard errors, and why."""
    said = []
    for row in off.itertuples():
        if row.apart > 0:
            why = f"in {row.apart:.0%} of the runs a twin has left the well: the steps are too large for it"
        elif row.rms < row.exact:
            why = "after the last reset there are too few steps to part as far as the data would have it"
        else:
            why = "the steps are still noisy at the end"
        said.append(f" At {row.sweep} = {row.value} it is {row.rms / row.exact:.2f} of the line: {why}.")
    return "".join(said)


def _dashed(found: pd.DataFrame) -> Verdict:
    ways = found[found["sweep"] == "datum"].set_index("value")
    share = {way: ways.loc[way, "rms"] / ways.loc[way, "paper"] for way in DATA}
    near = [abs(ratio - 1) < 3 * ways.loc[way, "error"] / ways.loc[way, "paper"] for way, ratio in share.items()]
    return Verdict(
        "Sigma matches the curvature-corrected line S(bw) sigma_data / sqrt(M).",
        "Section 4.1, Figure 3, and Appendix A.3",
        "held" if all(near) else "partly" if any(near) else "not held",
        "It depends on how a datum enters the loss, which the paper does not say. Rms sigma is "
        + ", ".join(f'{share[way]:.2f} times that line with "{way}"' for way in DATA)
        + ". The line is the exact one only if the gradients' covariance is proportional to the curvature.",
    )


def figure(config: Config, tables: Tables) -> Figure:
    drawn = Figure(figsize=(12.5, 9.5), layout="constrained")
    found = summary(config, tables["sigma"])
    for axes, name in zip(drawn.subplots(2, 2).flat, SWEEPS, strict=True):
        _draw(axes, config, found[found["sweep"] == name], name)
    return drawn


def _draw(axes: Axes, config: Config, points: pd.DataFrame, name: str) -> None:
    label, _ = SWEEPS[name]
    values = points["value"].astype(float)
    low = (points["mean"] - points["std"]).clip(lower=points["mean"] * 0.2)
    axes.fill_between(
        values, low, points["mean"] + points["std"], color=plots.SERIES[0], alpha=0.15, lw=0, label="mean ± std"
    )
    axes.plot(values, points["mean"], color=plots.SERIES[0], lw=0.8, alpha=0.6)
    axes.plot(values, points["exact"], color=plots.TRUTH, lw=1.6, label="exact (sandwich)")
    axes.plot(values, points["paper"], "--", color=plots.ink(), lw=1.2, label="paper's line")
    axes.errorbar(
        values,
        points["rms"],
        2 * points["error"],
        fmt="o",
        ms=6,
        color=plots.SERIES[0],
        capsize=3,
        label="rms over seeds",
    )
    axes.axvline(getattr(config, name), color=plots.ink(), ls=":", lw=1, alpha=0.6)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel=r"final $\sigma$")
    axes.set_title(f"{label[0].upper()}{label[1:]} varies")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    if name in ("rate", "batch"):  # as wide as the panels above, or wider for what is off
        exact = points["exact"].iloc[0]
        axes.set_ylim(exact / 5, max(exact * 5, points["rms"].max() * 3))
    axes.set_yticks(*_ticks(*axes.get_ylim()))
    axes.minorticks_off()
    axes.grid(alpha=0.5)
    axes.legend(loc="lower left" if name == "size" else "upper left", ncols=2)


def _ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """1, 2 and 5 of each decade, in plain figures."""
    found = [m * 10.0**e for e in range(-6, 3) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    return found, [f"{value:g}" for value in found]
