"""Table 1 of the paper, in a setting in which its numbers arise, and why they arise there.

The paper does not state the true field, the noise, beta, the kernels, where their centres lie, or the test
measurements. Here training measurements crowd around the middle of the field and test measurements lie everywhere. Adam
divides a gradient by its own size. A cell that is seen through the tails of a few kernels therefore moves as fast as
any other, driven by the noise of those few; test measurements see where it went. Weight noise makes the signs of such
small gradients random, so those cells stay near the start. A larger eps of Adam keeps them there too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ... import Bootstrap
from ..._core import seeds
from .. import plots
from ..intervals import change, interval, with_error, with_interval
from ..runner.experiment import (
    Part,
    Tables,
    Tick,
    Verdict,
    one_thread,
    overall,
    require_at_least,
    require_positive,
    status,
)
from .descent import Method, Schedule, State, covered_text, scores, train
from .kernels import HOLD_OUT, MIN_WIDTH, SIDE, Problem, Setting, field, kernels, respond

TITLE = "Table 1: where Twin-Boot beats Adam, and why"
QUESTION = "In which setting do the numbers of Table 1 arise, and what makes the difference there?"
CAPTION = (
    "Above, for the first seed: the true field; how well training measurements see each cell (the diagonal of K'K); "
    "the absolute error of Adam, of Twin-Boot by the paper's protocol, and of Adam with a larger eps. Adam's errors "
    "are where training measurements hardly reach. Below left: the six numbers of Table 1, here and in the paper; "
    "bars are 95 % intervals of the mean over the seeds. Below right: the error of cells by how well they are seen; "
    "the start is the initial field."
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Table 1: training measurements around the middle of the field, test measurements everywhere."""

    rows: int = 400
    """Training measurements. Section 4.3 has 4,096 measurements, but not how many of them are for training."""
    test_rows: int = 800
    """Test measurements; their centres are uniform over the field. Not stated."""
    centres: float = 6.2
    """Standard deviation in cells of the training centres around the middle of the field. Not stated; with a uniform
    density Twin-Boot has no gain (twinboot regimes)."""
    noise: float = 0.018
    """Standard deviation of the noise. Not stated; Adam's training loss is then the paper's 0.0002."""
    beta: float = 0.65
    """The response is tanh(beta v). Not stated; nearly linear for this field."""
    width: float = 1.5
    """Of the Gaussian kernels, in cells. Not stated."""
    blobs: int = 4
    """The true field is a sum of so many Gaussian blobs of either sign, and zero elsewhere. Not stated."""
    peak: float = 0.4
    """Height of a blob. Not stated."""
    size: float = 3.5
    """Standard deviation of a blob, in cells. Not stated."""
    scatter: float = 5.0
    """Standard deviation in cells of the blobs' places around the middle. Not stated."""
    initial: float = 0.06
    """Standard deviation of the initial field, white noise. Not stated; Twin-Boot's error is mostly this noise."""
    steps: int = 8000
    """Full batches. Not stated."""
    lr: float = 0.001
    """Learning rate of Adam at the start. Appendix A.6."""
    last_lr: float = 0.0003
    """And at the end: it decays exponentially (Appendix A.6), but how far is not stated."""
    first_reset: int = 50
    """Steps to the first reset. Appendix A.6; its intervals are adaptive, here each is twice the one before."""
    eps: float = 1e-4
    """Of Adam in the control; its default is 1e-8."""
    fixed: float = 0.06
    """Standard deviation of the noise in the control with noise of a fixed size on a single field."""
    seeds: int = 25
    """Runs of each method, each with its own field, kernels, noise and start. Table 1."""
    seed: int = 0
    """Of everything random."""

    def __post_init__(self) -> None:
        positive = ("centres", "noise", "beta", "width", "peak", "size", "scatter", "lr", "last_lr", "eps", "fixed")
        require_positive(self, *positive)
        require_at_least(self, 0, "initial")
        require_at_least(self, 1, "blobs", "steps", "first_reset")
        require_at_least(self, 2, "seeds")
        require_at_least(self, 50, "rows", "test_rows")
        require_at_least(self, MIN_WIDTH, "width")
        if self.last_lr > self.lr:
            raise ValueError(f"last_lr must be at most lr ({self.lr}), not {self.last_lr}.")


# Four times the learning rate and a quarter of the steps.
QUICK = Config(seeds=3, steps=2000, lr=0.004, last_lr=0.0012)

# Table 1: mean and half of the 95 % interval over 25 seeds.
PAPER = {
    "Adam": {"train": (0.0002, 0.0), "test": (0.0315, 0.0150), "error": (0.0338, 0.0058)},
    "Twin-Boot": {"train": (0.0007, 0.0004), "test": (0.0032, 0.0011), "error": (0.0098, 0.0014)},
}
COLUMNS = {"train": "train loss", "test": "test loss", "error": "error of the field (MSE)"}
# A row of the table: its name -> the run, and the state of it.
ROWS = {
    "Adam": ("standard", "last"),
    "Twin-Boot": ("sample", "last"),
    "Adam, larger eps": ("eps", "last"),
    "Adam, noise of a fixed size": ("fixed", "last"),
    "Adam, stopped by a hold-out": ("hold-out", "clear"),
    "Twin-Boot, sampling reset, stopped by unseen": ("sample", "clear"),
    "Twin-Boot, centered reset, to the end": ("centered", "last"),
    "Twin-Boot, centered reset, stopped by unseen": ("centered", "clear"),
}
ADAM, TWINS, EPS, FIXED, *_ = ROWS
DRAWN = (ADAM, TWINS, EPS, FIXED)
HERE, BENT, EVERYWHERE = "as above", "beta 2", "a field of sd 0.3 everywhere"
SETTINGS = {HERE: tuple(dict.fromkeys(run for run, _ in ROWS.values()))}
SETTINGS |= dict.fromkeys((BENT, EVERYWHERE), ("standard", "sample", "eps"))


def parts(config: Config) -> list[Part]:
    return [
        Part(f"{setting} {run}", config.steps, partial(_run, config, setting, run))
        for setting, runs in SETTINGS.items()
        for run in runs
    ]


def methods(config: Config) -> dict[str, Method]:
    return {
        "standard": Method(),
        "hold-out": Method(hold_out=True),
        "eps": Method(eps=config.eps),
        "fixed": Method(fixed=config.fixed),
        "sample": Method(2, mode="sample"),
        "centered": Method(2, mode="centered"),
    }


def schedule(config: Config) -> Schedule:
    decay = (config.last_lr / config.lr) ** (1 / config.steps)
    return Schedule(config.steps, config.lr, decay, config.first_reset, growth=2.0)


def problems(config: Config, setting: str = HERE) -> list[Problem]:
    config = replace(config, beta=2.0) if setting == BENT else config
    return [problem(config, config.seed * 1_000_000 + k, setting == EVERYWHERE) for k in range(config.seeds)]


def problem(config: Config, seed: int, everywhere: bool = False) -> Problem:
    """For the same seed the blobs, the centres, the noise and the start are the same in all settings."""
    c, middle = config, (SIDE - 1) / 2
    generator = torch.Generator().manual_seed(seeds.derive(seed, "table"))
    draw = partial(torch.randn, generator=generator)
    truth = bumps(middle + c.scatter * draw(c.blobs, 2), c.size, c.peak * draw(c.blobs).sign())
    measured = kernels((middle + c.centres * draw(c.rows, 2)).clamp(0, SIDE - 1), c.width)
    test_kernels = kernels((SIDE - 1) * torch.rand(c.test_rows, 2, generator=generator), c.width)
    noise, test_noise, initial = draw(c.rows), draw(c.test_rows), c.initial * draw(SIDE, SIDE)
    shuffled = torch.randperm(c.rows, generator=generator)
    if everywhere:
        truth = field(4.0, 0.3, generator)  # as smooth as that of `twinboot seismic`
    u = respond("tanh", c.beta * truth).flatten()
    return Problem(
        Setting(c.rows, c.noise, c.beta, c.width, spread=1.0),
        truth,
        measured,
        measured @ u + c.noise * noise,
        test_kernels,
        test_kernels @ u + c.noise * test_noise,
        Bootstrap(c.rows, 2, seeds.derive(seed, "bootstrap")),
        shuffled[: round(HOLD_OUT * c.rows)],
        initial,
    )


def bumps(centres: Tensor, size: float, peaks: Tensor) -> Tensor:
    """The sum of Gaussian bumps of these heights."""
    cells = torch.arange(SIDE, dtype=centres.dtype)
    down, across = (torch.exp(-((cells - c[:, None]) ** 2) / (2 * size**2)) for c in centres.T)
    return torch.einsum("k,ki,kj->ij", peaks, down, across)


def _run(config: Config, setting: str, run: str, tick: Tick) -> dict[str, pd.DataFrame]:
    given, method = problems(config, setting), methods(config)[run]
    with one_thread():
        states = train(given, method, schedule(config), config.seed, tick)
    rows = [row for row, (of, _) in ROWS.items() if of == run and (setting == HERE or row in (ADAM, TWINS, EPS))]
    frames = [scores(given, states[ROWS[row][1]], method).assign(method=row, seed=range(config.seeds)) for row in rows]
    tables = {"runs": pd.concat(frames, ignore_index=True).assign(setting=setting)}
    if setting == HERE and rows[0] in DRAWN:
        tables["seen"] = by_seen(given, states["last"]).assign(method=rows[0])
        tables["maps"] = _cells(given[0], states["last"]).assign(method=rows[0])
    return tables


def seen(problem: Problem) -> Tensor:
    """How well the training measurements see each cell: the diagonal of K'K."""
    return problem.kernels.square().sum(0).view(SIDE, SIDE)


def by_seen(given: list[Problem], state: State) -> pd.DataFrame:
    """The cells of each problem in ten parts by how well they are seen: the mean squares of the error and of that of
    the start. Means over the problems."""
    found = []
    for p, own in zip(given, state.field, strict=True):
        order = seen(p).flatten().argsort()
        for part, cells in enumerate(order.chunk(10), start=1):
            error, start = ((values - p.truth).flatten()[cells].square().mean().item() for values in (own, p.initial))
            found.append({"decile": part, "error2": error, "start2": start})
    return pd.DataFrame(found).groupby("decile", as_index=False).mean()


def _cells(problem: Problem, state: State) -> pd.DataFrame:
    """The maps of the first seed, a row for each cell."""
    down, across = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    columns = {"down": down, "across": across, "truth": problem.truth, "seen": seen(problem)}
    columns |= {"field": state.field[0], "sigma": state.sigma[0]}
    return pd.DataFrame({name: values.flatten().numpy() for name, values in columns.items()})


def _of(tables: Tables, method: str, setting: str = HERE) -> pd.DataFrame:
    runs = tables["runs"]
    return runs[(runs["setting"] == setting) & (runs["method"] == method)]


def _wide(tables: Tables, setting: str, column: str) -> pd.DataFrame:
    runs = tables["runs"]
    return runs[runs["setting"] == setting].pivot(index="seed", columns="method", values=column)


def named(config: Config, method: str) -> str:
    """The name of a row for readers, with the sizes that the config has."""
    sizes = {EPS: f"Adam, eps {config.eps:g}", FIXED: f"Adam, noise of a fixed {config.fixed:g}"}
    return sizes.get(method, f"{method} as in the paper" if method == TWINS else method)


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    table = []
    for method, paper in PAPER.items():
        for column, title in COLUMNS.items():
            ours = interval(_of(tables, method)[column])
            row = {"method": method, "": title, "here": with_error(*ours, "{:.4f}")}
            row |= {"paper": with_error(*paper[column], "{:.4f}")}
            table.append(row | {"agree": "yes" if alike(ours, paper[column]) else "no"})
    rows = []
    for method in ROWS:
        own = _of(tables, method)
        row = {"method": named(config, method)}
        row |= {title: with_interval(own[column], "{:.4f}") for column, title in COLUMNS.items()}
        row |= {"step kept": f"{own['step'].mean():.0f}"}
        twins = method.startswith(TWINS)
        row |= {"correlation of sigma, |error|": with_interval(own["correlation"], "{:.2f}") if twins else ""}
        rows.append(row | {"50, 90, 95 % intervals hold": covered_text(own) if twins else ""})
    elsewhere = []
    for setting in SETTINGS:
        for method in (ADAM, TWINS, EPS):
            own, row = _of(tables, method, setting), {"setting": setting, "method": named(config, method)}
            elsewhere.append(row | {title: with_interval(own[name], "{:.4f}") for name, title in COLUMNS.items()})
    deciles = tables["seen"].pivot(index="decile", columns="method", values="error2").pow(0.5)
    start = tables["seen"].groupby("decile")["start2"].mean().pow(0.5)
    spread = f"mean of {config.seeds} seeds ± half of its 95 % interval"
    return {
        f"Table 1, {spread}": pd.DataFrame(table),
        f"All methods, {spread}": pd.DataFrame(rows),
        f"In other settings, {spread}": pd.DataFrame(elsewhere),
        "Root mean square error of cells, by how well training measurements see them": pd.DataFrame(
            {"decile, worst seen first": deciles.index}
            | {named(config, method): deciles[method].map("{:.3f}".format).to_list() for method in DRAWN}
            | {"the start": start.map("{:.3f}".format).to_list()}
        ),
    }


def alike(ours: tuple[float, float], paper: tuple[float, float]) -> bool:
    """Whether two means with half 95 % intervals differ by no more than those of their difference, or than the paper's
    last digit.

    >>> alike((0.0046, 0.0007), (0.0032, 0.0011)), alike((0.0101, 0.0007), (0.0098, 0.0014))
    (False, True)
    """
    digit = 0.00005
    return abs(ours[0] - paper[0]) <= max(math.hypot(ours[1], paper[1]), digit)


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    few = config.seeds < 10

    def against(method: str, other: str, column: str = "error", setting: str = HERE) -> tuple[str, bool]:
        """The change on the same seeds as text, and whether it is clearly lower."""
        mean, half = change(_wide(tables, setting, column), method, other)
        return with_error(mean, half, "{:+.0%}"), mean + half < 0

    (error, lower), (test, lower_test) = against(TWINS, ADAM), against(TWINS, ADAM, "test")
    errors = _wide(tables, HERE, "error")
    wins = int((errors[TWINS] < errors[ADAM]).sum())
    same = [alike(interval(_of(tables, m)[c]), paper[c]) for m, paper in PAPER.items() for c in COLUMNS]
    eps, eps_lower = against(EPS, TWINS)
    eps_test, eps_test_lower = against(EPS, TWINS, "test")
    fixed, _ = against(FIXED, ADAM)
    elsewhere = {setting: against(TWINS, ADAM, setting=setting) for setting in (BENT, EVERYWHERE)}
    told = " and ".join(
        f"{text} with {setting} (the test loss by {against(TWINS, ADAM, 'test', setting)[0]})"
        for setting, (text, _) in elsewhere.items()
    )
    mse = tables["seen"].pivot(index="decile", columns="method", values="error2")
    share = mse.loc[[1, 2, 3], ADAM].sum() / mse[ADAM].sum()
    twins = _of(tables, TWINS)
    correlation, half = interval(twins["correlation"])
    return [
        Verdict(
            "With the sampling reset, run to the end, Twin-Boot has a lower reconstruction error and test loss than "
            "Adam.",
            "Section 4.3, Table 1",
            status(lower and lower_test, lower or lower_test, few),
            f"The error of the field changes by {error} against Adam on the same seeds, the test loss by {test}; in "
            f"the paper by {_paper_change('error'):+.0%} and {_paper_change('test'):+.0%}. Twin-Boot has the lower "
            f"error in {wins} of {config.seeds} seeds. What the paper does not state was chosen so that this arises.",
        ),
        Verdict(
            "Table 1 has these six losses and errors.",
            "Table 1",
            "undecided" if few else overall(same),
            f"{sum(same)} of 6 numbers agree within the 95 % interval of the difference, by the intervals of both.",
        ),
        Verdict(
            "The gain comes from cells that training measurements hardly see, where Adam follows noise; a larger eps "
            "avoids it without twins.",
            "the reason for Table 1",
            status(eps_lower and eps_test_lower and share > 0.5, eps_lower or eps_test_lower or share > 0.5, few),
            f"The three worst seen tenths of the cells have {share:.0%} of Adam's squared error. With eps "
            f"{config.eps:g}, Adam's error is {eps} and its test loss {eps_test} against Twin-Boot. Noise of a fixed "
            f"size on a single field changes Adam's error by {fixed}.",
            ours=True,
        ),
        Verdict(
            "The gain is there only if the truth is near the start where data are weak, and the response is not bent.",
            "the limits of Table 1",
            status(
                not any(lower for _, lower in elsewhere.values()), not all(low for _, low in elsewhere.values()), few
            ),
            f"Twin-Boot changes the error of the field by {told}.",
            ours=True,
        ),
        Verdict(
            "Sigma correlates with the error of the reconstruction.",
            "Section 4.3, Figure 6",
            status(correlation > 0.5, correlation > half, few),
            f"Correlation {correlation:.2f} ± {half:.2f} over the cells by the paper's protocol. Intervals of 90 % "
            f"hold the truth in {twins['covered_0.9'].mean():.0%} of the cells.",
        ),
    ]


def _paper_change(column: str) -> float:
    return PAPER[TWINS][column][0] / PAPER[ADAM][column][0] - 1


def figure(config: Config, tables: Tables) -> Figure:
    drawn = Figure(figsize=(15, 8.4), layout="constrained")
    grid = drawn.add_gridspec(2, 1, height_ratios=[1, 1.35])
    above, below = drawn.add_subfigure(grid[0]), drawn.add_subfigure(grid[1])
    _draw_maps(above, config, tables["maps"])
    left, right = below.subplots(1, 2, width_ratios=[1.15, 1])
    _draw_table(left, tables)
    _draw_seen(right, config, tables["seen"])
    handles, labels = (a + b for a, b in zip(*(x.get_legend_handles_labels() for x in (left, right)), strict=True))
    below.legend(handles, labels, loc="outside lower center", ncols=7, fontsize="medium")
    return drawn


def _draw_maps(drawn: SubFigure, config: Config, cells: pd.DataFrame) -> None:
    def grid(method: str, column: str) -> pd.DataFrame:
        return cells[cells["method"] == method].pivot(index="down", columns="across", values=column)

    truth, weight = grid(ADAM, "truth"), grid(ADAM, "seen")
    errors = {method: (grid(method, "field") - truth).abs() for method in (ADAM, TWINS, EPS)}
    limit, top = truth.abs().max().max(), errors[ADAM].stack().quantile(0.98)
    low = 1e-3  # far below one measurement; the corners are not seen at all
    panels = drawn.subplots(1, 5)
    signed = panels[0].imshow(truth, "RdBu_r", vmin=-limit, vmax=limit)
    panels[0].set_title("Truth")
    counted = panels[1].imshow(weight.clip(lower=low), "viridis", norm=LogNorm(low, weight.max().max()))
    panels[1].set_title("Seen by training\nmeasurements")
    for axes, (method, error) in zip(panels[2:], errors.items(), strict=True):
        wrong = axes.imshow(error, "magma", vmin=0, vmax=top)
        axes.set_title(f"|error| of\n{named(config, method)}")
    for axes in panels:
        axes.set(xlabel="cell", xticks=[0, 10, 20], yticks=[0, 10, 20])
    bar = partial(drawn.colorbar, location="bottom", shrink=0.9)
    bar(signed, ax=panels[0], label="field v", ticks=MaxNLocator(4))
    bar(counted, ax=panels[1], label="diagonal of K'K", extend="min")
    bar(wrong, ax=panels[2:].tolist(), label="|error| of v", extend="max", aspect=50)


def _draw_table(axes: Axes, tables: Tables) -> None:
    places, names = [], []
    for k, (column, title) in enumerate(COLUMNS.items()):
        for j, (method, colour) in enumerate(zip(PAPER, plots.TWINS, strict=True)):
            place = 2.6 * k + j
            places.append(place)
            names.append(f"{title.removesuffix(' (MSE)')}\n{method}")
            for shift, mark, (mean, half) in (
                (-0.14, "o", interval(_of(tables, method)[column])),
                (0.14, "s", PAPER[method][column]),
            ):
                # On a log axis an interval must stay above 0.
                error = [[min(half, 0.9 * mean)], [half]]
                filled: Any = {"mfc": colour if mark == "o" else "none", "mec": colour, "ecolor": colour}
                axes.errorbar([mean], [place + shift], xerr=error, fmt=mark, ms=8, mew=1.6, capsize=4, **filled)
    for mark, name, fill in (("o", "here", plots.ink()), ("s", "in the paper", "none")):
        axes.plot([], [], mark, mec=plots.ink(), mfc=fill, ms=8, mew=1.6, label=name)
    axes.set(title="The six numbers of Table 1", xscale="log", xlabel="mean square (units of the data, or of v)")
    axes.set_yticks(places, names)
    axes.set_xticks([1e-4, 1e-3, 1e-2, 1e-1], ["0.0001", "0.001", "0.01", "0.1"])
    axes.set_xlim(8e-5, 0.15)
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.grid(axis="x")


def _draw_seen(axes: Axes, config: Config, deciles: pd.DataFrame) -> None:
    for method, colour in zip(DRAWN, plots.SERIES, strict=True):
        own = deciles[deciles["method"] == method]
        axes.plot(own["decile"], own["error2"].pow(0.5), "o-", color=colour, label=named(config, method))
    start = deciles.groupby("decile")["start2"].mean().pow(0.5)
    axes.plot(start.index, start, ":", color=plots.ink(), label="the start")
    axes.set(title="Error by how well cells are seen", ylabel="root mean square error of v", yscale="log")
    axes.set(xlabel="tenth of the cells, from worst to best seen", xticks=range(1, 11))
    axes.set_yticks(*plots.log_ticks(*axes.get_ylim()))
    axes.minorticks_off()
    axes.grid(axis="y")
